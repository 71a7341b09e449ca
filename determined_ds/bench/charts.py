"""What was measured, as pictures in the look of the reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from determined_ds.bench.quantities import size
from determined_ds.protocol.handed_on import count
from determined_ds.protocol.machine_figures import (
    CHECKPOINT,
    COMMUNICATION,
    MEMORY,
    TRAINING,
    TimedStep,
    bus_factor,
)
from determined_ds.protocol.machine_file import MachineFigures
from determined_ds.report.formatting import number
from determined_ds.report.style import GROUND, PALETTE, drawing, figure_of, png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def picture_of(machine: MachineFigures, bench: str) -> bytes | None:
    """The picture of a kind as PNG; None where nothing of it was measured."""
    drawn: dict[str, Callable[[MachineFigures], Figure | None]] = {
        COMMUNICATION: communication_picture,
        MEMORY: memory_picture,
        TRAINING: training_picture,
        CHECKPOINT: checkpoint_picture,
    }
    with drawing():
        figure = drawn[bench](machine)
    return None if figure is None else png_of(figure)


def communication_picture(machine: MachineFigures) -> Figure | None:
    """Bus bandwidth and time over the size, a line a collective; DeepSpeed's as dots of the same colour."""
    if not machine.collectives:
        return None
    figure, (bandwidth, time) = figure_of([2.3, 2.0])
    for (colour, _), each in zip(PALETTE, machine.collectives, strict=False):
        factor = bus_factor(each.name, each.ranks)
        sizes = [point.size_bytes for point in each.points]
        seconds = [point.seconds for point in each.points]
        rates = [factor * num / took / 1e9 for num, took in zip(sizes, seconds, strict=True)]
        bandwidth.plot(sizes, rates, "-", color=colour, label=each.name)
        time.plot(sizes, [1000 * took for took in seconds], "-", color=colour)
        time.fill_between(
            sizes,
            [1000 * point.fast_seconds for point in each.points],
            [1000 * point.slow_seconds for point in each.points],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        theirs = [(p.size_bytes, 1000 * p.deepspeed_seconds) for p in each.points if p.deepspeed_seconds]
        dot: dict[str, Any] = {"markeredgecolor": GROUND, "markersize": 5.5, "markeredgewidth": 0.6}
        time.plot([at for at, _ in theirs], [took for _, took in theirs], "o", color=colour, **dot)
    first = machine.collectives[0]
    bandwidth.set_title(f"Bus bandwidth, {count(first.ranks, 'rank')}, {first.backend}, {first.dtype}")
    bandwidth.set_ylabel("GB/s")
    bandwidth.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    bandwidth.set_ylim(0, 1.45 * bandwidth.get_ylim()[1])
    time.set_title("Time of a call; dots: DeepSpeed's log")
    time.set_ylabel("ms; band: quartiles")
    time.set_yscale("log")
    time.yaxis.set_major_formatter("{x:g}")  # a power of ten would be set by TeX
    ticks = [2**power for power in range(10, 41, 4)]
    for panel in (bandwidth, time):
        panel.set_xscale("log", base=2)
        low, high = panel.get_xlim()
        shown = [tick for tick in ticks if low <= tick <= high]
        panel.set_xticks(shown, [_binary(tick) for tick in shown])
        panel.minorticks_off()
        panel.grid(axis="y")
    return figure


def memory_picture(machine: MachineFigures) -> Figure | None:
    """Model states, or where some are offloaded the peak, measured beside the estimate, of the largest model."""
    if not machine.states:
        return None
    largest = max(machine.states, key=lambda each: each.num_parameters).model
    shown = [each for each in machine.states if each.model == largest]
    states = [each for each in shown if each.state_bytes]
    peaks = [each for each in shown if each.peak_bytes and each.estimated_peak_bytes]
    panels_of = [
        ("Model states", [(e.strategy, e.state_bytes or 0, e.estimated_state_bytes) for e in states]),
        ("Peak of a step", [(e.strategy, e.peak_bytes or 0, e.estimated_peak_bytes or 0) for e in peaks]),
    ]
    panels_of = [(title, rows) for title, rows in panels_of if rows]
    figure, panels = figure_of([0.42 * len(rows) + 0.1 for _, rows in panels_of])
    names = list(dict.fromkeys(each.strategy for each in shown))
    colours = {name: PALETTE[at % len(PALETTE)][0] for at, name in enumerate(names)}
    for panel, (title, rows) in zip(panels, panels_of, strict=True):
        _pairs(panel, rows, colours)
        panel.set_title(f"{title} of {largest}, {count(shown[0].ranks, 'replica')}, {shown[0].precision}")
        panel.set_xlabel("MiB a rank; light: estimate")
    return figure


def _pairs(panel: Axes, rows: list[tuple[str, int, int]], colours: dict[str, str]) -> None:
    """Bars of measured numbers, each with a lighter one below that was estimated."""
    longest = max(max(measured, estimated) for _, measured, estimated in rows) / 2**20
    for at, (name, measured, estimated) in enumerate(rows):
        for place, num_bytes, alpha in ((at - 0.2, measured, 1.0), (at + 0.2, estimated, 0.4)):
            panel.barh(place, num_bytes / 2**20, 0.36, color=colours[name], alpha=alpha)
            panel.text(
                num_bytes / 2**20 + longest * 0.01,
                place,
                number(num_bytes / 2**20, 3),
                va="center",
                fontsize=8,
            )
    panel.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim(0, 1.15 * longest)


def training_picture(machine: MachineFigures) -> Figure | None:
    """Samples per second over the batch, a line a model; below, the share of the device's peak, where it is known."""
    if not machine.steps:
        return None
    by_model: dict[str, list[TimedStep]] = {}
    for each in machine.steps:
        by_model.setdefault(each.model, []).append(each)
    figure, (speed, share) = figure_of([2.2, 1.8])
    top = 0.0
    for index, (model, steps) in enumerate(by_model.items()):
        colour = PALETTE[index % len(PALETTE)][0]
        at = [each.micro_batch_size for each in steps]
        low, high = ([e.samples / took for e, took in zip(steps, t, strict=True)] for t in _spreads(steps))
        speed.plot(at, [each.samples_per_s for each in steps], "o-", color=colour, label=model, markersize=4)
        speed.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        peaks = [machine.peak_flops_per_s(each.precision, each.ranks) for each in steps]
        known = [
            (each.micro_batch_size, 100 * each.flops_per_s / peak)
            for each, peak in zip(steps, peaks, strict=True)
            if each.flops_per_s and peak
        ]
        share.plot([x for x, _ in known], [y for _, y in known], "o-", color=colour, markersize=4)
        top = max([top, *(y for _, y in known)])
    first = machine.steps[0]
    speed.set_title(f"Throughput, {count(first.ranks, 'slot')}, {first.strategy}, {first.precision}")
    speed.set_ylabel("samples per second")
    speed.legend(frameon=False, fontsize=8)
    speed.set_yscale("log")
    speed.yaxis.set_major_formatter("{x:g}")
    speed.yaxis.set_minor_formatter("")
    share.set_title("Share of the measured peak (MFU)")
    share.set_ylabel("%")
    share.set_xlabel("samples of a rank at a time")
    share.set_ylim(0, 1.15 * top or 100)
    ticks = sorted({each.micro_batch_size for each in machine.steps})
    for panel in (speed, share):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.grid(axis="y")
    return figure


def _spreads(steps: list[TimedStep]) -> tuple[list[float], list[float]]:
    """Slow and fast times of each, which are the low and the high throughput."""
    return [each.slow_step_seconds for each in steps], [each.fast_step_seconds for each in steps]


def checkpoint_picture(machine: MachineFigures) -> Figure | None:
    """How long each thing takes, of each storage."""
    if not machine.checkpoints:
        return None
    figure, panels = figure_of([1.5] * len(machine.checkpoints))
    for panel, each in zip(panels, machine.checkpoints, strict=True):
        rows = [
            ("copied", each.copy_seconds),
            ("written at once", each.write_seconds),
            ("training stops", each.stall_seconds),
            ("loaded", each.load_seconds),
        ]
        known = [(name, seconds) for name, seconds in rows if seconds is not None]
        longest = max(seconds for _, seconds in known)
        for at, (_, seconds) in enumerate(known):
            panel.barh(at, seconds, 0.6, color=PALETTE[at][0])
            speed = f"{number(seconds, 3)} s, {number(each.size_bytes / seconds / 1e6, 3)} MB/s"
            panel.text(seconds + longest * 0.01, at, speed, va="center", fontsize=8)
        panel.set_yticks(range(len(known)), [name for name, _ in known])
        panel.set_ylim(len(known) - 0.5, -0.5)
        panel.set_xlim(0, 1.5 * longest)
        panel.set_title(
            f"{size(each.size_bytes)}, {count(each.ranks, 'rank')}, {each.strategy}: {each.storage}"
        )
        panel.set_xlabel("seconds")
    return figure


def _binary(num_bytes: int) -> str:
    names = ("B", "KiB", "MiB", "GiB", "TiB")
    at = min(len(names) - 1, (num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes >> (10 * at)} {names[at]}"
