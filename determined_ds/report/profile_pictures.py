"""A profile as pictures: memory over a step by what holds it, and the operators that cost most.

They are drawn from ``profile.json`` of a run directory, which ``det-ds profile`` and ``fit.profile`` write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from determined_ds.memory.units import format_bytes
from determined_ds.report.formatting import byte_unit, number, percent
from determined_ds.report.style import (
    INK,
    MUTED,
    PALETTE,
    ROW_IN,
    SMALL_PT,
    drawing,
    figure_of,
)
from determined_ds.report.texts import printable, squeezed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What holds memory -> its words, from below; each has the same colour in every picture.
OWNERS = {
    "parameters": "parameters",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "communication": "communication",
    "activations": "activations",
    "temporary": "temporary",
    "data": "data",
    "other": "other",
}
OWNER_COLOURS = dict(zip(OWNERS, (0, 8, 2, 4, 1, 5, 7, 9), strict=True))
PHASE_COLOURS = {"data": 0, "forward": 1, "recomputed": 5, "backward": 2, "optimizer": 4, "other": 7}
LEAST = 0.01  # of the peak: what holds less is drawn with the rest
LONGEST_NAME = 34


def memory_picture(profile: Mapping[str, Any]) -> Figure | None:
    """Memory over a step of the rank that takes most, stacked by what holds it; None where it is not known.

    Args:
        profile: Of ``profile.json``.
    """
    rank = fullest_rank(profile)
    if rank is None:
        return None
    memory = rank["memory"]
    peak_by_owner = memory["peak_bytes_by_owner"]
    peak = sum(peak_by_owner.values())
    unit, size = byte_unit([peak])
    at_ms = [1000 * at for at in memory["at_s"]]
    with drawing():
        figure, [panel] = figure_of([2.0])
        below = [0.0] * len(at_ms)
        for owner, values in _stacked(memory["bytes_by_owner"], LEAST * peak):
            above = [low + value / size for low, value in zip(below, values, strict=True)]
            style: dict[str, Any] = {
                "color": PALETTE[OWNER_COLOURS[owner]],
                "step": "post",
                "linewidth": 0,
            }
            panel.fill_between(at_ms, below, above, label=OWNERS[owner], **style)
            below = above
        _mark_peak(panel, 1000 * memory["peak_at_s"], peak / size, f"peak {format_bytes(peak)}")
        panel.set_xlim(0, max(at_ms))
        panel.set_ylim(0, 1.25 * peak / size)
        panel.set_title(f"Memory over a step, rank {rank['rank']}")
        panel.set_xlabel("ms since the step began")
        panel.set_ylabel(f"{unit} of tensors")
        _legend(figure, panel)
    return figure


def _legend(figure: Figure, panel: Axes) -> None:
    handles, names = panel.get_legend_handles_labels()
    options: dict[str, Any] = {"loc": "outside lower left", "ncols": 3, "frameon": False}
    figure.legend(handles, names, fontsize=SMALL_PT, handlelength=1, labelcolor=MUTED, **options)
    figure.set_figheight(figure.get_figheight() + 0.2 * ((len(names) + 2) // 3))


def _stacked(bytes_by_owner: Mapping[str, Sequence[int]], least: float) -> list[tuple[str, Sequence[int]]]:
    """What holds memory and how much over the step, from below; those that never hold much are part of the rest."""
    large = {
        owner: bytes_by_owner[owner] for owner in OWNERS if max(bytes_by_owner.get(owner, (0,))) >= least
    }
    small = [values for owner, values in bytes_by_owner.items() if owner not in large]
    if small:
        together = [*small, *([large.pop("other")] if "other" in large else [])]
        large["other"] = [sum(values) for values in zip(*together, strict=True)]
    return list(large.items())


def fullest_rank(profile: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The rank with the highest peak; None where no rank has its memory recorded."""
    ranks = [rank for rank in profile.get("ranks", ()) if rank.get("memory")]
    return max(ranks, key=lambda rank: sum(rank["memory"]["peak_bytes_by_owner"].values()), default=None)


def _mark_peak(panel: Axes, at: float, peak: float, text: str) -> None:
    panel.plot(at, peak, "v", color=INK, markersize=5, clip_on=False, zorder=4)
    left, right = panel.get_xlim()
    side = "left" if at < (left + right) / 2 else "right"
    panel.annotate(
        text,
        (at, peak),
        xytext=(6 if side == "left" else -6, 6),
        textcoords="offset points",
        ha=side,
        color=INK,
        fontsize=SMALL_PT,
    )


def operators_picture(profile: Mapping[str, Any]) -> Figure | None:
    """The operators that cost most on the rank whose step takes longest, as bars; None where there are none.

    Args:
        profile: Of ``profile.json``.
    """
    rank = shown_rank(profile)
    if rank is None:
        return None
    operators: Sequence[Mapping[str, Any]] = rank["operators"]["costliest"]
    with drawing():
        figure, [panel] = figure_of([1.75 * ROW_IN * len(operators)])
        for at, each in enumerate(operators):
            colour = PALETTE[PHASE_COLOURS.get(each["phase"], 7)]
            first = not any(before["phase"] == each["phase"] for before in operators[:at])
            panel.barh(at, 1000 * each["seconds"], 0.6, color=colour, label=each["phase"] if first else None)
            panel.annotate(
                f"{number(1000 * each['seconds'], 3)} ms, {percent(each['share'])}",
                (1000 * each["seconds"], at),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                color=INK,
                fontsize=SMALL_PT,
            )
        names = [operator_name(each) for each in operators]
        panel.set_yticks(range(len(names)), names, color=INK, fontsize=SMALL_PT)
        panel.set_ylim(len(names) - 0.4, -0.6)
        panel.set_xlim(0, 1.8 * max(1000 * each["seconds"] for each in operators) or 1)
        panel.set_title(f"What costs most, rank {rank['rank']}")
        panel.set_xlabel("ms of a step, without what it calls")
        _legend(figure, panel)
    return figure


def shown_rank(profile: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first rank whose operators are known."""
    ranks = [rank for rank in profile.get("ranks", ()) if (rank.get("operators") or {}).get("costliest")]
    return ranks[0] if ranks else None


def operator_name(operator: Mapping[str, Any]) -> str:
    """Operator and module, on two lines where there is a module."""
    name = squeezed(printable(operator["name"].removeprefix("aten::")), LONGEST_NAME)
    module = squeezed(printable(operator["module"]), LONGEST_NAME)
    return f"{name}\n{module}" if module else name
