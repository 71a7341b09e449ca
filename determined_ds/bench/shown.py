"""What was measured, as lines of 80 columns at most."""

from __future__ import annotations

import statistics
import textwrap

from determined_ds.bench.quantities import aligned, milliseconds, rate, size
from determined_ds.protocol.handed_on import count
from determined_ds.protocol.machine_figures import COMMUNICATION, REDUCE_SCATTER, Collective, bus_factor
from determined_ds.protocol.machine_file import MachineFigures

WIDTH = 80


def lines_of(machine: MachineFigures) -> list[str]:
    """The tables of all kinds that were measured, and the notes below them."""
    lines = []
    for signed in machine.measured:
        if signed.bench == COMMUNICATION:
            lines += communication_lines(machine)
        lines += [line for note in signed.notes for line in _note(note)]
    return lines


def communication_lines(machine: MachineFigures) -> list[str]:
    """A table for each collective, and how it was counted."""
    lines: list[str] = []
    for collective in machine.collectives:
        lines += [*_collective(collective), ""]
    if not lines:
        return []
    lines += _note(
        "time: of the slowest rank, median and quartiles; send_recv: half of one there and back between the first and "
        "the last rank. busbw as nccl-tests counts it: bytes of the whole / time, times 2(n-1)/n for all_reduce, "
        "(n-1)/n for reduce_scatter, all_gather and all_to_all, 1 for the others. DeepSpeed: what its communication "
        "log (ds_bench's formulas) says of the same calls through deepspeed.comm, in turns with torch's"
    )
    if any(each.name == REDUCE_SCATTER for each in machine.collectives):
        lines += _note("DeepSpeed multiplies the bytes of a reduce_scatter by the number of ranks once more")
    return lines


def _collective(each: Collective) -> list[str]:
    where = f"{count(each.ranks, 'rank')} on {count(each.machines, 'machine')}, {each.backend}, {each.dtype}"
    factor = bus_factor(each.name, each.ranks)
    rows = [["size", "ms", "quartiles", "busbw", "DeepSpeed: ms", "busbw"]]
    for point in each.points:
        spread = f"{milliseconds(point.fast_seconds)}–{milliseconds(point.slow_seconds)}"
        own = rate(factor * point.size_bytes / point.seconds)
        theirs = milliseconds(point.deepspeed_seconds), rate(point.deepspeed_bus_bytes_per_s)
        rows.append([size(point.size_bytes), milliseconds(point.seconds), spread, own, *theirs])
    fitted = (
        f"  fit: {milliseconds(each.latency_s)} ms + bytes at a busbw of {rate(each.bus_bytes_per_s)}; "
        f"off by {_misfit(each):.0%} (median)"
    )
    return [f"{each.name}: {where}", *(f"  {line}" for line in aligned(rows)), fitted]


def _misfit(each: Collective) -> float:
    """How far the fitted line is from the times, in the middle of the sizes."""
    slope = bus_factor(each.name, each.ranks) / each.bus_bytes_per_s
    return statistics.median(
        abs((each.latency_s + slope * point.size_bytes) / point.seconds - 1) for point in each.points
    )


def _note(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
