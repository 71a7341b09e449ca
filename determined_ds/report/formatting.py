"""Numbers and rows in words, the same in the table, the pictures and the page."""

from __future__ import annotations

import math
from collections.abc import Iterable

from determined_ds.memory.units import GIB, KIB, MIB, TIB
from determined_ds.report.results import CANNOT_RUN, FAILED, OUT_OF_MEMORY, STOPPED, Results, Row
from determined_ds.report.strengths import ALIKE, SPEED
from determined_ds.report.texts import distinct_names, printable, shortened

LONGEST_NAME = 40
SMALLEST, LARGEST = 1e-6, 1e12  # of the numbers that are written out
LONGEST_REASON = 600
LEAST_SHARE = 0.005  # of a step that is written out
RAN_OUT = {
    OUT_OF_MEMORY: "ran out of memory",
    FAILED: "failed",
    CANNOT_RUN: "cannot run",
    STOPPED: "was stopped",
}


# ---------------------------------------------------------------------------------------------- numbers


def number(value: float | None, digits: int = 4) -> str:
    """To so many digits: ``97.43``, ``328.4``; whole numbers keep all of theirs: ``41,984``.

    Only what no measurement gives, a loss that runs away, is in powers of ten: ``1.000e+16``.
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if not SMALLEST <= abs(value) < LARGEST:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def loss_text(value: float | None) -> str:
    """A loss, to four decimals; to four digits where it is small or large."""
    if value is None or not math.isfinite(value) or not 0.1 <= abs(value) < 1000:
        return number(value)
    return f"{value:.4f}"


def difference(value: float | None) -> str:
    """With its sign: ``+0.0021``."""
    if value is None:
        return "–"
    if not abs(value) < 1000:
        return ("+" if value > 0 else "") + number(value)
    return f"{value:+.4f}"


def ratio(value: float | None) -> str:
    """``1.03x``."""
    return "–" if value is None else f"{number(value, 3) if value >= 10 else f'{value:.2f}'}x"


def percent(value: float | None) -> str:
    """Of a share: ``11.1 %``."""
    return "–" if value is None else f"{100 * value:.1f} %"


def between(spread: tuple[float, float] | None, unit: float = 1) -> str:
    """Lowest to highest: ``96.9–98.1``."""
    if spread is None:
        return "–"
    low, high = (number(value / unit) for value in spread)
    return low if low == high else f"{low}–{high}"


def byte_unit(sizes: Iterable[int | None]) -> tuple[str, int]:
    """The unit for several sizes: the largest that the largest of them is ten times of."""
    largest = max((size for size in sizes if size is not None), default=0)
    units = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    if largest == 0:
        return "MiB", MIB
    return next(((name, size) for name, size in units if largest >= 10 * size), ("B", 1))


def step_unit(results: Results) -> tuple[str, float]:
    """The unit of step times, and its seconds."""
    longest = max((row.median_step_seconds or 0 for row in results.rows), default=0)
    return ("s", 1.0) if longest >= 10 else ("ms", 1e-3)


# ------------------------------------------------------------------------------------------------- rows


def slots_text(slots: int) -> str:
    """``1 slot``, ``2 slots``."""
    return f"{slots} slot" if slots == 1 else f"{slots:,} slots"


def has_several_slots(results: Results) -> bool:
    """Whether rows differ in their slots, and have to say them."""
    return len({row.slots for row in results.rows}) > 1


def name_of(row: Row, results: Results, most: int = LONGEST_NAME) -> str:
    """A row's name, fit to be shown, and another than that of any row of another name."""
    return distinct_names((printable(each.name) for each in results.rows), most)[printable(row.name)]


def label(row: Row, results: Results, joint: str = " on ", most: int = LONGEST_NAME) -> str:
    """What a row is called among the others: ``zero1``, or ``zero1 on 2 slots``.

    Args:
        row: One of the results'.
        results: Of which it is one.
        joint: Between name and slots.
        most: Characters of the name.
    """
    slots = f"{joint}{slots_text(row.slots)}" if has_several_slots(results) else ""
    return f"{name_of(row, results, most)}{slots}"


def shares(row: Row, results: Results) -> str:
    """How the work is shared out: ``2 replicas``, ``2 stages``; the precision too, where rows differ in it."""
    parts = []
    if row.is_pipeline:
        stages = f"{row.pipe_parallel_size} stages"
        parts.append(f"{row.replicas} x {stages}" if (row.replicas or 1) > 1 else stages)
    elif row.replicas is not None:
        parts.append("1 replica" if row.replicas == 1 else f"{row.replicas} replicas")
    if row.precision is not None and len({each.precision for each in results.rows} - {None}) > 1:
        parts.append(row.precision)
    return ", ".join(parts)


