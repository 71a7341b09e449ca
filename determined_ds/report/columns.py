"""The columns of results, each defined once: the terminal table, the CSV and the page read them from here."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from determined_ds.report.numbers import (
    UNKNOWN,
    Head,
    Table,
    byte_unit,
    count,
    difference,
    loss_text,
    number,
    percent,
    printable,
    ratio,
    shortened,
    span,
)
from determined_ds.report.results import CANNOT_RUN, FAILED, OUT_OF_MEMORY, STOPPED, Results, Row

LONGEST_NAME, LONGEST_REASON = 80, 600

# ------------------------------------------------------------------------------------------- rows in words


def name_of(row: Row) -> str:
    """A row's name, fit to be shown."""
    return shortened(printable(row.name), LONGEST_NAME)


def label(row: Row, results: Results, joint: str = " on ") -> str:
    """What a row is called among the others: ``zero1``, or ``zero1 on 2 slots`` where rows differ in their slots."""
    differ = len({each.slots for each in results.rows}) > 1
    return name_of(row) + (f"{joint}{count(row.slots, 'slot')}" if differ else "")


def layout(row: Row, results: Results) -> str:
    """How the work is shared out: ``2 stages, micro 4 x 8``; the precision too, where rows differ in it."""
    parts = []
    if row.is_pipeline:
        stages = f"{row.pipe_parallel_size} stages"
        parts.append(f"{row.replicas} x {stages}" if (row.replicas or 1) > 1 else stages)
    elif row.replicas is not None:
        parts.append(count(row.replicas, "replica"))
    if row.precision is not None and len({each.precision for each in results.rows} - {None}) > 1:
        parts.append(row.precision)
    if micro := _micro_batches(row):
        parts.append(f"micro {micro}")
    return ", ".join(parts)


def _micro_batches(row: Row) -> str | None:
    """The micro-batch, and how many of them a rank takes a step: ``16 x 1``."""
    known = row.micro_batch_size is not None and row.accumulation is not None
    return f"{row.micro_batch_size} x {row.accumulation}" if known else None


def reason(row: Row) -> str:
    """Why a row has no part in comparisons; "" of one that has."""
    if row.is_measured:
        return ""
    if row.status not in (OUT_OF_MEMORY, FAILED, CANNOT_RUN, STOPPED):
        return "no step was timed: all of them were the warm-up"
    said = shortened(printable(row.reason), LONGEST_REASON)
    return f"{row.status}: {said}" if said else row.status


def unmeasured(results: Results) -> tuple[Row, ...]:
    """The rows that have no part in comparisons."""
    return tuple(row for row in results.rows if not row.is_measured)


def memory_note(results: Results) -> str:
    """What peak memory is, which depends on the accelerator."""
    if results.accelerator == "cpu":
        return "peak memory on a CPU is a process's resident memory: torch itself, the data and the model are in it"
    return "peak memory is what the allocator had handed out of the device's memory at most"


# ------------------------------------------------------------------------------------------- columns


@dataclass(frozen=True, kw_only=True)
class Column:
    """One fact about a row.

    Args:
        value: The exact value, as the CSV has it and the page sorts by it; None where it is not known.
        head: Its heading, without the unit.
        unit: Name and size of the unit that values are shown in, one for all rows; "" leaves it out of the heading.
        text: Formats a value that is already divided by the unit.
        best: Which value the page highlights, if any.
        align: Of its cells.
        drop: In the terminal's table; the one with the highest goes first where there is no room, 0 stays; None: it is
            not in it.
        below: On the page, with the column of this name below its values; None: it is not a column there.
        in_csv: Whether the CSV has it.
    """

    value: Callable[[Results, Row], Any]
    head: str = ""
    unit: Callable[[Results], tuple[str, float]] | None = None
    text: Callable[[Any], str] = number
    best: Callable[[Iterable[float]], float] | None = None
    align: Literal["left", "right"] = "right"
    drop: int | None = None
    below: str | None = None
    in_csv: bool = True

    def heading(self, results: Results) -> str:
        """Its heading with the unit: ``step, ms``."""
        name = self.unit(results)[0] if self.unit else ""
        return f"{self.head}, {name}" if name else self.head

    def shown(self, results: Results, row: Row) -> str:
        """A row's value in the unit of the column, formatted."""
        value = self.value(results, row)
        if value is None:
            return UNKNOWN
        if self.unit:
            size = self.unit(results)[1]
            value = tuple(each / size for each in value) if isinstance(value, tuple) else value / size
        return self.text(value)

    def is_known(self, results: Results) -> bool:
        """Whether any measured row has a value."""
        return any(self.value(results, row) is not None for row in results.measured)


def step_unit(results: Results) -> tuple[str, float]:
    """The unit of step times, and its seconds."""
    longest = max((row.median_step_seconds or 0 for row in results.rows), default=0)
    return ("s", 1.0) if longest >= 10 else ("ms", 1e-3)


def _of(name: str, head: str = "", **how: Any) -> Column:
    return Column(value=lambda _, row: getattr(row, name), head=head, **how)


def _against_first(name: str, text: Callable[[Any], str], **how: Any) -> Column:
    return Column(
        value=lambda results, row: results.against_first(row).get(name), head="vs. first", text=text, **how
    )


