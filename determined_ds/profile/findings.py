"""The traces of the ranks of a run -> one :class:`Profile`: where a step's time goes, what could be faster."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from determined_ds.documents.document import words
from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.timeline import counted_bubble
from determined_ds.profile.record import CaptureRecord, read_trace
from determined_ds.profile.steps import StepParts, steps_of
from determined_ds.report.numbers import count, percent, printable
from determined_ds.report.numbers import seconds_text as s
from determined_ds.report.results import PARTS

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

VERSION = 3  # of profile.json: raised where a key changes its meaning
# What of a rank's record profile.json says of each rank; the rest is said of the run.
OF_RANK = set(words("rank host device device_name pipe_stage flops peak_flops machine_load own_load"))
LEAST_SHARE = 0.03  # of a step: below it, a step varies by more than a change would gain
# Of a step's work. What is waited for is not what a rank does by itself.
WORK = ("data", "forward", "backward", "optimizer", "idle", "other")
# A noisy machine delays now this rank, now that one. A slow one works longest in this share of at least so many steps.
LEAST_STEPS, SLOWEST_IN = 3, 0.8
# Shares of a machine's processors, by other processes and by all, from which it is busy.
OTHERS, FULL = 0.1, 0.8
# Columns of the text; shares of a step from which a note is worth its line.
WIDTH, BAR_WIDTH = 80, 22
HIDDEN, UNNAMED = 0.01, 0.05


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank; its seconds are those of a mean step, by part and in all, by the trace and by the loop's clock."""

    record: CaptureRecord
    trace: str
    steps: Sequence[StepParts]
    seconds: Mapping[str, float]
    step_s: float
    overlapped_s: float
    clock_s: float | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs time: its cause, e.g. ``slow-loader``; a sentence with numbers; what to try.

    ``saves_s`` could be saved of a mean step at most, which is this share of it.
    """

    code: str
    seen: str
    saves_s: float
    share: float
    fix: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All ranks; seconds are those of a mean step, the mean over ranks."""

    record: CaptureRecord  # what a rank says of the run
    ranks: Sequence[RankProfile]  # in their order; where traces are missing, those that are there
    seconds: dict[str, float]  # by part
    step_s: float  # what they add up to
    overlapped_s: float  # communication that computation hides
    tflops_per_rank: float | None = None  # operations of the model that a rank does in a second, in 10^12
    mfu: float | None = None  # model FLOPs utilization: the same as a share of the peak of the ranks
    findings: Sequence[Finding] = ()  # what could be faster, by the time that it could save at most
    warnings: Sequence[str] = ()  # what is missing in the traces

    def as_json(self) -> dict[str, Any]:
        """For ``profile.json``: all fields by their names; seconds, as names say."""
        found = asdict(self)
        run = found.pop("record").model_dump(exclude={*OF_RANK, "ranks", "steps"})
        for rank in found["ranks"]:
            rank.update(rank.pop("record").model_dump(include=OF_RANK))
        return {"version": VERSION, "num_ranks": self.record.ranks, **run, **found}


def analyse(paths: Sequence[Path]) -> Profile:
    """Read traces, each once.

    Args:
        paths: One of each rank; at least one.

    Raises:
        ConfigError: a file is not a trace of this library, or damaged.
    """

    def means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {part: fmean([seconds[part] for seconds in found] or [0.0]) for part in PARTS}

    def rank_of(path: Path) -> RankProfile:
        trace = read_trace(path)
        steps = steps_of(trace)
        seconds = means([step.seconds for step in steps])
        return RankProfile(
            record=trace.record,
            trace=path.name,
            steps=steps,
            seconds=seconds,
            step_s=sum(seconds.values()),
            overlapped_s=fmean([step.overlapped_s for step in steps] or [0.0]),
            clock_s=fmean(step.clock_s for step in steps) if steps else None,
        )

    # One at a time: a trace in memory takes twenty times its file.
    ranks = sorted(map(rank_of, paths), key=lambda rank: rank.record.rank)
    records, seconds = [rank.record for rank in ranks], means([rank.seconds for rank in ranks])
    profile = Profile(
        record=records[0],
        ranks=ranks,
        seconds=seconds,
        step_s=sum(seconds.values()),
        overlapped_s=fmean(rank.overlapped_s for rank in ranks),
        warnings=_warnings(ranks),
    )
    if not profile.step_s:
        return profile
    counted, peaks = [each.flops for each in records], [each.peak_flops for each in records]
    if None not in counted:
        flops_per_s = fmean(each or 0.0 for each in counted) / profile.step_s
        mfu = flops_per_s / fmean(each or 0.0 for each in peaks) if all(peaks) else None
        profile = replace(profile, tflops_per_rank=flops_per_s / 1e12, mfu=mfu)
    found = []
    for code, saves_s, seen, fix in _findings(profile):
        saves_s = min(saves_s, profile.step_s)
        if (share := saves_s / profile.step_s) >= LEAST_SHARE:
            found.append(Finding(code=code, seen=seen, saves_s=saves_s, share=share, fix=fix))
    return replace(profile, findings=sorted(found, key=lambda each: -each.saves_s))


