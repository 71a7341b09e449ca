"""What happens to each key that a user may write: honoured, refused, decided by the command, or ignored with a warning.

``experiment_yaml.py`` is the table of the experiment YAML and of the library's hyperparameters, ``deepspeed_json.py``
that of the DeepSpeed JSON. ``tests/config/keys`` enumerates every known key and finds a row for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from determined_ds.config.keys.fate import (
    CLUSTER,
    DDP,
    IGNORED,
    MEASURE,
    REFUSED,
    RUN,
    SEARCH,
    Fate,
    keys_that_are,
)
from determined_ds.config.keys.of_json import DEEPSPEED, switched
from determined_ds.config.keys.of_yaml import EXPERIMENT
from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import NOT_GIVEN, Problem

__all__ = ["CLUSTER", "MEASURE", "RUN", "SEARCH", "ignored_by_ddp", "ignored_keys", "json_problems"]

PROFILING: frozenset[KeyPath] = frozenset({("profiling",)})
_switched = cache(switched)


def ignored_keys(document: Document, place: int) -> list[Problem]:
    """A warning for each key of an experiment that is ignored in a place; one for all that are only a cluster's.

    Args:
        document: The experiment's YAML, overrides applied.
        place: ``RUN``, ``CLUSTER``, ``SEARCH`` or ``MEASURE``.
    """
    found = keys_that_are(IGNORED, document, place, EXPERIMENT, PROFILING)
    of_clusters = [path for row, path in found if row.only_on_a_cluster]
    others = [
        _problem(document, row, path, "is ignored" if place == CLUSTER else "is ignored here")
        for row, path in found
        if not row.only_on_a_cluster
    ]
    return [
        *_together(document, of_clusters, "applies only on a cluster; ignored here", "cluster-only"),
        *others,
    ]


def json_problems(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """The keys of a DeepSpeed JSON that cannot be honoured (errors), and those that are ignored (warnings)."""
    refused = keys_that_are(REFUSED, ds, RUN, DEEPSPEED, _switched())
    ignored = keys_that_are(IGNORED, ds, RUN, DEEPSPEED, _switched())
    return (
        [_problem(ds, row, path, "") for row, path in refused],
        [_problem(ds, row, path, "is ignored") for row, path in ignored],
    )


def ignored_by_ddp(ds: Document) -> list[Problem]:
    """A warning of the keys that DeepSpeed reads and torch's DistributedDataParallel, measured beside it, does not."""
    found = keys_that_are(IGNORED, ds, DDP, DEEPSPEED, _switched())
    paths = [path for row, path in found if row.at[RUN] != IGNORED]
    return _together(ds, paths, "the strategy ddp is torch's alone; ignored in its rows", "ddp-only")


def _problem(document: Document, row: Fate, path: KeyPath, what: str) -> Problem:
    value: Any = document.get(path, NOT_GIVEN)
    shown = NOT_GIVEN if isinstance(value, (dict, list)) else value
    message, code = (f"{what}: {row.why}", "ignored-key") if what else (row.why, "refused-key")
    return document.problem(path, message, row.fix, code, value=shown)


def _together(document: Document, paths: Sequence[KeyPath], what: str, code: str) -> list[Problem]:
    if not paths:
        return []
    keys = ", ".join(f"{document.key(path)} ({document.origin(path)})" for path in paths)
    return [Problem(key="", message=f"{what}: {keys}", code=code)]
