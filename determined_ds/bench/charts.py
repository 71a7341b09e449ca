"""What was measured, as pictures in the look of the reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from determined_ds.protocol.handed_on import count
from determined_ds.protocol.machine_figures import COMMUNICATION, bus_factor
from determined_ds.protocol.machine_file import MachineFigures
from determined_ds.report.style import GROUND, PALETTE, drawing, figure_of, png_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture_of(machine: MachineFigures, bench: str) -> bytes | None:
    """The picture of a kind as PNG; None where nothing of it was measured."""
    drawn: dict[str, Callable[[MachineFigures], Figure | None]] = {COMMUNICATION: communication_picture}
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


def _binary(num_bytes: int) -> str:
    names = ("B", "KiB", "MiB", "GiB", "TiB")
    at = min(len(names) - 1, (num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes >> (10 * at)} {names[at]}"
