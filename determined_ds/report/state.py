"""What is known of a run while it trains, from its loop or from its files; and a report of metrics as a line."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from determined_ds.checkpoints.files import as_number, is_better
from determined_ds.documents.document import get_path
from determined_ds.report.numbers import rate, short_number, shortened

TRAINING, VALIDATION = "training", "validation"
STARTING = "starting"  # no report yet
# Names by which a metric is known: this library's, then those of transformers.
LOSS, RATE = ("loss", "train_loss"), ("lr", "learning_rate")
POSITION = ("batches", "epochs", "samples")  # counted beside the metrics of a validation
MARKS = 120  # how far back the speed goes by which the time left is computed: at most one a second
# Of a line for people.
ORDER = ("loss", "validation_loss", "lr", "samples_per_second", "tokens_per_second")
HIDDEN = {*POSITION, *("grad_norm", "loss_scale", "peak_memory_gib", "peak_memory_gib_min", "bubble_ideal")}
MOST_TEXT = 40


def report_line(
    group: str, batch: int, total: int | None, metrics: Mapping[str, Any], *, digits: int = 1
) -> str:
    """The metrics that people read: ``training    batch  10/200  loss 3.1  lr 0.0006  164 samples/s``.

    Args:
        group: ``training`` or ``validation``.
        batch: Batches trained.
        total: In all; None where that is not known.
        metrics: As they were reported.
        digits: Of the batch at least, so that lines stand below each other.
    """
    words = [f"{group:<10}", f"batch {batch:>{digits}}" + (f"/{total}" if total else "")]
    names = [name for name in ORDER if name in metrics]
    for name in (*names, *(name for name in metrics if name not in ORDER and name not in HIDDEN)):
        value = metrics[name]
        if name.endswith("_per_second"):
            words.append(rate(value, name.removesuffix("_per_second")))
        elif isinstance(value, (list, tuple, Mapping)):
            words.append(f"{name} [{len(value)} values]")
        else:
            text = short_number(value) if isinstance(value, float) else str(value)
            words.append(f"{name} {shortened(text, MOST_TEXT)}")
    return "  ".join(words)


def metric_of(metrics: Mapping[str, Any], *names: str) -> float | None:
    """A metric as a number, by the first of its names that there is."""
    numbers = (as_number(metrics.get(name)) for name in names)
    return next((number for number in numbers if number is not None), None)


class Validation(NamedTuple):
    """A validation: the metric that is shown (the searcher's, else the first one), its value, batches before it."""

    metric: str
    value: float
    steps: int


@dataclass(kw_only=True)
class RunState:
    """A run, as it is shown."""

    metric: str = ""  # ``searcher.metric``
    smaller_is_better: bool = True
    total: int | None = None  # batches; None where that is not known
    batch: int = 0
    status: str = TRAINING  # in a word: starting, training, validating, checkpointing, or how it ended
    writing: int | None = None  # the batch whose checkpoint is written while training continues
    checkpoint: int | None = None  # the batch of the newest
    checkpoint_time: float | None = None  # when it was complete, in seconds since the epoch
    detail: str = ""  # what a run that starts is at
    losses: list[float] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)  # of the last report
    validation: Validation | None = None
    best: Validation | None = None
    _marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MARKS))

    @classmethod
    def of_config(cls, config: Mapping[str, Any], status: str = TRAINING) -> RunState:
        """That of an experiment that has reported nothing yet: its metric, its length in batches."""
        searcher = dict(config.get("searcher") or {})
        batches = get_path(config, ("hyperparameters", "fit", "max_length", "batches"))
        return cls(
            metric=str(searcher.get("metric") or ""),
            smaller_is_better=searcher.get("smaller_is_better") is not False,
            total=batches if isinstance(batches, int) else None,
            status=status,
        )

    def take(self, group: str, batch: int, metrics: Mapping[str, Any]) -> None:
        """A report was made; it may be of an earlier batch than the one before."""
        self.batch = max(self.batch, batch)
        if group == TRAINING:
            self.training = dict(metrics)
            if (loss := metric_of(metrics, *LOSS)) is not None:
                self.losses.append(loss)
        elif group == VALIDATION:
            for name in (self.metric, *(name for name in metrics if name not in POSITION)):
                if (value := as_number(metrics.get(name))) is None:
                    continue
                self.validation = Validation(name, value, batch)
                before = None if self.best is None else self.best.value
                # Of a metric that is not the searcher's, which of two is better is not known.
                if name == self.metric and is_better(value, before, smaller_is_better=self.smaller_is_better):
                    self.best = self.validation
                return

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
        return max(0, self.total - self.batch) * (until - since) / (last - first) if last > first else None
