"""What came out of measurements, in words: names of rows, and the verdict of a comparison."""

from __future__ import annotations

from determined_ds.report.numbers import byte_unit, count, number, printable, shortened
from determined_ds.report.results import CANNOT_RUN, FAILED, OUT_OF_MEMORY, STOPPED, Results, Row

LONGEST_NAME, LONGEST_REASON = 80, 600
RAN_OUT = {
    OUT_OF_MEMORY: "ran out of memory",
    FAILED: "failed",
    CANNOT_RUN: "cannot run",
    STOPPED: "was stopped",
}
ONCE = 0.05  # assumed spread of a speed that was measured once, relative
ALIKE = 0.01  # sizes that differ by less are the same, relative


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
    if micro := micro_batches(row):
        parts.append(f"micro {micro}")
    return ", ".join(parts)


def micro_batches(row: Row) -> str | None:
    """The micro-batch, and how many of them a rank takes a step: ``16 x 1``."""
    known = row.micro_batch_size is not None and row.accumulation is not None
    return f"{row.micro_batch_size} x {row.accumulation}" if known else None


def reason(row: Row) -> str:
    """Why a row has no part in comparisons; "" of one that has."""
    if row.is_measured:
        return ""
    if row.status not in RAN_OUT:
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


def _fastest(results: Results) -> tuple[list[Row], int]:
    """The rows that none is faster than by more than repetitions differ, the fastest first; and of how many rows."""
    known = [row for row in results.measured if row.samples_per_second is not None]
    known.sort(key=lambda row: -(row.samples_per_second or 0))

    def ends(row: Row) -> tuple[float, float]:
        low, high = row.samples_per_second_spread or (0.0, 0.0)
        wider = 0 if len(row.repetitions) > 1 else ONCE / 2
        return low * (1 - wider), high * (1 + wider)

    return [row for row in known if ends(row)[1] >= ends(known[0])[0]], len(known)


def verdict(results: Results) -> str:
    """What came out, in one sentence."""
    leading, num_timed = _fastest(results)
    if not leading:
        num = len(results.rows)
        return f"None of the {num} was measured." if num > 1 else "Nothing was measured."
    fastest, first = leading[0], results.first
    name, speed = label(fastest, results), f"{number(fastest.samples_per_second, 3)} samples/s"
    parts = [f"{name} does {speed}" if num_timed == 1 else f"{name} is the fastest: {speed}"]
    # Beside the first strategy on as many slots; beside the first row, where it is that itself.
    alike = [
        row for row in results.measured if first and (row.name, row.slots) == (first.name, fastest.slots)
    ]
    others = [row for row in (*alike, first) if row and row is not fastest and row.samples_per_second]
    if others and fastest.samples_per_second and others[0].samples_per_second:
        named = label(others[0], results) if others[0].slots != fastest.slots else name_of(others[0])
        if not any(others[0] is row for row in leading):  # a ratio within the spread says nothing
            parts[0] += f", {fastest.samples_per_second / others[0].samples_per_second:.2f} times {named}"
    if close := [label(row, results) for row in leading[1:]]:
        named = " and ".join(filter(None, (", ".join(close[:-1]), close[-1])))
        parts[0] += f" (too close to {named if len(close) <= 3 else f'{len(close)} others'} to distinguish)"
    sizes = {size: row for row in reversed(results.measured) if (size := row.peak_memory_bytes) is not None}
    if sizes and max(sizes) > (1 + ALIKE) * min(sizes):
        unit, size = byte_unit([min(sizes)])
        leanest = label(sizes[min(sizes)], results)
        parts.append(f"{leanest} takes the least memory, {number(min(sizes) / size, 3)} {unit} a rank")
    missing = unmeasured(results)
    if len(missing) == 1:
        parts.append(f"{label(missing[0], results)} {RAN_OUT.get(missing[0].status, 'timed no step')}")
    elif missing:
        parts.append(f"{len(missing)} of {len(results.rows)} were not measured")
    return "; ".join(parts) + "."
