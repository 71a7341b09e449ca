"""Results as a table: for the terminal, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from determined_ds.report.measurements import Results, Row
from determined_ds.report.words import (
    between,
    byte_unit,
    difference,
    label,
    loss_text,
    memory_note,
    micro,
    name_of,
    number,
    percent,
    printable,
    ratio,
    reason,
    shares,
    shortened,
    step_unit,
)

if TYPE_CHECKING:
    from rich.table import Table

LONGEST = 24  # of a name
LONGEST_REASON = 240
GAP = 2
CRLF = "\r\n"


# --------------------------------------------------------------------------------------------- the terminal


def results_table(results: Results) -> Table:
    """The table that a terminal of 80 columns or more shows, two lines a row.

    A row that was not measured has its reason across the columns, and a pipeline its bubble below. Ratios and
    differences are against the first row that was measured.

    Args:
        results: What was measured.
    """
    from rich.table import Table
    from rich.text import Text

    columns = _columns(results)
    widths = _widths(columns)
    table = Table.grid()
    table.add_column(max_width=sum(widths) + GAP * (len(widths) - 1))
    table.add_row(_line([head for head, _ in columns], widths, "bold", "bold"))
    for row, *cells in zip(results.rows, *(cells for _, cells in columns), strict=True):
        if not row.is_measured:
            why = shortened(reason(row), LONGEST_REASON)
            table.add_row(_line([*cells[:2], (why,)], _two_and_rest(widths), "bold", "yellow"))
            continue
        table.add_row(_line(cells, widths, "bold", ""))
        if row.bubble is not None:
            table.add_row(_line([(), (), (_bubble(row),)], _two_and_rest(widths), "", ""))
    notes = _footnotes(results)
    if notes:
        table.add_row("")
    for note in notes:
        table.add_row(Text(note, "dim"))
    return table


Cell = tuple[str, ...]  # its lines
Column = tuple[Cell, list[Cell]]  # the head, and a cell for each row


def _columns(results: Results) -> list[Column]:
    step_name, step_size = step_unit(results)
    peak_name, peak_size = byte_unit(row.peak_memory_bytes for row in results.rows)
    state_name, state_size = byte_unit(
        size for row in results.rows for size in (row.model_state_bytes, row.estimated_model_state_bytes)
    )
    has_tokens = any(row.tokens_per_second is not None for row in results.rows)

    def against(row: Row, key: str) -> float | None:
        return (results.against_first(row) or {}).get(key)

    def scaled(value: float | None, size: float) -> str:
        return number(None if value is None else value / size)

    def strategy(row: Row) -> Cell:
        return name_of(row, LONGEST), shares(row, results)

    def step(row: Row) -> Cell:
        return scaled(row.median_step_seconds, step_size), between(row.spread, step_size)

    def speed(row: Row) -> Cell:
        samples = f"{number(row.samples_per_second)} {ratio(against(row, 'samples_per_second')):>5}"
        return (samples, number(row.tokens_per_second)) if has_tokens else (samples,)

    def memory(row: Row) -> Cell:
        peak = f"{scaled(row.peak_memory_bytes, peak_size)} {ratio(against(row, 'peak_memory_bytes')):>5}"
        states, estimate = row.model_state_bytes, row.estimated_model_state_bytes
        return peak, f"{scaled(states, state_size)} ({scaled(estimate, state_size)})"

    heads: list[tuple[Cell, Callable[[Row], Cell]]] = [
        (("strategy", "layout"), strategy),
        (("slots", "micro"), lambda row: (str(row.slots), micro(row))),
        ((f"step {step_name}", "spread"), step),
        (("p95",), lambda row: (scaled(row.p95_step_seconds, step_size),)),
        (("samples/s", "tokens/s") if has_tokens else ("samples/s",), speed),
        ((f"peak {peak_name}", f"states {state_name}", "(estimate)"), memory),
        (("loss",), lambda row: (loss_text(row.loss), difference(against(row, "loss")))),
    ]
    return [(head, [cell(row) for row in results.rows]) for head, cell in heads]


def _bubble(row: Row) -> str:
    return f"its stages wait {percent(row.bubble)} of the time; {percent(row.bubble_ideal)} by the schedule alone"


def _widths(columns: list[Column]) -> list[int]:
    """What each column takes; on a narrow terminal the first gives way."""
    from rich.cells import cell_len

    return [max(cell_len(line) for cell in (head, *cells) for line in cell) for head, cells in columns]


def _two_and_rest(widths: list[int]) -> list[int]:
    return [*widths[:2], sum(widths[2:]) + GAP * (len(widths) - 3)]


def _line(cells: Sequence[Cell], widths: list[int], first_style: str, style: str) -> Table:
    """Cells side by side, as a table of their own; those of all have the same widths. Numbers are to the right."""
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, GAP, 0, 0), expand=True, pad_edge=False)
    line.add_column(ratio=1, min_width=8, overflow="fold")
    for index, width in enumerate(widths[1:], start=1):
        line.add_column(
            justify="left" if index == 2 == len(widths) - 1 else "right", width=width, overflow="fold"
        )
    texts = []
    for index, lines in enumerate(cells):
        above = Text(lines[0] if lines else "", style if index else first_style)
        texts.append(Text("\n").join([above, *(Text(each, style or "dim") for each in lines[1:])]))
    line.add_row(*texts)
    return line


def _footnotes(results: Results) -> list[str]:
    first = results.first
    if first is None:
        return []
    notes = ["step: median of all; spread: lowest and highest of the repetitions' medians"]
    if len(results.measured) > 1:
        notes.append(f"1.00x and +0.0000: against {label(first, results)}")
    if any(row.peak_memory_bytes is not None for row in results.measured):
        notes.append(f"memory: of the rank that takes most; {memory_note(results)}")
    return notes


# ------------------------------------------------------------------------------------------------------ CSV


def rows_csv(results: Results) -> str:
    """The rows as CSV by RFC 4180: a header with units in its names, then a line a row; nothing rounded.

    What is not known is empty. The columns are the same, in the same order, for all results.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=CRLF)
    columns = _csv_columns(results)
    writer.writerow(columns)
    for row in results.rows:
        writer.writerow(["" if (value := of(row)) is None else value for of in columns.values()])
    return text.getvalue()


