"""The oracle's verdict of a config, where the cluster completes its ``checkpoint_storage``.

The oracle re-implements the master (tests/experiments).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tests.experiments import master_schemas as master
from tests.experiments.master_code import create_errors, refusals_of_code

Json = Any

# Complete, of each type.
CLUSTERS: list[dict[str, Json]] = [
    {"type": "shared_fs", "host_path": "/"},
    {"type": "directory", "container_path": "/data"},
    {"type": "s3", "bucket": "b"},
    {"type": "gcs", "bucket": "b"},
    {"type": "azure", "container": "c", "account_url": "u"},
]


def refusals(config: dict[str, Json]) -> Iterator[str]:
    """Why the master refuses a config, on the cluster that suits it best: nothing if it takes it.

    The verdict is that of ``errors`` and ``create_errors``, found faster: validators are made once, and stop at
    what is wrong first.
    """
    sanity, completeness = _validator(master._SanityValidator), _validator(master._CompletenessValidator)
    if not sanity.is_valid(config):
        yield "is not sane"
        return
    yield from refusals_of_code(config)
    kind = (config.get("checkpoint_storage") or CLUSTERS[0]).get("type")
    clusters = [cluster for cluster in CLUSTERS if kind in (None, cluster["type"])]
    if not any(completeness.is_valid(master.fill_defaults(config, checkpoint_storage=c)) for c in clusters):
        yield "is not complete"


@functools.cache
def _validator(kind: Any) -> Any:
    return kind(master.EXPERIMENT, registry=master._REGISTRY)


def slow_refusals(config: dict[str, Json], cluster: dict[str, Json]) -> list[str]:
    """As the oracle itself says it."""
    return [*master.errors(config, checkpoint_storage=cluster), *create_errors(config)]
