"""What was measured, as lines of 80 columns at most."""

from __future__ import annotations

import statistics
import textwrap

from determined_ds.bench.quantities import aligned, milliseconds, rate, signed_percent, size
from determined_ds.memory.units import format_count
from determined_ds.protocol.handed_on import count
from determined_ds.protocol.machine_figures import (
    CHECKPOINT,
    COMMUNICATION,
    MEMORY,
    REDUCE_SCATTER,
    TRAINING,
    Collective,
    HeldStates,
    TimedStep,
    bus_factor,
)
from determined_ds.protocol.machine_file import MachineFigures
from determined_ds.report.formatting import byte_unit, number, percent
from determined_ds.report.texts import distinct_names

WIDTH = 80
LONGEST_MODEL = 18


def lines_of(machine: MachineFigures) -> list[str]:
    """The tables of all kinds that were measured, and the notes below them."""
    of_kinds = {
        COMMUNICATION: communication_lines,
        MEMORY: memory_lines,
        TRAINING: training_lines,
        CHECKPOINT: checkpoint_lines,
    }
    lines = []
    for signed in machine.measured:
        lines += of_kinds[signed.bench](machine)
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


# ---------------------------------------------------------------------------------------- memory


def memory_lines(machine: MachineFigures) -> list[str]:
    """What engines held beside the estimate, and the bandwidths of memory."""
    lines = []
    if machine.states:
        first = machine.states[0]
        name, unit = byte_unit(each.peak_bytes or each.state_bytes for each in machine.states)
        lines += [f"{count(first.ranks, 'replica')}, {first.precision}; {name} of the rank that holds most"]
        rows = [["model", "strategy", "states", "est.", "off", "peak", "est.", "off"]]
        rows += [_held(each, unit) for each in machine.states]
        lines += [f"  {line}" for line in aligned(rows, left=2)]
        lines += _note(
            "states: parameters, gradients and optimizer states of an engine, found by a walk through it; peak: the "
            "most that was allocated in a step of one short sample; on a CPU what is offloaded is in it. "
            "est.: what det-ds check --memory computes, without what torch's AdamW allocates while it steps"
        )
    for each in machine.bandwidths:
        at_once = f"{count(each.ranks, 'rank')} at once"
        lines.append(f"  bandwidth, {each.place}: {rate(each.bytes_per_s)} a rank, {at_once}")
    return lines


def _held(each: HeldStates, unit: int) -> list[str]:
    return [
        f"{each.model}, {format_count(each.num_parameters)}",
        each.strategy,
        _in_unit(each.state_bytes, unit),
        _in_unit(each.estimated_state_bytes if each.state_bytes else None, unit),
        _off(each.state_error),
        _in_unit(each.peak_bytes, unit),
        _in_unit(each.estimated_peak_bytes, unit),
        _off(each.peak_error),
    ]


def _in_unit(num_bytes: int | None, unit: int) -> str:
    return "–" if num_bytes is None else number(num_bytes / unit, 3)


def _off(error: float | None) -> str:
    return "–" if error is None else signed_percent(error)


# ---------------------------------------------------------------------------------------- training


def training_lines(machine: MachineFigures) -> list[str]:
    """Steps by model and batch, and the peaks that they are held against."""
    lines = []
    if machine.steps:
        first = machine.steps[0]
        lines += [f"{count(first.ranks, 'slot')}, {first.strategy}, {first.precision}"]
        rows = [["model", "batch", "ms a step", "", "samples/s", "tokens/s", "FLOPS", "MFU"]]
        full = [_with_size(each) for each in machine.steps]
        names = distinct_names(full, LONGEST_MODEL)
        rows += [_timed(each, machine, names[name]) for name, each in zip(full, machine.steps, strict=True)]
        lines += [f"  {line}" for line in aligned(rows, left=1)]
        lines += _note(
            "batch: samples of a rank at a time; ±: half of what is between the quartiles. FLOPS: of a rank, forward "
            "and backward by the sizes of the model, "
            "with nothing for what is computed again; MFU: their share of the measured peak"
        )
    for each in machine.peaks:
        threads = f", {count(each.threads, 'thread')} each" if each.threads else ""
        ranks = f"{count(each.ranks, 'rank')} at once{threads}"
        lines.append(f"  peak in {each.precision}: {rate(each.flops_per_s, 'FLOP')} a rank, {ranks}")
    return lines


def _with_size(each: TimedStep) -> str:
    """The name of a model with its parameters, where those are not all that it has."""
    is_ours = each.num_parameters is not None and ":" not in each.model
    return f"{each.model}, {format_count(each.num_parameters or 0)}" if is_ours else each.model


def _timed(each: TimedStep, machine: MachineFigures, name: str) -> list[str]:
    peak, flops = machine.peak_flops_per_s(each.precision, each.ranks), each.flops_per_s
    tokens = each.tokens_per_sample * each.samples_per_s
    return [
        name,
        f"{each.micro_batch_size}",
        milliseconds(each.step_seconds),
        f"±{(each.slow_step_seconds - each.fast_step_seconds) / 2 / each.step_seconds:.0%}",
        number(each.samples_per_s, 3),
        f"{tokens:,.0f}" if tokens else "–",
        rate(flops, "").removesuffix("/s").replace(" ", ""),
        percent(flops / peak if flops and peak else None),
    ]


# -------------------------------------------------------------------------------------- checkpoint


def checkpoint_lines(machine: MachineFigures) -> list[str]:
    """What checkpoints cost beside a copy."""
    lines = []
    for each in machine.checkpoints:
        lines += [f"{each.storage}: {size(each.size_bytes)} by {count(each.ranks, 'rank')}, {each.strategy}"]
        rows = [["", "s", "speed", "against a copy"]]
        kinds = (
            ("copied", each.copy_seconds),
            ("written at once", each.write_seconds),
            ("training stops", each.stall_seconds),
            ("loaded", each.load_seconds),
        )
        for name, seconds in kinds:
            if seconds is not None:
                against = f"{seconds / each.copy_seconds:.2f}x" if each.copy_seconds else "–"
                rows.append([name, number(seconds, 3), rate(each.size_bytes / seconds), against])
        lines += [f"  {line}" for line in aligned(rows, left=1)]
    if lines:
        lines += _note(
            "copied: by one process, to the same disk. training stops: for a copy in memory, while a checkpoint is "
            "written as training continues. Files are on the disk before the clock stops, and out of the page cache "
            "before they are read"
        )
    return lines


def _note(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
