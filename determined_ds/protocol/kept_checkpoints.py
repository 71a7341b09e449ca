"""Which checkpoints of an experiment are kept when it ends: those that a Determined master keeps.

A checkpoint is ranked by the validation after the same batch of its trial; of equal values the earlier is better, NaN
is the worst, and one without a value of the metric is never kept for being best. The latest are counted among those of
a trial that have a validation, and, unlike in Determined's documentation, among those of all trials that have none.

Source: ``ExperimentCheckpointsToGCRaw`` in determined 0.38.1's ``master/internal/experiment/postgres_experiments.go``,
which ``internalExperiment.stop`` runs when an experiment is completed, cancelled or has failed.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from determined_ds.config.params import SavePolicy
from determined_ds.protocol.best import as_number
from determined_ds.protocol.checkpoint_files import Checkpoint, checkpoints_in
from determined_ds.protocol.metrics_file import Record, read_records
from determined_ds.protocol.run_dir import RunDir

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


def spare(rated: Sequence[Rated], policy: SavePolicy, *, smaller_is_better: bool) -> list[Rated]:
    """The checkpoints that are deleted at the end of an experiment.

    Args:
        rated: All that there are, of all trials.
        policy: How many are kept.
        smaller_is_better: Of the searcher's metric.
    """

    def quality(each: Rated) -> Key:
        return each.quality(smaller_is_better=smaller_is_better)

    in_experiment = _ranks(rated, lambda _: 0, quality)
    in_trial = _ranks(rated, lambda each: each.trial, quality)
    from_latest = _ranks(
        rated,
        lambda each: each.trial if each.validation else None,
        lambda each: (-each.checkpoint.steps_completed,),
    )
    found = []
    for index, each in enumerate(rated):
        has_value = each.validation is not None and each.validation.value is not None
        is_best = has_value and (
            in_experiment[index] <= policy.save_experiment_best or in_trial[index] <= policy.save_trial_best
        )
        if not is_best and from_latest[index] > policy.save_trial_latest:
            found.append(each)
    return found


def _ranks(
    rated: Sequence[Rated], group: Callable[[Rated], object], key: Callable[[Rated], Key]
) -> list[int]:
    """The rank of each in its group, from 1; equals share a rank, and the next one is as if they did not."""
    keys = defaultdict(list)
    for each in rated:
        keys[group(each)].append(key(each))
    for found in keys.values():
        found.sort()
    return [1 + bisect.bisect_left(keys[group(each)], key(each)) for each in rated]


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
