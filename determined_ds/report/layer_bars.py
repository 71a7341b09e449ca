"""How the layers of a pipeline are shared out by their times, as a picture: a bar a rank, beside that by parameters.

It is drawn from ``partition.json`` of a run directory.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from determined_ds.pipe.partition import Bounds, Partition, rank_seconds
from determined_ds.report.formatting import number
from determined_ds.report.rank_bars import INSIDE, LEGEND_IN, MOST_RANKS, ink_on
from determined_ds.report.style import INK, MUTED, PALETTE, ROW_IN, SMALL_PT, drawing, figure_of
from determined_ds.report.texts import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = 7  # of layers with a colour of their own; the rest share one
OTHERS = "others"
ROOM = 1.2  # of the axis beside the longest bar, for its number
ROOMY = 0.08  # share of the longest bar in which a number of layers fits


def partition_picture(found: Partition) -> Figure | None:
    """Draw it; None where there are more ranks than there is room for bars.

    Args:
        found: Of ``partition.json``.
    """
    if found.pipe.ranks > MOST_RANKS:
        return None
    cuts = {"By parameters": found.by_parameters, "By measured times": found.bounds}
    longest = 1000 * max(max(rank_seconds(found.layers, bounds, found.pipe)) for bounds in cuts.values())
    colours = _colours(found)
    with drawing("partition"):
        height = max(0.6, ROW_IN * found.pipe.ranks)
        figure, panels = figure_of([height, height])
        figure.set_figheight(figure.get_figheight() + LEGEND_IN)
        for panel, (title, bounds) in zip(panels, cuts.items(), strict=True):
            _bars(panel, found, bounds, colours, longest)
            panel.set_title(title)
        panels[-1].set_xlabel("ms of a micro-batch, forward and backward; in bars: layers")
        handles, labels = panels[0].get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        how = {"ncols": 3, "frameon": False, "fontsize": SMALL_PT, "labelcolor": MUTED}
        figure.legend(named.values(), named, loc="outside lower left", handlelength=1.0, **how)
    return figure


def _colours(found: Partition) -> dict[str, str]:
    """Kind of layer -> its colour: those that take longest have their own."""
    seconds: dict[str, float] = {}
    for layer in found.layers:
        seconds[layer.name] = seconds.get(layer.name, 0.0) + layer.seconds
    kinds = sorted(seconds, key=lambda name: -seconds[name])[:KINDS]
    return {name: PALETTE[index] for index, name in enumerate(kinds)}


def _bars(panel: Axes, found: Partition, bounds: Bounds, colours: dict[str, str], longest: float) -> None:
    ends = [0.0] * found.pipe.ranks
    for part, (first, next_first) in enumerate(itertools.pairwise(bounds)):
        rank = found.pipe.rank_of(part)
        for name, run in itertools.groupby(found.layers[first:next_first], key=lambda layer: layer.name):
            layers = list(run)
            width = 1000 * sum(layer.seconds for layer in layers)
            colour = colours.get(name, MUTED)
            label = printable(name) if name in colours else OTHERS
            panel.barh(rank, width, 0.72, left=ends[rank], color=colour, label=label)
            if width > ROOMY * longest:
                panel.text(ends[rank] + width / 2, rank, str(len(layers)), color=ink_on(colour), **INSIDE)
            ends[rank] += width
    for rank, end in enumerate(ends):
        panel.text(end + 0.01 * longest, rank, number(end, 3), va="center", color=INK, fontsize=SMALL_PT)
    panel.set_yticks(range(found.pipe.ranks), [f"rank {rank}" for rank in range(found.pipe.ranks)], color=INK)
    panel.set_ylim(found.pipe.ranks - 0.4, -0.6)
    panel.set_xlim(0, ROOM * longest)
