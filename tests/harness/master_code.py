"""What Determined 0.38.1's master refuses in code on creating an experiment, with no schema saying so.

Source: determined v0.38.1, ``master/pkg/schemas/expconf/*.go`` and ``master/internal/core_experiment.go``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tests.harness.master_schemas import as_json, sanity_errors

Json = Any
REMOVED_SEARCHERS = ("adaptive", "adaptive_simple", "custom", "sync_halving")
TIMED_SEARCHERS = ("adaptive_asha", "async_halving")


def create_errors(config: Mapping[str, Json]) -> list[str]:
    """What the master's code refuses on creating an experiment from a config that its schemas accept.

    Only what the config alone can tell, read from the source and not measured on a master. A config that is
    not sane gets sanity's errors instead.
    """
    if insane := sanity_errors(config):
        return insane
    return sorted(refusals_of_code(as_json(config)))


def refusals_of_code(config: dict[str, Json]) -> Iterator[str]:
    """The same for a config that is known to be sane."""
    resources = config.get("resources") or {}
    seed = (config.get("reproducibility") or {}).get("experiment_seed")
    names = Counter(policy.get("name") for policy in config.get("log_policies") or [])
    if config.get("entrypoint") is None:
        yield "<config>.entrypoint: managed experiments require entrypoint"
    if bool(config.get("workspace")) != bool(config.get("project")):
        yield "<config>: workspace and project must both be included in config if one is provided"
    if resources.get("slots") is not None:
        yield '<config>.resources: additionalProperties "slots" not allowed'
    if isinstance(resources.get("shm_size"), str):
        yield "<config>.resources.shm_size: is read as a number of bytes, though the schema takes a string"
    if seed is not None and seed >= 2**32:
        yield "<config>.reproducibility.experiment_seed: is read as a uint32"
    for device in resources.get("devices") or []:
        if isinstance(device, str) and device.count(":") > 2:
            yield f"<config>.resources.devices: {device} has more than three parts"
    for name in (name for name, count in names.items() if name is not None and count > 1):
        yield f'<config>.log_policies: log_policies have duplicated names "{name}"'
    searcher = config.get("searcher") or {}
    name = searcher.get("name")
    if name in REMOVED_SEARCHERS:
        yield f"<config>.searcher: the '{name}' searcher has been removed, not valid for new experiments"
    if name in TIMED_SEARCHERS and None in (searcher.get("max_time"), searcher.get("time_metric")):
        yield f"<config>.searcher: the `{name}` searcher requires `max_time` and `time_metric` to be set"