def _states_unit(results: Results) -> tuple[str, float]:
    rows = results.rows
    return byte_unit(
        size for row in rows for size in (row.model_state_bytes, row.estimated_model_state_bytes)
    )


_PLAIN = ("zero_stage", "replicas", "pipe_parallel_size", "micro_batch_size", "accumulation", "precision")
# Programs read the CSV by these names: rename nothing.
COLUMNS = {
    "name": Column(value=lambda _, row: printable(row.name), head="strategy", text=str, align="left", drop=0),
    "slots": _of("slots", "slots", text=str, drop=6),
    "status": _of("status"),
    "reason": Column(value=lambda _, row: printable(row.reason)),
    **{name: _of(name) for name in (*_PLAIN, "samples_per_step", "tokens_per_sample")},
    "num_repetitions": Column(value=lambda _, row: len(row.repetitions)),
    "num_timed_steps": Column(value=lambda _, row: len(row.step_seconds)),
    "micro": Column(value=lambda _, row: _micro_batches(row), head="micro", text=str, drop=8, in_csv=False),
    "step_median_s": _of("median_step_seconds", "step", unit=step_unit, drop=0, below="spread"),
    "spread": Column(
        value=lambda _, row: row.spread if len(row.repetitions) > 1 else None,
        head="spread",
        unit=lambda results: ("", step_unit(results)[1]),  # that of the step beside it
        text=lambda ends: span(*ends),
        drop=1,
        in_csv=False,
    ),
    "step_p95_s": _of("p95_step_seconds", "p95", unit=step_unit, drop=11, below=""),
    "step_lowest_repetition_s": Column(value=lambda _, row: row.spread and row.spread[0]),
    "step_highest_repetition_s": Column(value=lambda _, row: row.spread and row.spread[1]),
    "samples_per_s": _of(
        "samples_per_second", "samples/s", best=max, drop=0, below="samples_per_s_against_first"
    ),
    "samples_per_s_against_first": _against_first("samples_per_second", ratio, drop=2),
    "tokens_per_s": _of("tokens_per_second", "tokens/s", drop=10, below=""),
    "scaling_efficiency": Column(
        value=lambda results, row: results.scaling_efficiency(row), head="scaling", text=percent, below=""
    ),
    "peak_memory_bytes": _of(
        "peak_memory_bytes",
        "peak",
        unit=lambda results: byte_unit(row.peak_memory_bytes for row in results.rows),
        best=min,
        drop=3,
        below="peak_memory_against_first",
    ),
    "peak_memory_against_first": _against_first("peak_memory_bytes", ratio),
    "model_state_bytes": _of(
        "model_state_bytes", "states", unit=_states_unit, drop=9, below="estimated_model_state_bytes"
    ),
    "estimated_model_state_bytes": _of("estimated_model_state_bytes", "estimate", unit=_states_unit, drop=9),
    "bubble": _of("bubble", "bubble", text=percent, drop=5, below="bubble_ideal"),
    "bubble_ideal": _of("bubble_ideal", "ideal", text=percent, drop=7),
    "loss": _of("loss", "loss", text=loss_text, drop=4, below="loss_against_first"),
    "loss_against_first": _against_first("loss", difference),
    "seconds_to_target_loss": Column(
        value=lambda results, row: row.seconds_to(results.target_loss),
        head="time",
        unit=lambda results: (f"s to {number(results.target_loss)}", 1),
        text=lambda value: number(value, 3),
        best=min,
        below="",
    ),
    "target_loss": Column(value=lambda results, _: results.target_loss),
}


def rows_csv(results: Results) -> str:
    """The rows as CSV by RFC 4180: a header with units in its names, then a line a row; nothing is rounded.

    Unknown values are empty. The columns are the same, in the same order, for all results.
    """
    columns = {name: column for name, column in COLUMNS.items() if column.in_csv}
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([column.value(results, row) for column in columns.values()] for row in results.rows)
    return text.getvalue()


def results_table(results: Results) -> Table:
    """The measurements for a terminal, a line a row; below them stand the rows that have none, and why."""
    notes = [f"{label(row, results)}: {reason(row)}" for row in unmeasured(results)]
    if results.first is None:
        return Table(heads=[], rows=[], notes=notes)
    known = {
        name: column.drop
        for name, column in COLUMNS.items()
        if column.drop is not None and column.is_known(results)
    }
    if len({row.slots for row in results.rows}) > 1:
        known["slots"] = 0
    notes.append("step: median of all; spread: lowest and highest median of the repetitions")
    if len(results.measured) > 1:
        notes.append(f"vs. first: against {label(results.first, results)}")
    if "bubble" in known:
        notes.append("bubble: share of time in which a pipeline's stages wait; ideal: by the schedule alone")
    if "peak_memory_bytes" in known:
        notes.append(f"peak: of the rank that takes most; {memory_note(results)}")
    columns = {name: COLUMNS[name] for name in known}
    heads = [
        Head(text=column.heading(results), align=column.align, drop=known[name], folds=name == "name")
        for name, column in columns.items()
    ]
    cells = [[column.shown(results, row) for column in columns.values()] for row in results.measured]
    return Table(heads=heads, rows=cells, notes=notes)
