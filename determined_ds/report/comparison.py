"""Results for people: one list of columns, from which the terminal's table, results.csv and report.html are made."""

from __future__ import annotations

import contextlib
import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from determined_ds.documents.files import write_files
from determined_ds.report import numbers as n
from determined_ds.report.numbers import UNKNOWN, Head, Table, byte_unit, count, number, printable, shortened
from determined_ds.report.results import RAN_OUT, WINDOW, Results, Row, text_of

RESULTS, CSV, PAGE = "results.json", "results.csv", "report.html"
LONGEST_NAME, LONGEST_REASON, LONGEST_IN_CELL = 80, 600, 160  # the whole reason stands below the page's table
ONCE = 0.05  # assumed spread of a speed that was measured once, relative
ALIKE = 0.01  # sizes that differ by less are the same, relative
MEMORY_NOTES = {
    "cpu": "peak memory on a CPU is a process's resident memory: torch itself, the data and the model are in it",
    "cuda": "peak memory is what the allocator had handed out of the device's memory at most",
}


def write_report(results: Results, folder: str | Path, *, page: bool = True) -> list[Path]:
    """Write results as JSON, as CSV and as a page; all of them or none, each of them whole at any moment.

    The CSV is that of RFC 4180: a header with units in its names, then a line a row; nothing is rounded, unknown values
    are empty, and the columns are the same for all results. The same results give the same texts.

    Args:
        results: What was measured so far.
        folder: Made where it is missing. Files of an earlier report in it are replaced.
        page: Whether to draw the page, too; pictures take a second or two.

    Returns:
        What was written.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    folder, table = Path(folder), io.StringIO(newline="")
    columns = {name: column for name, column in COLUMNS.items() if column.in_csv}
    writer = csv.writer(table, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows([each.value(results, row) for each in columns.values()] for row in results.rows)
    texts = {folder / RESULTS: text_of(results), folder / CSV: table.getvalue()}
    texts |= {folder / PAGE: _page(results)} if page else {}
    write_files(texts, overwrite=True)
    return list(texts)


# ------------------------------------------------------------------------------------------- rows in words


def label(row: Row, results: Results, joint: str = " on ") -> str:
    """What a row is called among the others: ``zero1``, or ``zero1 on 2 slots`` where rows differ in their slots."""
    differ = len({each.slots for each in results.rows}) > 1
    return _name(row) + (f"{joint}{count(row.slots, 'slot')}" if differ else "")


def _name(row: Row) -> str:
    return shortened(printable(row.name), LONGEST_NAME)


def _micro_batches(row: Row) -> str | None:
    """The micro-batch, and how many of them a rank takes a step: ``16 x 1``."""
    known = row.micro_batch_size is not None and row.accumulation is not None
    return f"{row.micro_batch_size} x {row.accumulation}" if known else None


def _unmeasured(results: Results) -> list[tuple[Row, str]]:
    """The rows that have no part in comparisons, and why."""
    found = []
    for row in results.rows:
        why = "no step was timed: all of them were the warm-up"
        if row.status in RAN_OUT:
            why = ": ".join(filter(None, (row.status, shortened(printable(row.reason), LONGEST_REASON))))
        found += [] if row.is_measured else [(row, why)]
    return found


def verdict(results: Results) -> str:
    """What came out, in one sentence."""

    def speed(row: Row) -> float:
        return row.samples_per_second or 0.0

    def ends(row: Row) -> tuple[float, float]:
        low, high = row.samples_per_second_spread or (0.0, 0.0)
        wider = 0 if len(row.repetitions) > 1 else ONCE / 2
        return low * (1 - wider), high * (1 + wider)

    # Those that none is faster than by more than repetitions differ, the fastest first.
    known = sorted(filter(speed, results.measured), key=speed, reverse=True)
    leading = [row for row in known if ends(row)[1] >= ends(known[0])[0]]
    if not leading:
        num = len(results.rows)
        return f"None of the {num} was measured." if num > 1 else "Nothing was measured."
    fastest, first = leading[0], results.first
    does = "does" if len(known) == 1 else "is the fastest:"
    parts = [f"{label(fastest, results)} {does} {number(speed(fastest), 3)} samples/s"]
    # Beside the first strategy on as many slots; beside the first row, where it is that itself.
    alike = [row for row in known if first and (row.name, row.slots) == (first.name, fastest.slots)]
    others = [row for row in (*alike, first) if row is not None and row in known and row != fastest]
    if others and others[0] not in leading:  # a ratio within the spread says nothing
        named = label(others[0], results) if others[0].slots != fastest.slots else _name(others[0])
        parts[0] += f", {speed(fastest) / speed(others[0]):.2f} times {named}"
    if close := [label(row, results) for row in leading[1:]]:
        named = " and ".join(filter(None, (", ".join(close[:-1]), close[-1])))
        parts[0] += f" (too close to {named if len(close) <= 3 else f'{len(close)} others'} to distinguish)"
    sizes = {size: row for row in reversed(results.measured) if (size := row.peak_memory_bytes) is not None}
    if sizes and max(sizes) > (1 + ALIKE) * min(sizes):
        unit, size = byte_unit([min(sizes)])
        leanest = label(sizes[min(sizes)], results)
        parts.append(f"{leanest} takes the least memory, {number(min(sizes) / size, 3)} {unit} a rank")
    missing = [row for row, _ in _unmeasured(results)]
    if len(missing) == 1:
        parts.append(f"{label(missing[0], results)} {RAN_OUT.get(missing[0].status, 'timed no step')}")
    elif missing:
        parts.append(f"{len(missing)} of {len(results.rows)} were not measured")
    return "; ".join(parts) + "."


# ------------------------------------------------------------------------------------------- columns


@dataclass(frozen=True)
class Column:
    """One fact about a row."""

    value: Callable[[Results, Row], Any]  # exact, as the CSV has it and the page sorts by it; None: not known
    head: str = ""  # without the unit
    text: Callable[[Any], str] = number  # of a value that is already divided by the unit
    unit: Callable[[Results], tuple[str, float]] = lambda _: ("", 1)  # its name and size, one for all rows
    best: Callable[[Iterable[float]], float] | None = None  # which value the page highlights
    align: Literal["left", "right"] = "right"
    # In the terminal's table: what goes first where there is no room has the highest, 0 stays, None is not in it.
    drop: int | None = None
    below: str | None = None  # on the page: the column below its values; None: it is not a column there
    in_csv: bool = True

    def heading(self, results: Results) -> str:
        """Its heading with the unit: ``step, ms``."""
        return ", ".join(filter(None, (self.head, self.unit(results)[0])))

    def shown(self, results: Results, row: Row) -> str:
        """A row's value in the unit of the column, formatted."""
        value, (_, size) = self.value(results, row), self.unit(results)
        if value is None:
            return UNKNOWN
        if size != 1:
            value = tuple(each / size for each in value) if isinstance(value, tuple) else value / size
        return self.text(value)

    def known(self, results: Results) -> set[Any]:
        """The values of the measured rows."""
        return {self.value(results, row) for row in results.measured} - {None}