def micro(row: Row) -> str:
    """The micro-batch, and how many of them a rank takes a step: ``16 x 1``."""
    if row.micro_batch_size is None or row.accumulation is None:
        return ""
    return f"{row.micro_batch_size} x {row.accumulation}"


def layout(row: Row, results: Results) -> str:
    """``2 replicas, micro 16 x 1``, ``2 stages, micro 4 x 8``."""
    batches = micro(row)
    return ", ".join(part for part in (shares(row, results), f"micro {batches}" if batches else "") if part)


def parts_in_words(row: Row) -> str:
    """What a step's time goes into, in percent, the most first: ``step: backward 48 %, forward 31 %, ...``."""
    shares = sorted((row.parts or {}).items(), key=lambda item: -item[1])
    shown = [f"{part} {100 * share:.0f} %" for part, share in shares if share >= LEAST_SHARE]
    return f"step: {', '.join(shown)}"


def reason(row: Row) -> str:
    """Why a row was not measured: ``out of memory: ...``."""
    said = shortened(printable(row.reason), LONGEST_REASON)
    if row.is_measured:
        return ""
    if row.status not in RAN_OUT:
        return "no step was timed: all of them were the warm-up"
    return f"{row.status}: {said}" if said else row.status


def unmeasured(results: Results) -> tuple[Row, ...]:
    """The rows that have no part in comparisons."""
    return tuple(row for row in results.rows if not row.is_measured)


def memory_note(results: Results) -> str:
    """What peak memory is, which depends on the accelerator."""
    if results.accelerator == "cpu":
        return "peak memory on a CPU is a process's resident memory: torch itself, the data and the model are in it"
    return "peak memory is what the allocator had handed out of the device's memory at most"


# -------------------------------------------------------------------------------------------- the verdict


def verdict(results: Results) -> str:
    """What came out, in one sentence."""
    timed = [row for row in results.measured if row.samples_per_second is not None]
    if not timed:
        num = len(results.rows)
        return f"None of the {num} was measured." if num > 1 else "Nothing was measured."
    fastest = max(timed, key=lambda row: row.samples_per_second or 0)
    parts = [_about_speed(results, fastest, timed), _about_memory(results)]
    missing = unmeasured(results)
    if len(missing) == 1:
        parts.append(f"{label(missing[0], results)} {RAN_OUT.get(missing[0].status, 'timed no step')}")
    elif missing:
        parts.append(f"{len(missing)} of {len(results.rows)} were not measured")
    return "; ".join(part for part in parts if part) + "."


def _about_speed(results: Results, fastest: Row, timed: list[Row]) -> str:
    name, speed = label(fastest, results), f"{number(fastest.samples_per_second, 3)} samples/s"
    if len(timed) == 1:
        return f"{name} does {speed}"
    beside = _beside(results, fastest, timed)
    close = [row for row in timed if row is not fastest and SPEED.is_tied(results, row, fastest)]
    if close:
        others = _listed([label(row, results) for row in close])
        beside += f" (too close to {others} to distinguish)"
    return f"{name} is the fastest: {speed}{beside}"


def _beside(results: Results, fastest: Row, timed: list[Row]) -> str:
    """The fastest against the first strategy on as many slots; against the first row, where it is that itself."""
    first = results.first
    alike = [row for row in timed if first and (row.name, row.slots) == (first.name, fastest.slots)]
    other = next((row for row in [*alike, *timed[:1]] if row is not fastest), None)
    if other is None or not other.samples_per_second or not fastest.samples_per_second:
        return ""
    named = label(other, results) if other.slots != fastest.slots else name_of(other, results)
    return f", {fastest.samples_per_second / other.samples_per_second:.2f} times {named}"


def _about_memory(results: Results) -> str:
    sizes = [(row.peak_memory_bytes, row) for row in results.measured if row.peak_memory_bytes is not None]
    if not sizes:
        return ""
    least, row = min(sizes, key=lambda pair: pair[0])
    if max(size for size, _ in sizes) <= ALIKE * least:
        return ""
    unit, size = byte_unit([least])
    return f"{label(row, results)} takes the least memory, {number(least / size, 3)} {unit} a rank"


def _listed(names: list[str]) -> str:
    if len(names) > 3:
        return f"{len(names)} others"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
