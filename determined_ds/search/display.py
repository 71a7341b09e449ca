"""What ``det-ds search`` shows while it runs: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from determined_ds.report.fitted import Fitted, FittedColumn, FittedRow
from determined_ds.report.texts import printable

REFRESH_S = 1.0  # a drawing takes some milliseconds
BAR_CELLS = 12


@dataclass(frozen=True, kw_only=True)
class TrialView:
    """A trial that runs.

    Args:
        number: From 1.
        point: Its hyperparameters, in words.
        steps: Batches trained, as far as it has reported.
        length: Batches in all; None where that is not known.
        value: The searcher's metric at its last validation.
        state: ``running``, ``stopping`` or ``starting``.
    """

    number: int
    point: str
    steps: int
    length: int | None
    value: float | None
    state: str


@dataclass(frozen=True, kw_only=True)
class SearchView:
    """A search at a moment.

    Args:
        metric: Its name.
        running: The trials with a process.
        counts: Status -> trials that have ended so.
        waiting: Trials that wait for slots.
        best: In words; "" before the first validation.
        slots: In words: those in use, and all.
    """

    metric: str
    running: tuple[TrialView, ...]
    counts: Mapping[str, int]
    waiting: int
    best: str
    slots: str

    @property
    def summary(self) -> str:
        """How many trials have become what."""
        ended = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        parts = [ended or "none ended yet"]
        if self.waiting:
            parts.append(f"{self.waiting} waiting")
        return f"{', '.join(parts)}; {self.slots}"


class LineDisplay:
    """One line for each thing that happens, for logs."""

    def line(self, text: str) -> None:
        """Something happened."""
        print(text, flush=True)

    def wants_update(self) -> bool:
        """Whether it would show a new view now."""
        return False

    def update(self, view: SearchView) -> None:
        """Where the search stands."""

    def close(self) -> None:
        """The search is over, however it ended."""


class LiveDisplay(LineDisplay):
    """The trials that run as a table, and below it the best so far; what has happened scrolls by above."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console()
        self._live = RichLive(console=self._console, auto_refresh=False, transient=True)
        self._shown: SearchView | None = None
        self._next = 0.0
        self._live.start()

    def line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def wants_update(self) -> bool:
        return time.monotonic() >= self._next

    def update(self, view: SearchView) -> None:
        self._next = time.monotonic() + REFRESH_S
        if view != self._shown:
            self._shown = view
            self._live.update(table_of(view), refresh=True)

    def close(self) -> None:
        self._live.stop()


def table_of(view: SearchView) -> Fitted:
    """A view as a table; where there is no room, a trial's point stands below it."""
    columns = (
        FittedColumn(head=("trial",), align="right"),
        FittedColumn(head=("progress",), no_room="drop", rank=1),
        FittedColumn(head=("batches",), align="right"),
        FittedColumn(head=(view.metric,), align="right"),
        FittedColumn(head=("point",), no_room="below"),
    )
    rows = [
        FittedRow(
            cells=[
                (str(trial.number),),
                (bar_of(trial),),
                (f"{trial.steps}/{trial.length}" if trial.length else str(trial.steps),),
                ("" if trial.value is None else f"{trial.value:.5g}",),
                (printable(trial.point),),
            ]
        )
        for trial in view.running
    ]
    best = [f"best: {view.best}"] if view.best else []
    return Fitted(columns=columns, rows=rows, notes=["", *best, view.summary])


def bar_of(trial: TrialView) -> str:
    """How far a trial is, drawn; in words where that is not known, or is not the point."""
    if trial.state != "running" or not trial.length:
        return f"{trial.state:<{BAR_CELLS}}"
    done = round(BAR_CELLS * min(1.0, trial.steps / trial.length))
    return "━" * done + "─" * (BAR_CELLS - done)


def make_display() -> LineDisplay:
    """The display that fits where the output goes."""
    return LiveDisplay() if sys.stdout.isatty() else LineDisplay()


def short_names(names: tuple[str, ...]) -> dict[str, str]:
    """Dotted names -> as many of their last parts as make them unique."""
    found = {}
    for name in names:
        parts = name.split(".")
        others = [other.split(".") for other in names if other != name]
        keep = 1
        while keep < len(parts) and any(other[-keep:] == parts[-keep:] for other in others):
            keep += 1
        found[name] = ".".join(parts[-keep:])
    return found


def in_words(point: Mapping[str, Any]) -> str:
    """A point for people."""
    names = short_names(tuple(point))
    return ", ".join(f"{names[name]} {shown(value)}" for name, value in point.items())


def shown(value: Any) -> str:
    """A hyperparameter's value, or a metric, for people."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