def _of(name: str, *head: Any, **how: Any) -> Column:
    return Column(lambda _, row: getattr(row, name), *head, **how)


def _against_first(name: str, text: Callable[[Any], str], **how: Any) -> Column:
    return Column(lambda results, row: results.against_first(row).get(name), "vs. first", text, **how)


def _step_unit(results: Results) -> tuple[str, float]:
    longest = max((row.median_step_seconds or 0 for row in results.rows), default=0)
    return ("s", 1.0) if longest >= 10 else ("ms", 1e-3)


def _bytes_of(name: str) -> Callable[[Results], tuple[str, float]]:
    return lambda results: byte_unit(getattr(row, name) for row in results.rows)


STATES, PEAK = "model_state_bytes", "peak_memory_bytes"
IN_STATES, IN_PEAK = _bytes_of(STATES), _bytes_of(PEAK)
SPEED, AGAINST = "samples_per_s", "samples_per_s_against_first"
# Programs read the CSV by these names: rename nothing.
COLUMNS = {
    "name": Column(lambda _, row: printable(row.name), "strategy", str, align="left", drop=0),
    "slots": _of("slots", "slots", str, drop=6),
    "status": _of("status"),
    "reason": Column(lambda _, row: printable(row.reason)),
    **{name: _of(name) for name in ("zero_stage", "replicas", "pipe_parallel_size", "micro_batch_size")},
    **{name: _of(name) for name in ("accumulation", "precision", "samples_per_step", "tokens_per_sample")},
    "num_repetitions": Column(lambda _, row: len(row.repetitions)),
    "num_timed_steps": Column(lambda _, row: len(row.step_seconds)),
    "micro": Column(lambda _, row: _micro_batches(row), "micro", str, drop=8, in_csv=False),
    "step_median_s": _of("median_step_seconds", "step", unit=_step_unit, drop=0, below="spread"),
    "spread": Column(
        lambda _, row: row.spread if len(row.repetitions) > 1 else None,
        "spread",
        lambda ends: n.span(*ends),
        unit=lambda results: ("", _step_unit(results)[1]),  # that of the step beside it
        drop=1,
        in_csv=False,
    ),
    "step_p95_s": _of("p95_step_seconds", "p95", unit=_step_unit, drop=11, below=""),
    "step_lowest_repetition_s": Column(lambda _, row: row.spread and row.spread[0]),
    "step_highest_repetition_s": Column(lambda _, row: row.spread and row.spread[1]),
    SPEED: _of("samples_per_second", "samples/s", best=max, drop=0, below=AGAINST),
    AGAINST: _against_first("samples_per_second", n.ratio, drop=2),
    "tokens_per_s": _of("tokens_per_second", "tokens/s", drop=10, below=""),
    PEAK: _of(PEAK, "peak", unit=IN_PEAK, best=min, drop=3, below="peak_memory_against_first"),
    "peak_memory_against_first": _against_first(PEAK, n.ratio),
    STATES: _of(STATES, "states", unit=IN_STATES, drop=9, below=""),
    "bubble": _of("bubble", "bubble", n.percent, drop=5, below="bubble_ideal"),
    "bubble_ideal": _of("bubble_ideal", "ideal", n.percent, drop=7),
    "loss": _of("loss", "loss", n.loss_text, drop=4, below="loss_against_first"),
    "loss_against_first": _against_first("loss", n.difference),
    "seconds_to_target_loss": Column(
        lambda results, row: row.seconds_to(results.target_loss),
        "time",
        lambda value: number(value, 3),
        unit=lambda results: (f"s to {number(results.target_loss)}", 1),
        best=min,
        below="",
    ),
    "target_loss": Column(lambda results, _: results.target_loss),
}


