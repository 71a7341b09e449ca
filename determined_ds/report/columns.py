"""The columns of results, each defined once: the terminal table, the CSV and the page read them from here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from determined_ds.report.formatting import (
    between,
    byte_unit,
    difference,
    layout,
    loss_text,
    number,
    percent,
    ratio,
    shares,
    step_unit,
)
from determined_ds.report.repetition import PARTS
from determined_ds.report.results import Results, Row
from determined_ds.report.strengths import best_for
from determined_ds.report.texts import printable

UNKNOWN = "–"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One fact about a row.

    Args:
        value: The exact value, as the CSV has it and the page sorts by it; None where it is not known.
        head: Heading in the table and on the page; "" for a column of the CSV alone.
        unit: Name and size of the unit that values are shown in, one for all rows; "" leaves it out of the heading.
        text: Formats a value that is already divided by the unit.
        tip: The tooltip on the page.
        best: Which value the page highlights, if any.
        align: Of its cells.
    """

    value: Callable[[Results, Row], Any]
    head: str = ""
    unit: Callable[[Results], tuple[str, float]] | None = None
    text: Callable[[Any], str] = number
    tip: str = ""
    best: Callable[[Iterable[float]], float] | None = None
    align: Literal["left", "right"] = "right"

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


def _of(name: str) -> Callable[[Results, Row], Any]:
    return lambda results, row: getattr(row, name)


def _against_first(name: str) -> Callable[[Results, Row], float | None]:
    return lambda results, row: (results.against_first(row) or {}).get(name)


def _end_of_spread(index: int) -> Callable[[Results, Row], float | None]:
    return lambda results, row: row.spread[index] if row.spread else None


def _spread(results: Results, row: Row) -> tuple[float, float] | None:
    return row.spread if len(row.repetitions) > 1 else None


def _share_of(part: str) -> Callable[[Results, Row], float | None]:
    return lambda _, row: None if row.parts is None else row.parts.get(part, 0.0)


def _seconds_to_target(results: Results, row: Row) -> float | None:
    return None if results.target_loss is None else row.seconds_to(results.target_loss)


def _micro(results: Results, row: Row) -> str | None:
    known = row.micro_batch_size is not None and row.accumulation is not None
    return f"{row.micro_batch_size} x {row.accumulation}" if known else None


def _peak_unit(results: Results) -> tuple[str, float]:
    return byte_unit(row.peak_memory_bytes for row in results.rows)


def _states_unit(results: Results) -> tuple[str, float]:
    both = ((row.model_state_bytes, row.estimated_model_state_bytes) for row in results.rows)
    return byte_unit(size for sizes in both for size in sizes)


AGAINST_FIRST = "against the first measured row"
# The CSV has these in this order. Programs read it by name: add at the end, and rename nothing.
CSV = {
    "name": Column(value=lambda _, row: printable(row.name), head="strategy", text=str, align="left"),
    "slots": Column(value=_of("slots"), head="slots", text=str, tip="Ranks: one process for each device"),
    "status": Column(value=_of("status")),
    "reason": Column(value=lambda _, row: printable(row.reason)),
    "zero_stage": Column(value=_of("zero_stage")),
    "replicas": Column(value=_of("replicas")),
    "pipe_parallel_size": Column(value=_of("pipe_parallel_size")),
    "micro_batch_size": Column(value=_of("micro_batch_size")),
    "accumulation": Column(value=_of("accumulation")),
    "precision": Column(value=_of("precision")),
    "samples_per_step": Column(value=_of("samples_per_step")),
    "tokens_per_sample": Column(value=_of("tokens_per_sample")),
    "num_repetitions": Column(value=lambda _, row: len(row.repetitions)),
    "num_timed_steps": Column(value=_of("num_steps")),
    "start_s": Column(value=_of("start_seconds")),
    "step_median_s": Column(
        value=_of("median_step_seconds"),
        head="step",
        unit=step_unit,
        tip="Median time of an optimizer step, over all timed steps of all repetitions",
    ),
    "step_p95_s": Column(
        value=_of("p95_step_seconds"), head="p95", unit=step_unit, tip="One step in twenty takes longer"
    ),
    "step_lowest_repetition_s": Column(value=_end_of_spread(0)),
    "step_highest_repetition_s": Column(value=_end_of_spread(1)),
    "samples_per_s": Column(
        value=_of("samples_per_second"),
        head="samples/s",
        tip="Global batch divided by the median step time",
        best=max,
    ),
    "tokens_per_s": Column(
        value=_of("tokens_per_second"), head="tokens/s", tip="Samples per second times tokens per sample"
    ),
    "samples_per_s_against_first": Column(
        value=_against_first("samples_per_second"),
        head="vs. first",
        text=ratio,
        tip=f"Ratio {AGAINST_FIRST}",
    ),
    "scaling_efficiency": Column(
        value=lambda results, row: results.scaling_efficiency(row),
        head="scaling",
        text=percent,
        tip="Throughput as a share of ideal scaling from the fewest slots of the same strategy",
    ),
    "peak_memory_bytes": Column(
        value=_of("peak_memory_bytes"),
        head="peak",
        unit=_peak_unit,
        tip="Peak memory of the rank, and of the repetition, that took most",
        best=min,
    ),
    "peak_memory_against_first": Column(
        value=_against_first("peak_memory_bytes"),
        head="vs. first",
        text=ratio,
        tip=f"Ratio {AGAINST_FIRST}",
    ),
    "model_state_bytes": Column(
        value=_of("model_state_bytes"),
        head="states",
        unit=_states_unit,
        tip="Parameters, gradients and optimizer states found in the engine",
    ),
    "estimated_model_state_bytes": Column(
        value=_of("estimated_model_state_bytes"),
        head="estimate",
        unit=_states_unit,
        tip="Model states that the memory model expects",
    ),
    "bubble": Column(
        value=_of("bubble"),
        head="bubble",
        text=percent,
        tip="Share of time in which the stages of a pipeline wait",
    ),
    "bubble_ideal": Column(
        value=_of("bubble_ideal"), head="ideal", text=percent, tip="Bubble of the schedule alone"
    ),
    "loss": Column(value=_of("loss"), head="loss", text=loss_text, tip="Mean loss of the last five steps"),
    "loss_against_first": Column(
        value=_against_first("loss"),
        head="vs. first",
        text=difference,
        tip=f"Difference {AGAINST_FIRST}",
    ),
    "seconds_to_target_loss": Column(
        value=_seconds_to_target,
        head="time",
        unit=lambda results: (f"s to {number(results.target_loss)}", 1),
        text=lambda value: number(value, 3),
        tip="Training time to the highest final loss of any row, which every row reaches",
        best=min,
    ),
    "target_loss": Column(value=lambda results, _: results.target_loss),
    "best_for": Column(
        value=lambda results, row: ", ".join(best_for(results, row)) or None,
        head="best for",
        text=str,
        tip="What no other row is better for; tied: another cannot be distinguished from it",
        align="left",
    ),
    **{f"{part}_share": Column(value=_share_of(part)) for part in PARTS},
}
COLUMNS = {
    **CSV,
    "spread": Column(
        value=_spread,
        head="spread",
        unit=lambda results: ("", step_unit(results)[1]),  # that of the step above it
        text=between,
        tip="Lowest and highest median of the repetitions",
    ),
    "shares": Column(
        value=lambda results, row: shares(row, results) or None, head="layout", text=str, align="left"
    ),
    "layout": Column(
        value=lambda results, row: layout(row, results) or None, head="layout", text=str, align="left"
    ),
    "micro": Column(value=_micro, head="micro", text=str, tip="Micro-batch size x accumulation"),
}