def _warnings(ranks: Sequence[RankProfile]) -> list[str]:
    """What is missing, and machines that had other work."""
    num_ranks, found = ranks[0].record.ranks, []
    if missing := sorted(set(range(num_ranks)) - {rank.record.rank for rank in ranks}):
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        what = f"the traces of {len(missing)} of {num_ranks} ranks are missing ({names})"
        found.append(f"{what}: means are over the others")
    found += [f"the trace of rank {each.record.rank} holds no whole step" for each in ranks if not each.steps]
    for host in dict.fromkeys(rank.record.host for rank in ranks):
        here = [rank.record for rank in ranks if rank.record.host == host]
        load = fmean(each.machine_load or 0.0 for each in here)
        others = load - sum(each.own_load or 0.0 for each in here)
        if others > OTHERS and load > FULL:
            took = f"other processes took {percent(others, 0)} of the processors of {host or 'the machine'}"
            found.append(f"{took} meanwhile: alone, a step would be shorter, and shares would differ")
    return found


# ------------------------------------------------------------------------------------------- what could be faster


def _findings(profile: Profile) -> Iterator[tuple[str, float, str, str]]:
    """Each cause of lost time, large or small: its code, what it could save at most, what was seen, what to try."""
    seconds, run = profile.seconds, profile.record
    on_gpu = run.device == "cuda"

    fix = "training_loader(..., num_workers=2) or more, persistent_workers=True; do less for each sample"
    fix += "; pin_memory=True" if on_gpu else ""
    yield "slow-loader", seconds["data"], f"each step waits {s(seconds['data'])} for its data", fix

    if slow := _slow_rank(profile):
        rank, part, more_s, longer_s = slow
        seen = f"rank {rank} works {s(longer_s)} a step longer than the others, which wait for it"
        fix = (
            f"{part} takes it {s(more_s)} longer: look for data, callbacks or work that only rank {rank} has, and for "
            "other processes on its machine and its device"
        )
        yield "slow-rank", longer_s, seen, fix

    exposed_s = seconds["communication"] - _waited_s(profile)  # waiting for a peer is not communication
    seen = f"communication takes {s(exposed_s)} a step that no computation hides"
    fix = "larger train_micro_batch_size_per_gpu or gradient_accumulation_steps: fewer reductions a sample"
    zero: Mapping[str, Any] = (run.ds_config or {}).get("zero_optimization") or {}
    stage = run.zero_stage or 0
    # Source: deepspeed 0.19.8 runtime/zero/config.py: where it is not given, ZeRO 3 overlaps.
    if on_gpu and stage >= 1 and not zero.get("overlap_comm", stage == 3):
        fix = f'"zero_optimization": {{"overlap_comm": true}}; {fix}'
    if run.zero_stage == 3:
        fix += "; zero_stage 2 if memory allows: no weights to gather"
    yield "communication", exposed_s, seen, fix

    if on_gpu:
        seen = f"the GPU is idle {s(seconds['idle'])} a step: the host does not launch its work fast enough"
        fix = "larger train_micro_batch_size_per_gpu; hyperparameters.torch_compile: true"
        yield "idle-gpu", seconds["idle"], seen, fix
    if run.pipe_parallel_size == 1:
        return

    by_stage: dict[int, list[float]] = {}
    for each in profile.ranks:
        by_stage.setdefault(each.record.pipe_stage, []).extend(map(_work_s, each.steps))
    work, uneven_s = [fmean(by_stage[stage]) for stage in sorted(by_stage) if by_stage[stage]], 0.0
    if len(work) == run.pipe_parallel_size:
        times, uneven_s = ", ".join(map(s, work)), max(work) - fmean(work)
        slowest = work.index(max(work))
        seen = f"the stages of the pipeline work {times} a step: the others wait for stage {slowest}"
        fix = "hyperparameters.partition_method: measured, which shares layers out by their times"
        yield "uneven-stages", uneven_s, seen, fix

    # What more micro-batches save is not what waits for a heavier stage.
    accumulation, waits_s, stages = run.accumulation, profile.seconds["pipeline"], run.pipe_parallel_size
    own = Pipeline(
        schedule=run.pipe_schedule, ranks=stages, micro_batches=accumulation, chunks=run.pipe_chunks
    )
    ideal, with_more = map(counted_bubble, (own, replace(own, micro_batches=4 * accumulation)))
    left = f"{accumulation} micro-batches leave a bubble of {percent(ideal, 0)}"
    seen = f"stages of the pipeline wait {s(waits_s)} a step; {left}"
    fix = (
        f"gradient_accumulation_steps: {4 * accumulation}, with a smaller train_micro_batch_size_per_gpu or a "
        f"larger global_batch_size: a bubble of {percent(with_more, 0)}"
    )
    saves_s = min(max(0.0, waits_s - uneven_s), profile.step_s * (ideal - with_more))
    yield "bubble", saves_s, seen, fix


