"""A profile as a picture: a bar a rank, made of the parts of its mean step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from determined_ds.profile.in_text import COLOURS
from determined_ds.profile.step_parts import PARTS, Profile, RankProfile
from determined_ds.report.formatting import percent
from determined_ds.report.style import GROUND, INK, MUTED, ROW_IN, SMALL_PT, drawing, figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS = 32  # bars; of more ranks, those with the longest and the shortest steps
LEGEND_IN = 0.45
ROOMY = 0.09  # share of the longest bar in which a number fits
INSIDE: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_PT}


def parts_picture(profile: Profile) -> Figure:
    """Draw it; parts that are nowhere are left out.

    Args:
        profile: Of at least one rank.
    """
    ranks = shown_ranks(profile.ranks)
    parts = [part for part in PARTS if any(rank.seconds[part] for rank in ranks)]
    longest = max(rank.step_s for rank in ranks) or 1.0
    with drawing("profile"):
        figure, (panel,) = figure_of([max(0.6, ROW_IN * len(ranks)) + LEGEND_IN])
        for at, rank in enumerate(ranks):
            begin = 0.0
            for part in parts:
                seconds = rank.seconds[part]
                label = part if at == 0 else None
                panel.barh(at, 1000 * seconds, 0.72, left=1000 * begin, color=COLOURS[part], label=label)
                if seconds > ROOMY * longest:
                    middle = 1000 * (begin + seconds / 2)
                    panel.text(
                        middle, at, percent(seconds / rank.step_s), color=ink_on(COLOURS[part]), **INSIDE
                    )
                begin += seconds
        panel.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks], color=INK)
        panel.set_ylim(len(ranks) - 0.4, -0.6)
        panel.set_xlabel("milliseconds of a mean step")
        left_out = len(profile.ranks) - len(ranks)
        panel.set_title(
            "A step taken apart" + (f" ({left_out} ranks between are left out)" if left_out else "")
        )
        figure.legend(
            loc="outside lower left",
            ncols=4,
            frameon=False,
            fontsize=SMALL_PT,
            labelcolor=MUTED,
            handlelength=1.0,
        )
    return figure


def ink_on(colour: str) -> str:
    """What can be read on a colour: by its brightness, dark or white."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else GROUND


def shown_ranks(ranks: Sequence[RankProfile]) -> list[RankProfile]:
    """All of them, or of very many the ones with the longest and the shortest steps, in their order."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    by_length = sorted(ranks, key=lambda rank: rank.step_s)
    kept = {rank.rank for rank in (*by_length[: MOST_RANKS // 2], *by_length[-MOST_RANKS // 2 :])}
    return [rank for rank in ranks if rank.rank in kept]
