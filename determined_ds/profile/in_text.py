"""A profile for a terminal of 80 columns: the parts of a mean step, one below the other as they would follow."""

from __future__ import annotations

from collections.abc import Iterator

from rich.bar import Bar
from rich.console import Group
from rich.table import Table
from rich.text import Text

from determined_ds.profile.profile import Profile
from determined_ds.profile.steps import PARTS
from determined_ds.report.formatting import percent
from determined_ds.report.rank_bars import PART_COLOURS

BAR_WIDTH = 22
WORTH_SAYING = 0.01  # share of a step


def parts_table(profile: Profile) -> Group:
    """The step taken apart, with the ranks that spend least and most in each part.

    Args:
        profile: Of at least one step.
    """
    several = len(profile.ranks) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("part of a step", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", width=BAR_WIDTH, no_wrap=True)
    if several:
        table.add_column("least – most (rank)", no_wrap=True)
    whole, at = profile.step_s or 1.0, 0.0
    for part, seconds in profile.seconds.items():
        if not seconds:
            continue
        cells = [part, _ms(seconds), percent(seconds / whole)]
        bar = Bar(whole, at, at + seconds, width=BAR_WIDTH, color=PART_COLOURS[part])
        table.add_row(*cells, bar, *([_spread(profile, part)] if several else []))
        at += seconds
    table.add_row("step", _ms(whole), "", Text(clock(profile)), style="bold")
    notes = list(_notes(profile))
    return Group(Text(headline(profile), style="bold"), "", table, *([Text(""), *notes] if notes else []))


def headline(profile: Profile) -> str:
    """What was recorded, in a line."""
    ranks, steps = profile.ranks, max((len(rank.steps) for rank in profile.ranks), default=0)
    device = next((rank.device_name for rank in ranks if rank.device_name), ranks[0].device)
    strategy = [] if profile.zero_stage is None else [f"ZeRO {profile.zero_stage}"]
    if profile.pipe_parallel_size > 1:
        strategy.append(f"{profile.pipe_parallel_size} pipeline stages")
    words = [f"{len(ranks)} rank{'s' * (len(ranks) != 1)} on {device}", *strategy]
    return f"A step taken apart: {', '.join(words)}; mean of {steps} step{'s' * (steps != 1)}"


def clock(profile: Profile) -> str:
    """The same step by the loop's own clock."""
    found = [rank.clock_s for rank in profile.ranks if rank.clock_s is not None]
    return f"{_ms(sum(found) / len(found))} by the clock" if found else ""


def _notes(profile: Profile) -> Iterator[Text]:
    if profile.mfu is not None:
        yield Text(
            f"{profile.tflops_per_rank:.3g} TFLOP/s a rank: {percent(profile.mfu)} of its measured peak (MFU)."
        )
    if profile.overlapped_s > WORTH_SAYING * profile.step_s:
        hidden, waited = profile.overlapped_s, profile.seconds["communication"]
        share = hidden / (hidden + waited)
        yield Text(
            f"Communication: {_ms(hidden)} ms more are hidden behind computation ({percent(share)} of all of it)."
        )
    if profile.seconds["other"] > 0.05 * profile.step_s:
        yield Text(f"other: {PARTS['other']}.")
    if profile.seconds["idle"] > 0.05 * profile.step_s:
        yield Text(f"idle: {PARTS['idle']}.")
    for warning in profile.warnings:
        yield Text(f"warning: {warning}", style="yellow")


def _spread(profile: Profile, part: str) -> str:
    seconds = sorted((rank.seconds[part], rank.rank) for rank in profile.ranks)
    (least, first), (most, last) = seconds[0], seconds[-1]
    return f"{_ms(least)} ({first}) – {_ms(most)} ({last})"


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