def _work_s(step: StepParts) -> float:
    return sum(step.seconds[part] for part in WORK)


def _waited_s(profile: Profile) -> float:
    """What a rank waits in collectives of a mean step for a rank that comes later; the mean over ranks.

    Ranks meet in every step. Each waits as much as it works less than the one that works longest, what it waits for a
    neighbouring stage apart; and the last one to come waits for nobody, so what others spend more in the same
    collectives is waiting: those of the ranks of a stage, or of a pipeline where each stage has one rank.
    """
    stages = [rank.record.pipe_stage for rank in profile.ranks]
    is_one_replica = len(set(stages)) == len(stages)
    waited = []
    for same in zip(*(rank.steps for rank in profile.ranks), strict=False):
        longest = max(map(_work_s, same))
        spent = [step.seconds["communication"] for step in same]
        for step, stage, spent_s in zip(same, stages, spent, strict=True):
            surplus_s = longest - _work_s(step) - step.seconds["pipeline"]
            alike = (each for each, of in zip(spent, stages, strict=True) if is_one_replica or of == stage)
            waited.append(max(min(spent_s, max(0.0, surplus_s)), spent_s - min(alike)))
    return fmean(waited or [0.0])


def _slow_rank(profile: Profile) -> tuple[int, str, float, float] | None:
    """The rank that works longer than those of its stage in most steps; the part that differs most, and how much.

    By the medians of its parts: one step that the system delayed does not make a rank slow.
    """
    found = []
    for stage in {rank.record.pipe_stage for rank in profile.ranks}:
        alike = [rank for rank in profile.ranks if rank.record.pipe_stage == stage]
        steps = list(zip(*(rank.steps for rank in alike), strict=False))
        last = [max(range(len(alike)), key=lambda index: _work_s(same[index])) for same in steps]
        index = max(set(last), key=last.count, default=0)
        if len(alike) < 2 or len(steps) < LEAST_STEPS or last.count(index) < SLOWEST_IN * len(steps):
            continue

        def more(of: Any) -> float:
            each = [median(map(of, rank.steps)) for rank in alike]  # noqa: B023
            return float(each.pop(index) - median(each))  # noqa: B023

        parts = {part: more(lambda step, part=part: step.seconds[part]) for part in WORK}
        worst = max(parts, key=lambda part: parts[part])
        found.append((alike[index].record.rank, worst, parts[worst], more(_work_s)))
    return max(found, key=lambda each: each[3], default=None)


# ------------------------------------------------------------------------------------------- for a terminal


def profile_text(profile: Profile) -> Group:
    """The step taken apart, with the ranks that spend least and most in each part, and the findings below."""
    from rich.bar import Bar
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from determined_ds.report.style import PART_COLOURS

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
        head += f", which take {s(min(times))} to {s(max(times))}"

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
        saved = f"{s(finding.saves_s)}, {percent(finding.share)} of a step"
        found.append(f"\n  {number}. {finding.code}: {saved}")
        for text, first in ((finding.seen, " " * 5), (finding.fix, "     try: ")):
            indent = " " * len(first)
            found += textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=indent)
    title = [Text(line, style="bold") for line in textwrap.wrap(head, WIDTH)]
    return Group(*title, "", table, "", *notes, *([Text()] if notes else []), "\n".join(found))