def results_table(results: Results) -> Table:
    """The measurements for a terminal, a line a row; below them stand the rows that have none, and why."""
    notes = [f"{label(row, results)}: {why}" for row, why in _unmeasured(results)]
    if results.first is None:
        return Table(heads=[], rows=[], notes=notes)
    known = {name: each for name, each in COLUMNS.items() if each.drop is not None and each.known(results)}
    notes.append("step: median of all; spread: lowest and highest median of the repetitions")
    if len(results.measured) > 1:
        notes.append(f"vs. first: against {label(results.first, results)}")
    if "bubble" in known:
        notes.append("bubble: share of time in which a pipeline's stages wait; ideal: by the schedule alone")
    if PEAK in known:
        notes.append(f"peak: of the rank that takes most; {MEMORY_NOTES[results.accelerator]}")
    several = len({row.slots for row in results.rows}) > 1  # then all columns may go before the slots
    drops = {name: 0 if several and name == "slots" else each.drop or 0 for name, each in known.items()}
    heads = [
        Head(text=each.heading(results), align=each.align, drop=drops[name], folds=name == "name")
        for name, each in known.items()
    ]
    cells = [[each.shown(results, row) for each in known.values()] for row in results.measured]
    return Table(heads=heads, rows=cells, notes=notes)


# ------------------------------------------------------------------------------------------- the page


def _page(results: Results) -> str:
    """The page, which loads nothing; what came from outside is text in it, never markup."""
    from determined_ds.report.charts import CHARTS
    from determined_ds.report.style import PALETTE, address_of, self_contained, strategy_colours

    columns = [each for each in COLUMNS.values() if each.below is not None and each.known(results)]
    precisions = {row.precision for row in results.rows} - {None}

    def cell(row: Row, column: Column) -> dict[str, Any]:
        value, known = column.value(results, row), column.known(results)
        small = COLUMNS[column.below].shown(results, row) if column.below else ""
        best = column.best(known) if column.best and len(known) > 1 else None
        return {
            "text": column.shown(results, row),
            "small": "" if small == UNKNOWN else small,
            "value": repr(value) if value is not None and math.isfinite(value) else None,
            "is_best": value is not None and value == best,
        }

    def about(row: Row) -> str:
        replicas = count(row.replicas, "replica") if row.replicas is not None else ""
        if (stages := row.pipe_parallel_size or 1) > 1:
            replicas = f"{row.replicas} x " * ((row.replicas or 1) > 1) + f"{stages} stages"
        precision, micro = row.precision if len(precisions) > 1 else "", _micro_batches(row)
        return ", ".join(filter(None, (replicas, precision, f"micro {micro}" if micro else "")))

    date, measured = results.created, ""
    with contextlib.suppress(ValueError):
        date = n.date_text(datetime.fromisoformat(results.created))
    if starts := [each for row in results.measured for each in row.repetitions]:
        times, warmup = max(len(row.repetitions) for row in results.measured), starts[0].warmup
        measured = f"{times} x {results.steps} steps each, after {warmup} of warm-up, in fresh processes"
    sizes = sorted({(row.samples_per_step, row.tokens_per_sample) for row in results.measured}, key=str)
    batch = (
        f"{num:,} samples" + (f" of {tokens:,} tokens" if tokens else "") for num, tokens in sizes if num
    )
    note, figures = MEMORY_NOTES[results.accelerator], {name: draw(results) for name, draw in CHARTS.items()}
    return self_contained(
        "comparison.html.jinja",
        ["sort.js"],
        title=printable(results.title),
        verdict=verdict(results),
        facts={
            "command": printable(results.command),
            "machine": printable(results.machine),
            "date": printable(date),
            "measured": measured,
            "global batch": "; ".join(batch),
        },
        results=results,
        repeated=any(len(row.repetitions) > 1 for row in results.measured),
        label=label,
        heads=[
            (each.heading(results), COLUMNS[each.below].head if each.below else "", each.align)
            for each in (COLUMNS["name"], COLUMNS["slots"], *columns)
        ],
        slots=COLUMNS["slots"],
        columns=columns,
        cell=cell,
        name=_name,
        about=about,
        colour_of={name: PALETTE.index(colour) for name, colour in strategy_colours(results).items()},
        shortened=lambda text: shortened(text, LONGEST_IN_CELL),
        pictures={name: address_of(figure) for name, figure in figures.items() if figure is not None},
        unmeasured=_unmeasured(results),
        memory_note=f"{note[0].upper()}{note[1:]}",
        window=WINDOW,
        target="" if results.target_loss is None else n.loss_text(results.target_loss),
    )
