"""Which checkpoint of a run is the best: the one with the best validation of its batch, of equals the earlier."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from determined_ds.rundir.best import as_number
from determined_ds.rundir.checkpoint_files import Checkpoint, checkpoints_in
from determined_ds.rundir.metrics_file import Record, read_records
from determined_ds.rundir.run_dir import RunDir

Key = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """A validation that a checkpoint goes by.

    Args:
        value: Of ``searcher.metric``; None where it does not report it as a number.
        order: Grows with time, over all trials.
    """

    value: float | None
    order: Key


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A checkpoint with the validation after its batch, if there was one."""

    checkpoint: Checkpoint
    trial: int
    validation: Validation | None = None

    def quality(self, *, smaller_is_better: bool) -> Key:
        """The smaller the better; equal only for the same validation, and where there is none."""
        if self.validation is None:
            return (3,)
        value, order = self.validation.value, self.validation.order
        if value is None:
            return (2, *order)
        if math.isnan(value):
            return (1, *order)
        return (0, value if smaller_is_better else -value, *order)


def rated_in(run_dir: RunDir, trial: int, *, metric: str) -> list[Rated]:
    """The checkpoints of a run that can be read, each with its validation.

    Args:
        run_dir: The run directory.
        trial: Its number in the experiment.
        metric: ``searcher.metric``.
    """
    validations = validations_of(read_records(run_dir.metrics, "validation"), metric)
    return [
        Rated(checkpoint=found, trial=trial, validation=validations.get(found.steps_completed))
        for found in checkpoints_in(run_dir.checkpoints)
        if found.steps_completed >= 0
    ]


def validations_of(records: Iterable[Record], metric: str, *, first: int = 0) -> dict[int, Validation]:
    """Batch -> the validation after it, the last one where it was repeated.

    Args:
        records: Of validations.
        metric: ``searcher.metric``.
        first: How many were read before these.
    """
    found = {}
    for index, record in enumerate(records, first):
        value = as_number(record["metrics"].get(metric))
        order = (float(record.get("time") or 0), float(index))
        found[record["steps_completed"]] = Validation(value=value, order=order)
    return found


def best_of(rated: Iterable[Rated], *, smaller_is_better: bool) -> Rated | None:
    """The checkpoint with the best validation that is a finite number; None where there is none."""
    finite = [
        each
        for each in rated
        if each.validation is not None
        and each.validation.value is not None
        and math.isfinite(each.validation.value)
    ]
    return min(finite, key=lambda each: each.quality(smaller_is_better=smaller_is_better), default=None)
