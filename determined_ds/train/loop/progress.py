"""What the chief shows during a run: nothing on other ranks, plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from determined_ds.checkpoints.rank_state import TrialState
from determined_ds.report.state import report_line, show, summary

RATES = ("samples_per_second", "tokens_per_second")
MEMORY = "peak_memory_gib"


class Progress:
    """No display, for every rank but the chief."""

    def start(
        self, *, total: int | None, done: int, metric: str = "", smaller_is_better: bool = True
    ) -> None:
        """Training goes from batch ``done`` to ``total``, None where that is not known.

        Args:
            total: Batches in all.
            done: Batches trained before.
            metric: ``searcher.metric``, by which a validation is the best.
            smaller_is_better: Of that metric.
        """

    def step(self, batches_trained: int) -> None:
        """A batch was trained."""

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        """Metrics were reported."""

    def status(self, status: str) -> None:
        """What is done now: ``training``, ``validating`` or ``checkpointing``."""

    def checkpoints(self, newest: int | None, writing: int | None) -> None:
        """The batch of the newest checkpoint that is complete, and of one that is written while training continues."""

    def note(self, text: str) -> None:
        """Show a line that is worth keeping."""

    def end(self, state: TrialState, *, best_at: int) -> None:
        """Training has ended or was stopped; ``best_at``: batch of this process's best validation, -1 without one."""

    def stop(self) -> None:
        """Training is over, successful or not."""


class LogLines(Progress):
    """One line a report, for logs.

    Args:
        closes: Whether it says at the end what came of the training; else a launcher of this library does.
    """

    def __init__(self, *, closes: bool = True) -> None:
        self._closes = closes
        self._total: int | None = 0
        self._width = 1
        self._started_s = time.monotonic()
        self._training: Mapping[str, Any] = {}  # as reported last
        self._validations: dict[int, Mapping[str, Any]] = {}  # by batch
        self._memory_gib = 0.0

    def start(
        self, *, total: int | None, done: int, metric: str = "", smaller_is_better: bool = True
    ) -> None:
        self._started_s = time.monotonic()
        self._total = total
        self._width = len(str(total or done))
        if done:
            self.note(f"resumed at batch {done}{self._of_total(' of ')}")

    def _of_total(self, before: str) -> str:
        return "" if self._total is None else f"{before}{self._total}"

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        self._remember(group, batches_trained, metrics)
        self.note(report_line(group, batches_trained, self._total, metrics, digits=self._width))

    def _remember(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        if group == "training":
            self._training = metrics
            self._memory_gib = max(self._memory_gib, metrics.get(MEMORY, 0.0))
        else:
            self._validations[batches_trained] = metrics

    def end(self, state: TrialState, *, best_at: int) -> None:
        if not self._closes:
            return
        took_s = time.monotonic() - self._started_s
        took = f"{took_s:.0f} s" if took_s < 120 else f"{took_s / 60:.0f} minutes"
        trained = f"{state.batches_trained}{self._of_total(' of ')} batches in {took}"
        self.note("  ".join([f"trained     {trained}", *self._in_short()]))
        newest = state.kept[-1] if state.kept else ""
        best = ""
        if best_at in self._validations:
            best = f"batch {best_at}  {summary(self._validations[best_at])}  "
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
