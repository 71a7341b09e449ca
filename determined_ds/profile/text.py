"""A profile for a terminal of 80 columns: the parts of a mean step, then what could be faster."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.bar import Bar
from rich.console import Group
from rich.table import Table
from rich.text import Text

from determined_ds.profile.findings import Profile
from determined_ds.report.charts import PART_COLOURS
from determined_ds.report.numbers import count, percent, printable, seconds_text
from determined_ds.report.results import PARTS

WIDTH, BAR_WIDTH = 80, 22
HIDDEN, UNNAMED = 0.01, 0.05  # shares of a step from which a note is worth its line


def profile_text(profile: Profile) -> Group:
    """The step taken apart, with the ranks that spend least and most in each part, and the findings below.

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
        bar = Bar(whole, at, at + seconds, width=BAR_WIDTH, color=PART_COLOURS[part])
        ends = sorted((rank.seconds[part], rank.rank) for rank in profile.ranks)
        spread = f"{_ms(ends[0][0])} ({ends[0][1]}) – {_ms(ends[-1][0])} ({ends[-1][1]})"
        table.add_row(part, _ms(seconds), percent(seconds / whole), bar, *([spread] if several else []))
        at += seconds
    clocks = [rank.clock_s for rank in profile.ranks if rank.clock_s is not None]
    by_clock = f"{_ms(sum(clocks) / len(clocks))} by the clock" if clocks else ""
    table.add_row("step", _ms(whole), "", Text(by_clock), style="bold")
    notes = list(_notes(profile))
    head = [Text(line, style="bold") for line in textwrap.wrap(_headline(profile), WIDTH)]
    below = [*notes, Text()] if notes else []
    return Group(*head, "", table, "", *below, "\n".join(_findings(profile)))


def _headline(profile: Profile) -> str:
    """What was recorded, and how much steps differ."""
    ranks, run = profile.ranks, profile.record
    steps = max(len(rank.steps) for rank in ranks)
    words = [f"{count(len(ranks), 'rank')} on {run.device_name or run.device}"]
    words += [] if run.zero_stage is None else [f"ZeRO {run.zero_stage}"]
    words += [f"{run.pipe_parallel_size} pipeline stages"] if run.pipe_parallel_size > 1 else []
    whole = [sum(step.seconds.values()) for rank in ranks for step in rank.steps]
    spread = f", which take {seconds_text(min(whole))} to {seconds_text(max(whole))}" if steps > 1 else ""
    return f"A step taken apart: {', '.join(words)}; mean of {count(steps, 'step')}{spread}"


def _notes(profile: Profile) -> Iterator[Text]:
    if profile.mfu is not None:
        done = f"{profile.tflops_per_rank:.3g} TFLOP/s a rank"
        yield Text(f"{done}: {percent(profile.mfu)} of its measured peak (MFU).")
    if profile.overlapped_s > HIDDEN * profile.step_s:
        hidden, waited = profile.overlapped_s, profile.seconds["communication"]
        share = percent(hidden / (hidden + waited))
        yield Text(
            f"Communication: {_ms(hidden)} ms more are hidden behind computation ({share} of all of it)."
        )
    for part in ("other", "idle"):
        if profile.seconds[part] > UNNAMED * profile.step_s:
            yield Text(f"{part}: {PARTS[part]}.")
    for warning in profile.warnings:
        yield Text(f"warning: {warning}", style="yellow")


def _findings(profile: Profile) -> Iterator[str]:
    """The findings, the one that could save most first."""
    if not profile.findings:
        yield "Nothing was found that costs more than 3 % of a step."
        return
    yield "What could be faster, by the time of a step that it could save at most:"
    for number, finding in enumerate(profile.findings, 1):
        yield f"\n  {number}. {finding.code}: {seconds_text(finding.saves_s)}, {percent(finding.share)} of a step"
        for text, first, further in (
            (finding.seen, "     ", "     "),
            (finding.fix, "     try: ", "          "),
        ):
            yield from textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=further)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 0.1 else 1}f}"
