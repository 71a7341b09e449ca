"""The table of final figures: a row for each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from determined_ds.report.columns import UNKNOWN
from determined_ds.report.formatting import loss_text, number
from determined_ds.report.runs.run_view import LOSSES, MEMORY, RunView


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A cell of the table.

    Args:
        text: Of it.
        small: Below it.
        value: To sort by; None where there is none.
    """

    text: str = UNKNOWN
    small: str = ""
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class FigureColumn:
    """A column of the table.

    Args:
        name: In ``--json``.
        head: Of the column.
        small: Below it: what is below its values.
        tip: What it is, where its head does not say it.
        of: A run's cell.
    """

    name: str
    head: str
    of: Callable[[RunView], Figure]
    small: str = ""
    tip: str = ""


def duration(seconds: float | None) -> str:
    """``52.3 s``, ``12 min 5 s``, ``3 h 12 min``, ``2 d 3 h``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.3g} s"
    for large, small, unit, below in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        whole = round(seconds / small) * small
        if whole >= large:
            return f"{whole // large} {unit} {whole % large // small} {below}"
    return f"{seconds:.0f} s"


def figure_columns(runs: Sequence[RunView]) -> list[FigureColumn]:
    """The columns of which any run knows something."""
    metrics = list(dict.fromkeys(shown.metric for shown in runs if shown.metric))
    best = f"best {metrics[0]}" if len(metrics) == 1 else "best validation"
    columns = [
        FigureColumn(name="batches", head="batches", small="planned", of=_batches),
        FigureColumn(
            name="seconds",
            head="time",
            tip="time in training: pauses between launches are left out",
            of=_time,
        ),
        FigureColumn(name="loss", head="loss", small="at first", tip="last training report", of=_loss),
        FigureColumn(name="best", head=best, small="after", of=_best),
        FigureColumn(
            name="samples_per_second",
            head="samples/s",
            tip="median of the reports",
            of=_rate("samples_per_second"),
        ),
        FigureColumn(
            name="tokens_per_second",
            head="tokens/s",
            tip="median of the reports",
            of=_rate("tokens_per_second"),
        ),
        FigureColumn(name="peak_memory_gib", head="peak, GiB", tip="of the rank that took most", of=_memory),
    ]
    return [
        column
        for column in columns
        if column.name == "batches" or any(column.of(shown).text != UNKNOWN for shown in runs)
    ]


def _batches(shown: RunView) -> Figure:
    planned = f"of {shown.planned:,}" if shown.planned is not None else ""
    return Figure(text=f"{shown.steps:,}", small=planned, value=shown.steps)


def _time(shown: RunView) -> Figure:
    return Figure(text=duration(shown.seconds), value=shown.seconds)


def _loss(shown: RunView) -> Figure:
    last, first = shown.last(*LOSSES), shown.first(*LOSSES)
    if last is None:
        return Figure()
    return Figure(text=loss_text(last), small=f"from {loss_text(first)}", value=last)


def _best(shown: RunView) -> Figure:
    best = shown.best
    if best is None:
        return Figure()
    return Figure(text=loss_text(best.value), small=f"batch {best.steps:,}", value=best.value)


def _rate(metric: str) -> Callable[[RunView], Figure]:
    def figure(shown: RunView) -> Figure:
        value = shown.median(metric)
        return Figure(text=number(value), value=value)

    return figure


def _memory(shown: RunView) -> Figure:
    value = shown.most(MEMORY)
    return Figure(text=number(value), value=value)
