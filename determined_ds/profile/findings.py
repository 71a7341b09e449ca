"""The traces of the ranks of a run -> one :class:`Profile`: where a step's time goes, and what could be faster.

Profile
  RankProfile   one rank: its trace, its steps
    StepParts   one step: its seconds by part
  Finding       what could be faster, by the time that it could save at most
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.timeline import counted_bubble
from determined_ds.profile.record import CaptureRecord
from determined_ds.profile.steps import StepParts, steps_of
from determined_ds.profile.trace import read_trace
from determined_ds.report.numbers import percent
from determined_ds.report.numbers import seconds_text as s
from determined_ds.report.results import PARTS

VERSION = 3  # of profile.json: raised where a key changes its meaning
# What of a rank's record is said of the run in profile.json, and what of each rank.
OF_RUN = {
    *("zero_stage", "pipe_parallel_size", "pipe_schedule", "pipe_chunks", "accumulation"),
    *("global_batch_size", "wait", "warmup", "ds_config"),
}
OF_RANK = {
    *("rank", "host", "device", "device_name", "pipe_stage", "flops", "peak_flops"),
    *("machine_load", "own_load"),
}
LEAST_SHARE = 0.03  # of a step: below it, a step varies by more than a change would gain
# Of a step's work. What is waited for is not what a rank does by itself.
WORK = ("data", "forward", "backward", "optimizer", "idle", "other")
# A noisy machine delays now this rank, now that one. A slow one works longest in this share of at least so many steps.
LEAST_STEPS, SLOWEST_IN = 3, 0.8
# Shares of a machine's processors, by other processes and by all, from which it is busy.
OTHERS, FULL = 0.1, 0.8


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
    """Something that costs time.

    Args:
        code: Of the cause, e.g. ``slow-loader``.
        seen: What was seen, in a sentence with numbers.
        saves_s: What could be saved of a mean step, at most.
        share: The same, of the step.
        fix: What to try, by the keys to set.
    """

    code: str
    seen: str
    saves_s: float
    share: float
    fix: str


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All ranks; seconds are those of a mean step, the mean over ranks.

    Args:
        record: What a rank says of the run.
        ranks: In their order. Where traces are missing, those that are there.
        seconds: Part -> seconds.
        step_s: What they add up to.
        overlapped_s: Communication that computation hides.
        tflops_per_rank: Floating-point operations of the model that a rank does in a second, in 10^12.
        mfu: Model FLOPs utilization: the same as a share of the peak of the ranks.
        findings: What could be faster, by the time that it could save at most.
        warnings: What is missing or odd in the traces, as sentences.
    """

    record: CaptureRecord
    ranks: Sequence[RankProfile]
    seconds: dict[str, float]
    step_s: float
    overlapped_s: float
    tflops_per_rank: float | None = None
    mfu: float | None = None
    findings: Sequence[Finding] = ()
    warnings: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """For ``profile.json``: all fields by their names; seconds, as names say."""
        found = asdict(self)
        run = found.pop("record").model_dump(include=OF_RUN)
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

    ranks = []
    for path in paths:  # one at a time: a trace in memory takes twenty times its file
        trace = read_trace(path)
        steps = steps_of(trace)
        seconds = means([step.seconds for step in steps])
        ranks.append(
            RankProfile(
                record=trace.record,
                trace=path.name,
                steps=steps,
                seconds=seconds,
                step_s=sum(seconds.values()),
                overlapped_s=fmean([step.overlapped_s for step in steps] or [0.0]),
                clock_s=fmean(step.clock_s for step in steps) if steps else None,
            )
        )
    ranks.sort(key=lambda rank: rank.record.rank)
    seconds = means([rank.seconds for rank in ranks])
    profile = Profile(
        record=ranks[0].record,
        ranks=ranks,
        seconds=seconds,
        step_s=sum(seconds.values()),
        overlapped_s=fmean(rank.overlapped_s for rank in ranks),
        warnings=list(_oddities(ranks)),
    )
    if not profile.step_s:
        return profile
    counted = [rank.record.flops for rank in ranks if rank.record.flops is not None]
    peaks = [rank.record.peak_flops for rank in ranks if rank.record.peak_flops]
    if len(counted) == len(ranks):
        flops_per_s = fmean(counted) / profile.step_s
        mfu = flops_per_s / fmean(peaks) if len(peaks) == len(ranks) else None
        profile = replace(profile, tflops_per_rank=flops_per_s / 1e12, mfu=mfu)
    found = []
    for code, saves_s, seen, fix in _findings(profile):
        saves_s = min(saves_s, profile.step_s)
        share = saves_s / profile.step_s
        if share >= LEAST_SHARE:
            found.append(Finding(code=code, seen=seen, saves_s=saves_s, share=share, fix=fix))
    return replace(profile, findings=sorted(found, key=lambda each: -each.saves_s))


