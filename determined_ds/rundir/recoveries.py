"""What a run does by itself after a fault: goes on with smaller micro-batches, or without the batches of a spike.

1. The rank that meets a fault records it: a line of ``recoveries.jsonl``, and on a cluster a metric of the master.
2. The next start reads the faults so far. It makes micro-batches smaller than one that did not fit, leaves the batches
   around each spike out of the data, and goes back to a checkpoint before the last one.
3. What the faults cost follows from what the run has recorded anyway: its launches, and when each batch was reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from determined_ds.checkpoints.files import as_number
from determined_ds.config.params import OVERWRITES
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError
from determined_ds.memory.units import divisors
from determined_ds.rundir.metrics_file import Record
from determined_ds.rundir.records import OUT_OF_MEMORY, RECOVERY, RESTART, RecordedRun


def with_smaller_batch(
    hyperparameters: Document, too_large: int, resolve: Callable[[Document], ResolvedConfig | None]
) -> Document:
    """The hyperparameters with the largest micro-batch of at most half of one that did not fit, and the same step.

    Args:
        hyperparameters: One point.
        too_large: Samples of the micro-batch that did not fit; 0: all did.
        resolve: What would run with a point; None where code decides it.

    Raises:
        ConfigError: no smaller one can run.
    """
    decided = resolve(hyperparameters) if too_large else None
    if decided is None or decided.batch.micro_batch_size < too_large:
        return hyperparameters
    of_replica = decided.batch.micro_batch_size * decided.batch.accumulation
    states_accumulation = isinstance(decided.stated.get(("gradient_accumulation_steps",)), int)
    error: ConfigError | None = None
    for size in reversed([each for each in divisors(of_replica) if each <= too_large // 2]):
        changes: list[Any] = [(("micro_batch_size",), size, RECOVERY)]
        if hyperparameters.get((OVERWRITES, "train_micro_batch_size_per_gpu")) is not None:
            changes.append(((OVERWRITES, "train_micro_batch_size_per_gpu"), size, RECOVERY))
        if states_accumulation:
            changes.append(((OVERWRITES, "gradient_accumulation_steps"), of_replica // size, RECOVERY))
        smaller = hyperparameters.overwritten(*changes)
        try:
            resolve(smaller)
        except ConfigError as refused:
            error = refused
        else:
            return smaller
    if error is not None:
        raise error
    return hyperparameters


# ------------------------------------------------------------------------------------------- what they have cost


class Recovery(NamedTuple):
    """A row of the table: a fault, and the start after it."""

    time: float  # of the fault, or of the start where that is not known
    why: str
    done: str
    steps_lost: int  # batches that were trained again, or left out
    seconds_lost: float  # from when the batch it went on from was trained until it trained the next one


def recoveries_of(run: RecordedRun) -> list[Recovery]:
    """What a run has recovered from, with or without a fault of its own record."""
    found = []
    starts = [*(launch.time for launch in run.launches), math.inf]
    for (before, launch), ends in zip(pairwise(run.launches), starts[2:], strict=True):
        fault = next((each for each in reversed(run.faults) if before.time <= each.time < launch.time), None)
        if fault is None and not launch.kind.startswith(RESTART):
            continue
        at = f"checkpoint at batch {launch.steps_completed:,}" if launch.steps_completed else "the start"
        why, done = launch.reason.rpartition("\n")[2].rpartition("it crashed: ")[2], f"restarted from {at}"
        if fault is not None:
            why = f"{fault.cause}: {fault.reason}"
            if fault.cause == OUT_OF_MEMORY:
                sizes = [f"{each.micro_batch_size} x {each.accumulation}" for each in (before, launch)]
                known = " -> ".join(sizes) if launch.micro_batch_size else f"below {fault.micro_batch_size}"
                done += f", micro-batch {known}"
            else:
                done += f", without batches {in_words(fault.skip)} of the data"
        times = [
            as_number(each.get("time")) or before.time
            for each in run.records
            if each["steps_completed"] <= launch.steps_completed and (each.get("time") or 0) < launch.time
        ]
        trained = max([fault.batch if fault else 0, launch.trained_before, launch.steps_completed])
        since, again = max([*times, before.time]), launch.time
        for each in run.of_group("training"):  # the first report after it, unless it has failed before
            if launch.time < (as_number(each.get("time")) or 0) < ends:
                batches = each["steps_completed"] - launch.steps_completed
                again = max(again, each["time"] - batches * (_seconds_of_batch(run, each) or 0.0))
                break
        lost, time = trained - launch.steps_completed, fault.time if fault else launch.time
        found.append(Recovery(time, why, done, lost, max(0.0, again - since)))
    return found


def goodput(run: RecordedRun) -> float | None:
    """The share of a run's time that was training that counted; None where that is not known.

    The time is that of all launches, from the start of their ranks to their last report: pauses between a stop and a
    resume are left out. The training that counted is what the reports say that took, whose batches no restart undid.
    """
    reports = [each for each in run.of_group("training") if _seconds_of_batch(run, each)]
    if not run.launches or not reports:
        return None
    counted, done = 0.0, 0
    for each in reports:
        counted += max(0, each["steps_completed"] - done) * (_seconds_of_batch(run, each) or 0.0)
        done = max(done, each["steps_completed"])
    ends = [time for each in run.records if (time := as_number(each.get("time"))) is not None]
    wall = 0.0
    for launch, after in pairwise([*run.launches, None]):
        assert launch is not None
        own = [time for time in ends if launch.time <= time and (after is None or time < after.time)]
        is_restarted = after is not None and after.kind.startswith(RESTART)
        wall += (after.time if after and is_restarted else max(own, default=launch.time)) - launch.time
    return min(1.0, counted / wall) if wall and counted else None


def _seconds_of_batch(run: RecordedRun, report: Record) -> float | None:
    """How long a batch took by a report; None where it does not say."""
    speed = as_number(report["metrics"].get("samples_per_second"))
    return run.launches[-1].global_batch_size / speed if speed and run.launches else None


def in_words(ranges: Iterable[Sequence[int]]) -> str:
    """Ranges of batches: ``120 to 139, 400 to 419``."""
    return ", ".join(f"{first} to {last}" for first, last in ranges)
