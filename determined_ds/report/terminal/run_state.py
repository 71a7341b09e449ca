"""What is known of a run while it trains: from its loop, or from its files by another process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from determined_ds.checkpoints.retention import as_number, is_better
from determined_ds.report.terminal.sparkline import Thinned

TRAINING, VALIDATION, MEASURED = "training", "validation", "measured"
STARTING = "starting"  # no report yet
# Names by which a metric is known: this library's, then those of transformers.
LOSS = ("loss", "train_loss")
RATE = ("lr", "learning_rate")
# Counted beside the metrics of a validation.
POSITION = ("batches", "epochs", "samples")
# How far back the speed goes by which the time left is computed: marks, at most one a second.
MARKS = 120


@dataclass(frozen=True, kw_only=True)
class SeenValidation:
    """A validation.

    Args:
        batch: Batches trained before it.
        name: Of the metric that is shown: the searcher's, else the first one.
        value: Of that metric.
    """

    batch: int
    name: str
    value: float


@dataclass(kw_only=True)
class RunState:
    """A run, as it is shown.

    Args:
        metric: ``searcher.metric``; "" without one.
        smaller_is_better: Of that metric.
        total: Batches in all; None where that is not known.
        batch: Batches trained.
        status: In a word: ``starting``, ``training``, ``validating``, ``checkpointing``, or how it ended.
        writing: The batch whose checkpoint is written while training continues; None where none is.
        checkpoint: The batch of the newest checkpoint; None without one.
        checkpoint_time: When it was complete, in seconds since the epoch.
    """

    metric: str = ""
    smaller_is_better: bool = True
    total: int | None = None
    batch: int = 0
    status: str = TRAINING
    writing: int | None = None
    checkpoint: int | None = None
    checkpoint_time: float | None = None
    losses: Thinned = field(default_factory=Thinned)
    first_loss: float | None = None
    training: dict[str, Any] = field(default_factory=dict)  # of the last report
    validation: SeenValidation | None = None
    best: SeenValidation | None = None
    step_seconds: float | None = None  # of a run that is measured
    _marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MARKS))

    @property
    def loss(self) -> float | None:
        """The last one that was reported."""
        return _number(self.training, LOSS)

    @property
    def learning_rate(self) -> float | None:
        """The last one that was reported."""
        return _number(self.training, RATE)

    def take(self, group: str, batch: int, metrics: Mapping[str, Any]) -> None:
        """A report was made; reports of a batch come after those of earlier ones."""
        self.batch = max(self.batch, batch)
        if group == TRAINING:
            self.training = dict(metrics)
            loss = self.loss
            if loss is not None:
                self.losses.add(loss)
                self.first_loss = loss if self.first_loss is None else self.first_loss
        elif group == VALIDATION:
            self._take_validation(batch, metrics)
        elif group == MEASURED:
            self.step_seconds = _number(metrics, ("step_seconds",))

    def _take_validation(self, batch: int, metrics: Mapping[str, Any]) -> None:
        names = [self.metric, *(name for name in metrics if name not in POSITION)]
        for name in names:
            value = as_number(metrics.get(name))
            if value is not None:
                break
        else:
            return
        self.validation = SeenValidation(batch=batch, name=name, value=value)
        if name != self.metric:  # which of two is better is not known
            return
        before = None if self.best is None else self.best.value
        if is_better(value, before, smaller_is_better=self.smaller_is_better):
            self.best = self.validation

    def at(self, batch: int, time: float) -> None:
        """So many batches are trained at a time, in seconds of any clock that does not change."""
        self.batch = max(self.batch, batch)
        if not self._marks or time - self._marks[-1][0] >= 1:
            self._marks.append((time, batch))

    def seconds_left(self) -> float | None:
        """Until training ends, at the speed of late, validations and checkpoints included; None where unknown."""
        if self.total is None or len(self._marks) < 2:
            return None
        (since, first), (until, last) = self._marks[0], self._marks[-1]
        if last <= first or until <= since:
            return None
        return max(0, self.total - self.batch) * (until - since) / (last - first)


def _number(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    numbers = (as_number(metrics.get(name)) for name in names)
    return next((number for number in numbers if number is not None), None)
