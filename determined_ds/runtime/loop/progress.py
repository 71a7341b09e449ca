"""What the chief shows during a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from determined_ds.runtime.checkpoints.trial_state import TrialState

# Of a metric that is not a number, on a line for people.
MAX_LISTED, MAX_TEXT = 6, 40
ORDER = ("loss", "validation_loss", "lr", "samples_per_second", "tokens_per_second")
RATES = ("samples_per_second", "tokens_per_second")
MEMORY = "peak_memory_gib"
LATEST = ("loss", "samples_per_second")
HIDDEN = (
    *("batches", "epochs", "samples", "grad_norm", "loss_scale"),
    *("peak_memory_gib", "peak_memory_gib_min", "bubble_ideal"),
)


def show(name: str, value: Any) -> str:
    """A metric for people: four significant digits, thousands grouped, rates with their unit."""
    if name.endswith("_per_second"):
        return f"{value:,.{0 if value >= 100 else 1}f} {name.removesuffix('_per_second')}/s"
    if isinstance(value, float):
        text = f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"
        return f"{name} {text}"
    if isinstance(value, (list, tuple)):
        return f"{name} {_show_list(value)}"
    if isinstance(value, Mapping):
        return f"{name} {{{len(value)} entries}}"
    text = str(value)
    return f"{name} {text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + '...'}"


def _show_list(values: Sequence[Any]) -> str:
    """In full where it is short and flat; else its size."""
    if len(values) > MAX_LISTED or not all(isinstance(value, (int, float)) for value in values):
        return f"[{len(values)} values]"
    return "[" + " ".join(f"{value:.4g}" for value in values) + "]"


def _summary(metrics: Mapping[str, Any]) -> str:
    names = [name for name in ORDER if name in metrics]
    names += [name for name in metrics if name not in ORDER and name not in HIDDEN]
    return "  ".join(show(name, metrics[name]) for name in names)


class Progress:
    """No display, for every rank but the chief."""

    def start(self, *, total: int | None, done: int) -> None:
        """Training goes from batch ``done`` to ``total``, None where that is not known."""

    def step(self, batches_trained: int) -> None:
        """A batch was trained."""

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        """Metrics were reported."""

    def writing(self, batch: int | None) -> None:
        """The checkpoint of a batch is being written while training continues; None: no longer."""

    def note(self, text: str) -> None:
        """Show a line that is worth keeping."""

    def end(self, state: TrialState, *, best_at: int) -> None:
        """Training has ended or was stopped; ``best_at``: batch of this process's best validation, -1 without one."""

    def stop(self) -> None:
        """Training is over, successful or not."""


class LogLines(Progress):
    """One line a report, for logs."""

    def __init__(self) -> None:
        self._total: int | None = 0
        self._width = 1
        self._started_s = time.monotonic()
        self._training: Mapping[str, Any] = {}  # as reported last
        self._validations: dict[int, Mapping[str, Any]] = {}  # by batch
        self._memory_gib = 0.0

    def start(self, *, total: int | None, done: int) -> None:
        self._started_s = time.monotonic()
        self._total = total
        self._width = len(str(total or done))
        if done:
            self.note(f"resumed at batch {done}{self._of_total(' of ')}")

    def _of_total(self, before: str) -> str:
        return "" if self._total is None else f"{before}{self._total}"

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        if group == "training":
            self._training = metrics
            self._memory_gib = max(self._memory_gib, metrics.get(MEMORY, 0.0))
        else:
            self._validations[batches_trained] = metrics
        at = f"{batches_trained:>{self._width}}{self._of_total('/') if self._total else ''}"
        self.note(f"{group:<10}  batch {at}  {_summary(metrics)}")

    def end(self, state: TrialState, *, best_at: int) -> None:
        took_s = time.monotonic() - self._started_s
        took = f"{took_s:.0f} s" if took_s < 120 else f"{took_s / 60:.0f} minutes"
        trained = f"{state.batches_trained}{self._of_total(' of ')} batches in {took}"
        self.note("  ".join([f"trained     {trained}", *self._in_short()]))
        newest = state.kept[-1] if state.kept else ""
        best = ""
        if best_at in self._validations:
            best = f"batch {best_at}  {_summary(self._validations[best_at])}  "
        if state.best:
            self.note(f"best        {best}{state.best}")
        if newest != state.best:
            self.note(f"newest      batch {state.last_checkpoint}  {newest}")

    def _in_short(self) -> Iterator[str]:
        """Speed and memory."""
        for name in RATES:
            if name in self._training:
                yield show(name, self._training[name])
        if self._memory_gib:
            yield f"{self._memory_gib:.3g} GiB a rank at most"

    def note(self, text: str) -> None:
        print(text, flush=True)


class Bar(LogLines):
    """A progress bar with loss and throughput, and the reports as lines above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich import progress
        from rich.console import Console

        self._console = Console()
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=30),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("{task.fields[latest]}"),
            console=self._console,
            transient=True,
            refresh_per_second=5,
        )
        self._task: Any = None
        self._shown_at = 0.0

    def start(self, *, total: int | None, done: int) -> None:
        super().start(total=total, done=done)
        self._task = self._bar.add_task("training", total=total, completed=done, latest="")
        self._bar.start()

    def step(self, batches_trained: int) -> None:
        now = time.monotonic()
        if now - self._shown_at > 0.1:  # drawn at every 5 ms step, a bar would take a tenth of it
            self._shown_at = now
            self._bar.update(self._task, completed=batches_trained)

    def writing(self, batch: int | None) -> None:
        words = "training" if batch is None else f"training, writing batch {batch}"
        self._bar.update(self._task, description=words)

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        super().report(group, batches_trained, metrics)
        if group == "training":  # short enough for a bar in 80 columns
            latest = "  ".join(show(name, metrics[name]) for name in LATEST if name in metrics)
            self._bar.update(self._task, completed=batches_trained, latest=latest)

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()


def make_progress(is_chief: bool) -> Progress:
    """The display for this rank's kind of output."""
    if not is_chief:
        return Progress()
    return Bar() if sys.stdout.isatty() else LogLines()