def _oddities(ranks: Sequence[RankProfile]) -> Iterator[str]:
    """What is missing, and machines whose processors other processes took meanwhile."""
    records, num_ranks = [rank.record for rank in ranks], ranks[0].record.ranks
    missing = sorted(set(range(num_ranks)) - {record.rank for record in records})
    if missing:
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        yield f"the traces of {len(missing)} of {num_ranks} ranks are missing ({names}): means are over the others"
    for rank in ranks:
        if not rank.steps:
            yield f"the trace of rank {rank.record.rank} holds no whole step"
    for host in dict.fromkeys(record.host for record in records):
        here = [record for record in records if record.host == host and record.machine_load is not None]
        all_of_it = fmean([record.machine_load or 0.0 for record in here] or [0.0])
        others = all_of_it - sum(record.own_load or 0.0 for record in here)
        if others > OTHERS and all_of_it > FULL:
            yield (
                f"other processes took {percent(others, 0)} of the processors of {host or 'the machine'} meanwhile: "
                "alone, a step would be shorter, and shares would differ; record again on an idle machine"
            )


# ------------------------------------------------------------------------------------------- what could be faster


def _work_s(step: StepParts) -> float:
    return sum(step.seconds[part] for part in WORK)


def _findings(profile: Profile) -> Iterator[tuple[str, float, str, str]]:
    """Each cause of lost time, large or small: its code, what it could save at most, what was seen, what to try."""
    seconds, run = profile.seconds, profile.record
    on_gpu, is_pipeline = run.device == "cuda", run.pipe_parallel_size > 1

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
    fix = "larger train_micro_batch_size_per_gpu or gradient_accumulation_steps: fewer reductions a sample"
    zero: Mapping[str, Any] = (run.ds_config or {}).get("zero_optimization") or {}
    if on_gpu and (run.zero_stage or 0) >= 1 and not zero.get("overlap_comm"):
        fix = f'"zero_optimization": {{"overlap_comm": true}}; {fix}'
    if run.zero_stage == 3:
        fix += "; zero_stage 2 if memory allows: no weights to gather"
    yield (
        "communication",
        exposed_s,
        f"communication takes {s(exposed_s)} a step that no computation hides",
        fix,
    )

    if is_pipeline:
        yield from _of_pipeline(profile)
    if on_gpu:
        seen = f"the GPU is idle {s(seconds['idle'])} a step: the host does not launch its work fast enough"
        fix = "larger train_micro_batch_size_per_gpu; hyperparameters.torch_compile: true"
        yield "idle-gpu", seconds["idle"], seen, fix


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


def _of_pipeline(profile: Profile) -> Iterator[tuple[str, float, str, str]]:
    """Stages that are uneven, and the bubble: what more micro-batches save is not what waits for a heavier stage."""
    uneven_s, run = 0.0, profile.record
    by_stage: dict[int, list[float]] = {}
    for rank in profile.ranks:
        by_stage.setdefault(rank.record.pipe_stage, []).extend(map(_work_s, rank.steps))
    work = [fmean(by_stage[stage]) for stage in sorted(by_stage) if by_stage[stage]]
    if len(work) == run.pipe_parallel_size:
        times, uneven_s = ", ".join(map(s, work)), max(work) - fmean(work)
        slowest = work.index(max(work))
        seen = f"the stages of the pipeline work {times} a step: the others wait for stage {slowest}"
        fix = "hyperparameters.partition_method: measured, which shares layers out by their times"
        yield "uneven-stages", uneven_s, seen, fix
    micro_batches, waits_s = run.accumulation, profile.seconds["pipeline"]
    pipe = Pipeline(
        schedule=run.pipe_schedule,
        ranks=run.pipe_parallel_size,
        micro_batches=micro_batches,
        chunks=run.pipe_chunks,
    )
    ideal, with_more = counted_bubble(pipe), counted_bubble(replace(pipe, micro_batches=4 * micro_batches))
    seen = (
        f"stages of the pipeline wait {s(waits_s)} a step; {micro_batches} micro-batches leave a bubble of "
        f"{percent(ideal, 0)}"
    )
    fix = (
        f"gradient_accumulation_steps: {4 * micro_batches}, with a smaller train_micro_batch_size_per_gpu or a "
        f"larger global_batch_size: a bubble of {percent(with_more, 0)}"
    )
    yield "bubble", min(max(0.0, waits_s - uneven_s), profile.step_s * (ideal - with_more)), seen, fix
