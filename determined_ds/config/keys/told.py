"""The keys of one document that are ignored or refused, as problems."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from determined_ds.config.keys.deepspeed_json import DEEPSPEED, switched
from determined_ds.config.keys.experiment_yaml import EXPERIMENT
from determined_ds.config.keys.row import CLUSTER, DDP, IGNORED, REFUSED, RUN, Row, keys_that_are
from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import NOT_GIVEN, Problem

PROFILING: frozenset[KeyPath] = frozenset({("profiling",)})
_switched = cache(switched)


def not_looked_at(document: Document, place: int) -> list[Problem]:
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
    """The keys of a DeepSpeed JSON that cannot be honoured (errors), and those that nobody looks at (warnings)."""
    refused = keys_that_are(REFUSED, ds, RUN, DEEPSPEED, _switched())
    ignored = keys_that_are(IGNORED, ds, RUN, DEEPSPEED, _switched())
    return (
        [_problem(ds, row, path, "") for row, path in refused],
        [_problem(ds, row, path, "is ignored") for row, path in ignored],
    )


def ignored_by_ddp(ds: Document) -> list[Problem]:
    """A warning of the keys that DeepSpeed heeds and torch's DistributedDataParallel, measured beside it, does not."""
    found = keys_that_are(IGNORED, ds, DDP, DEEPSPEED, _switched())
    paths = [path for row, path in found if row.at[RUN] != IGNORED]
    return _together(ds, paths, "the strategy ddp is torch's alone; ignored in its rows", "ddp-only")


def _problem(document: Document, row: Row, path: KeyPath, said: str) -> Problem:
    value: Any = document.get(path, NOT_GIVEN)
    return Problem(
        key=document.key(path),
        value=NOT_GIVEN if isinstance(value, (dict, list)) else value,
        origin=document.origin(path),
        message=f"{said}: {row.why}" if said else row.why,
        fix=row.fix,
        code="ignored-key" if said else "refused-key",
    )


def _together(document: Document, paths: Sequence[KeyPath], said: str, code: str) -> list[Problem]:
    if not paths:
        return []
    keys = ", ".join(f"{document.key(path)} ({document.origin(path)})" for path in paths)
    return [Problem(key="", message=f"{said}: {keys}", code=code)]
