"""A run while it trains, from its loop or from its files: what is known of it, a report as a line, and the panel.

The panel is a run in at most seven lines, drawn in place on a terminal by rich, which is loaded where one is drawn.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from determined_ds.checkpoints.files import as_number, is_better
from determined_ds.documents.document import get_path
from determined_ds.report.numbers import duration, percent, rate, short_number, short_span, shortened

if TYPE_CHECKING:
    from rich.console import Console, Group

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
# Of the panel: columns, and what curves and bars are drawn with: levels from low to high, full and empty; ASCII where
# a terminal has no more.
LABEL, BAR, CURVE = 12, 30, 40
UNICODE, ASCII = ("▁▂▃▄▅▆▇█", "━", "─"), ("_.-~=+*#", "#", "-")
Part = tuple[str, str]  # words and their style


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
    for name in dict.fromkeys((*ORDER, *metrics)):
        value = metrics.get(name)
        if name not in metrics or name in HIDDEN:
            continue
        if name.endswith("_per_second"):
            words.append(rate(metrics[name], name.removesuffix("_per_second")))
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
    def of_config(cls, config: Mapping[str, Any]) -> RunState:
        """That of an experiment that has reported nothing yet: its metric, its length in batches."""
        batches = get_path(config, ("hyperparameters", "fit", "max_length", "batches"))
        return cls(
            metric=str(get_path(config, ("searcher", "metric")) or ""),
            smaller_is_better=get_path(config, ("searcher", "smaller_is_better")) is not False,
            total=batches if isinstance(batches, int) else None,
            status=STARTING,
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
                before = self.best and self.best.value
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


# ------------------------------------------------------------------------------------------ the panel


class DrawnPanel:
    """The panel while it is on the terminal, by default that of this process; nothing of it is left at its end.

    The cursor stays visible, also where the process is killed meanwhile.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = console or Console(highlight=False)
        setattr(self.console, "show_cursor", lambda show=True: False)  # noqa: B010  mypy takes no method for it
        self.state = RunState()
        self._live = Live(
            get_renderable=self.drawn,
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # one that goes to a file goes there still
            vertical_overflow="crop",
        )
        self.refresh, self.stop = self._live.refresh, self._live.stop

    @property
    def is_shown(self) -> bool:
        """Whether it is on the terminal."""
        return self._live.is_started

    def start(self) -> None:
        """Show it; from now on what is printed to ``sys.stdout`` and ``sys.stderr`` stands above it."""
        self._live.start()
        self.refresh()

    def note(self, text: str) -> None:
        """Print a line above it."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def drawn(self) -> Group:
        """Its lines, each shorter than the terminal is wide, and an empty one for what else is written there."""
        from rich.console import Group
        from rich.text import Text

        is_unicode = self.console.encoding.lower().replace("-", "").startswith("utf")
        columns, lines = self.console.width, list[Text]()
        for label, parts in _lines(self.state, columns, *(UNICODE if is_unicode else ASCII)):
            if parts:
                head, words = (
                    (f"{label:<{LABEL}}", "dim" if lines else "bold"),
                    ((f"{w}  ", s) for w, s in parts),
                )
                line = Text.assemble(head, *words, no_wrap=True, overflow="crop")
                line.truncate(columns - 1)
                lines.append(line)
        return Group(*lines, Text())


def _lines(state: RunState, columns: int, levels: str, full: str, empty: str) -> list[tuple[str, list[Part]]]:
    """A label, and what stands in its line; nothing where nothing is known."""

    def plain(*words: str | None) -> list[Part]:
        return [(each, "") for each in words if each]

    now = plain(state.detail or f"batch {state.batch:,}")
    if state.total and not state.detail:
        share, left = min(1.0, state.batch / state.total), state.seconds_left()
        bar = min(BAR, columns - 50)
        done = math.floor(bar * share)
        now = plain(f"batch {state.batch:,}/{state.total:,}", f"{math.floor(100 * share)} %")
        now.append((full * done + empty * (bar - done), "cyan"))
        now += plain(f"{duration(round(left))} left") if left is not None and share < 1 else []

    known = {name: value for name in state.training if (value := metric_of(state.training, name)) is not None}
    losses: list[Part] = []
    if (loss := metric_of(known, *LOSS)) is not None:
        curve = _sparkline(state.losses, min(CURVE, columns - 2 * LABEL), levels)
        losses = [(f"{short_number(loss):<8}", _odd(loss)), (curve, "cyan")]
        losses += [(f"from {short_number(state.losses[0])}", "dim")] if len(state.losses) > 1 else []
    lr, skipped = metric_of(known, *RATE), known.get("skipped_steps")
    steps = plain(
        None if lr is None else f"{lr:.3g}",
        f"gradient norm {short_number(known['grad_norm'])}" if "grad_norm" in known else None,
        f"loss scale {short_number(known['loss_scale'])}" if "loss_scale" in known else None,
        f"skipped steps {short_number(skipped)}" if skipped else None,
    )
    units = (unit for unit in ("samples", "tokens") if f"{unit}_per_second" in known)
    speed = plain(*(rate(known[f"{unit}_per_second"], unit) for unit in units))
    speed += plain(f"bubble {percent(known['bubble'], 0)}") if "bubble" in known else []
    memory = list[Part]()
    if (most := known.get("peak_memory_gib")) is not None:
        memory = plain(f"peak {short_span(known.get('peak_memory_gib_min', most), most)} GiB/rank")
    validation = list[Part]()
    if (last := state.validation) is not None:
        where = "before training" if last.steps == 0 else f"at batch {last.steps:,}"
        validation = [(f"{last.metric} {short_number(last.value)}", _odd(last.value)), (where, "")]
        if best := state.best:
            words = "the best" if best is last else f"best {short_number(best.value)} at {best.steps:,}"
            validation.append((words, "green"))
    checkpoint = plain(f"batch {state.checkpoint:,}") if state.checkpoint is not None else []
    checkpoint += [(f"writing batch {state.writing:,}", "yellow")] if state.writing is not None else []
    if state.checkpoint is not None and state.checkpoint_time is not None:
        checkpoint.append((f"{duration(max(0, round(time.time() - state.checkpoint_time)))} ago", "dim"))
    status = "checkpoint" if state.status == "checkpointing" else state.status
    first = [(status, now), ("loss", losses), ("lr", steps), ("speed", speed), ("memory", memory)]
    return [*first, ("validation", validation), ("checkpoint", checkpoint)]


def _odd(value: float) -> str:
    return "" if math.isfinite(value) else "bold red"


def _sparkline(values: Sequence[float], width: int, levels: str) -> str:
    """A curve in one line of text: each sign is the mean of its share of the values, ``!`` where it is not finite."""
    if (num := len(values)) > width:
        ends = [(num * at // width, num * (at + 1) // width) for at in range(width)]
        values = [sum(values[low:high]) / (high - low) for low, high in ends]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] if math.isfinite(value) else "!" for value in values)
