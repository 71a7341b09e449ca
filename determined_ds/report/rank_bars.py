"""A profile as a picture: a bar a rank, made of the parts of its mean step.

It is drawn from ``profile.json`` of a run directory, which ``det-ds profile`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from determined_ds.report.formatting import percent
from determined_ds.report.style import INK, MUTED, PALETTE, ROW_IN, SMALL_PT, drawing, figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Part of a step -> its colour in every picture and table.
PART_COLOURS = {
    part: PALETTE[index]
    for index, part in enumerate(
        ("data", "forward", "backward", "communication", "optimizer", "pipeline", "idle", "other")
    )
}
MOST_RANKS = 32  # bars; of more ranks, those with the longest and the shortest steps
LEGEND_IN = 0.45
ROOMY = 0.09  # share of the longest bar in which a number fits
# Of numbers in bars; not the page's colours, since the bars stay bright on a dark page.
DARK, LIGHT = "#101418", "#fdfdfd"
INSIDE: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_PT}


def rank_bars_picture(profile: Mapping[str, Any]) -> Figure | None:
    """Draw it; parts that are nowhere are left out. None where no step was recorded.

    Args:
        profile: Of ``profile.json``.
    """
    ranks = shown_ranks([rank for rank in profile["ranks"] if rank["step_s"]])
    if not ranks:
        return None
    parts = [part for part in PART_COLOURS if any(rank["seconds"].get(part) for rank in ranks)]
    longest = max(rank["step_s"] for rank in ranks)
    with drawing("profile"):
        figure, (panel,) = figure_of([max(0.6, ROW_IN * len(ranks)) + LEGEND_IN])
        for at, rank in enumerate(ranks):
            begin = 0.0
            for part in parts:
                seconds = rank["seconds"].get(part, 0.0)
                colour, label = PART_COLOURS[part], part if at == 0 else None
                panel.barh(at, 1000 * seconds, 0.72, left=1000 * begin, color=colour, label=label)
                if seconds > ROOMY * longest:
                    middle, share = 1000 * (begin + seconds / 2), percent(seconds / rank["step_s"])
                    panel.text(middle, at, share, color=ink_on(colour), **INSIDE)
                begin += seconds
        panel.set_yticks(range(len(ranks)), [f"rank {rank['rank']}" for rank in ranks], color=INK)
        panel.set_ylim(len(ranks) - 0.4, -0.6)
        panel.set_xlabel("milliseconds of a mean step")
        left_out = len(profile["ranks"]) - len(ranks)
        panel.set_title("A step taken apart" + (f" ({left_out} ranks are left out)" if left_out else ""))
        how: dict[str, Any] = {"ncols": 4, "frameon": False, "fontsize": SMALL_PT, "labelcolor": MUTED}
        figure.legend(loc="outside lower left", handlelength=1.0, **how)
    return figure


def ink_on(colour: str) -> str:
    """What can be read on a colour: dark or light, whichever contrasts more, by WCAG 2's luminance."""
    red, green, blue = ((int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5))
    return DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else LIGHT


def shown_ranks(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All of them, or of very many the ones with the longest and the shortest steps, in their order."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    by_length = sorted(ranks, key=lambda rank: rank["step_s"])
    kept = {rank["rank"] for rank in (*by_length[: MOST_RANKS // 2], *by_length[-MOST_RANKS // 2 :])}
    return [rank for rank in ranks if rank["rank"] in kept]
