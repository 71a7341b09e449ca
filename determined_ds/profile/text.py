"""A profile for a terminal of 80 columns: the parts of a mean step, then what could be faster."""

from __future__ import annotations

import textwrap

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from determined_ds.profile.findings import Profile
from determined_ds.report.numbers import count, percent, printable, seconds_text
from determined_ds.report.results import PARTS
from determined_ds.report.style import PART_COLOURS

WIDTH, BAR_WIDTH = 80, 22
HIDDEN, UNNAMED = 0.01, 0.05  # shares of a step from which a note is worth its line


def profile_text(profile: Profile) -> Group:
    """The step taken apart, with the ranks that spend least and most in each part, and the findings below."""

    def ms(seconds: float) -> str:
        return f"{1000 * seconds:,.{0 if seconds >= 0.1 else 1}f}"

    ranks, run, whole = profile.ranks, profile.record, profile.step_s or 1.0
    words = [f"{count(len(ranks), 'rank')} on {run.device_name or run.device}"]
    words += [] if run.zero_stage is None else [f"ZeRO {run.zero_stage}"]
    words += [f"{run.pipe_parallel_size} pipeline stages"] if run.pipe_parallel_size > 1 else []
    num_steps = max(len(rank.steps) for rank in ranks)
    times = [sum(step.seconds.values()) for rank in ranks for step in rank.steps]
    head = f"A step taken apart: {', '.join(words)}; mean of {count(num_steps, 'step')}"
    if num_steps > 1:
        head += f", which take {seconds_text(min(times))} to {seconds_text(max(times))}"

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("part of a step", "ms", "share", "", *(["least – most (rank)"] if len(ranks) > 1 else [])):
        table.add_column(name, justify="right" if name in ("ms", "share") else "left", no_wrap=True)
    at = 0.0
    for part, seconds in profile.seconds.items():
        if seconds:
            ends = sorted((rank.seconds[part], rank.record.rank) for rank in ranks)
            least, most = (f"{ms(each)} ({rank})" for each, rank in (ends[0], ends[-1]))
            bar = Bar(whole, at, at + seconds, width=BAR_WIDTH, color=PART_COLOURS[part])
            row: list[RenderableType] = [part, ms(seconds), percent(seconds / whole), bar]
            table.add_row(*[*row, f"{least} – {most}"][: len(table.columns)])
            at += seconds
    clocks = [rank.clock_s for rank in ranks if rank.clock_s is not None]
    by_clock = f"{ms(sum(clocks) / len(clocks))} by the clock" if clocks else ""
    table.add_row("step", ms(whole), "", Text(by_clock), style="bold")

    notes = []
    if profile.mfu is not None:
        done = f"{profile.tflops_per_rank:.3g} TFLOP/s a rank"
        notes.append(Text(f"{done}: {percent(profile.mfu)} of its measured peak (MFU)."))
    if (hidden := profile.overlapped_s) > HIDDEN * whole:
        share = percent(hidden / (hidden + profile.seconds["communication"]))
        text = f"Communication: {ms(hidden)} ms more are hidden behind computation ({share} of all)."
        notes.append(Text(text))
    for part in ("other", "idle"):
        if profile.seconds[part] > UNNAMED * whole:
            notes.append(Text(f"{part}: {PARTS[part]}."))
    notes += [Text(f"warning: {warning}", style="yellow") for warning in profile.warnings]

    found = ["Nothing was found that costs more than 3 % of a step."]
    if profile.findings:
        found = ["What could be faster, by the time of a step that it could save at most:"]
    for number, finding in enumerate(profile.findings, 1):
        saved = f"{seconds_text(finding.saves_s)}, {percent(finding.share)} of a step"
        found.append(f"\n  {number}. {finding.code}: {saved}")
        for text, first in ((finding.seen, " " * 5), (finding.fix, "     try: ")):
            indent = " " * len(first)
            found += textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=indent)
    title = [Text(line, style="bold") for line in textwrap.wrap(head, WIDTH)]
    return Group(*title, "", table, "", *notes, *([Text()] if notes else []), "\n".join(found))
