"""A run's metrics as curves over batches and over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from determined_ds.checkpoints.retention import as_number
from determined_ds.rundir.records import Launch, RecordedRun

TRAINING, VALIDATION = "training", "validation"
# How far training is, beside the metrics of a report.
POSITIONS = ("batches", "epochs", "samples", "steps_completed")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric of a run.

    Args:
        group: ``training``, ``validation`` or another one that was reported.
        metric: Its name.
        steps: Batches trained, rising.
        seconds: Time in training; None where a report has no time.
        values: Finite or not.
    """

    group: str
    metric: str
    steps: list[int] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """``training/loss``: as TensorBoard and every logger has it."""
        return f"{self.group}/{self.metric}"

    def taken(self, indexes: Sequence[int]) -> Curve:
        """The curve of some of its points."""
        return Curve(
            group=self.group,
            metric=self.metric,
            steps=[self.steps[index] for index in indexes],
            seconds=[self.seconds[index] for index in indexes],
            values=[self.values[index] for index in indexes],
        )


class Clock:
    """Time in training: pauses between two launches, and what was trained and lost, are left out.

    Args:
        launches: Of the run, the first one first; without any, time begins with the first report.
        times: Of the reports that the run keeps, rising.
    """

    def __init__(self, launches: Sequence[Launch], times: Sequence[float]) -> None:
        begins = [launch.time for launch in launches] or list(times[:1])
        self._parts: list[tuple[float, float]] = []  # (begin of a launch, seconds in training before it)
        for begin in begins:
            last = max((time for time in times if time < begin), default=None)
            before = self.seconds(last) if last is not None and self._parts else 0.0
            self._parts.append((begin, before or 0.0))

    def seconds(self, time: float | None) -> float | None:
        """Seconds in training at a time; None where none is known."""
        if time is None or not self._parts:
            return None
        begin, before = next(
            (part for part in reversed(self._parts) if part[0] <= time), (self._parts[0][0], 0.0)
        )
        return round(before + max(0.0, time - begin), 3)

    @property
    def starts(self) -> list[float]:
        """Seconds in training at each launch."""
        return [before for _, before in self._parts]


def clock_of(run: RecordedRun) -> Clock:
    """The clock of a run."""
    return Clock(run.launches, sorted(time for record in run.records if (time := _time(record)) is not None))


def curves_of(run: RecordedRun, clock: Clock) -> list[Curve]:
    """The curves of a run, in the order in which their metrics came. Values that are not numbers are left out."""
    found: dict[tuple[str, str], Curve] = {}
    for record in run.records:
        group, step, seconds = record["group"], record["steps_completed"], clock.seconds(_time(record))
        for metric, value in _numbers(record["metrics"]):
            curve = found.get((group, metric))
            if curve is None:
                curve = found[group, metric] = Curve(group=group, metric=metric)
            elif step <= curve.steps[-1]:
                if step < curve.steps[-1]:
                    continue
                del curve.steps[-1], curve.seconds[-1], curve.values[-1]  # reported again
            curve.steps.append(step)
            curve.seconds.append(seconds)
            curve.values.append(value)
    return list(found.values())


def _time(record: Mapping[str, Any]) -> float | None:
    return as_number(record.get("time"))


def _numbers(metrics: Any) -> Iterator[tuple[str, float]]:
    for metric, value in metrics.items() if isinstance(metrics, Mapping) else ():
        number = value if type(value) is float else as_number(value)
        if number is not None and metric not in POSITIONS:
            yield metric, number