def _csv_columns(results: Results) -> dict[str, Callable[[Row], object]]:
    def at(spread: Iterable[float] | None, index: int) -> float | None:
        return None if spread is None else tuple(spread)[index]

    def against(key: str) -> Callable[[Row], float | None]:
        return lambda row: (results.against_first(row) or {}).get(key)

    target = results.target_loss
    return {
        "name": lambda row: printable(row.name),
        "slots": lambda row: row.slots,
        "status": lambda row: row.status,
        "reason": lambda row: printable(row.reason),
        "zero_stage": lambda row: row.zero_stage,
        "replicas": lambda row: row.replicas,
        "pipe_parallel_size": lambda row: row.pipe_parallel_size,
        "micro_batch_size": lambda row: row.micro_batch_size,
        "accumulation": lambda row: row.accumulation,
        "precision": lambda row: row.precision,
        "samples_per_step": lambda row: row.samples_per_step,
        "tokens_per_sample": lambda row: row.tokens_per_sample,
        "num_repetitions": lambda row: len(row.repetitions),
        "num_timed_steps": lambda row: row.num_steps,
        "start_s": lambda row: row.start_seconds,
        "step_median_s": lambda row: row.median_step_seconds,
        "step_p95_s": lambda row: row.p95_step_seconds,
        "step_lowest_repetition_s": lambda row: at(row.spread, 0),
        "step_highest_repetition_s": lambda row: at(row.spread, 1),
        "samples_per_s": lambda row: row.samples_per_second,
        "tokens_per_s": lambda row: row.tokens_per_second,
        "samples_per_s_against_first": against("samples_per_second"),
        "scaling_efficiency": results.scaling_efficiency,
        "peak_memory_bytes": lambda row: row.peak_memory_bytes,
        "peak_memory_against_first": against("peak_memory_bytes"),
        "model_state_bytes": lambda row: row.model_state_bytes,
        "estimated_model_state_bytes": lambda row: row.estimated_model_state_bytes,
        "bubble": lambda row: row.bubble,
        "bubble_ideal": lambda row: row.bubble_ideal,
        "loss": lambda row: row.loss,
        "loss_against_first": against("loss"),
        "seconds_to_target_loss": lambda row: None if target is None else row.seconds_to(target),
        "target_loss": lambda row: target,
    }
