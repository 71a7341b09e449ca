"""The traces of the ranks of a run -> one :class:`Profile`: where a step's time goes, and what could be faster.

Profile
  RankProfile   one rank: its trace, its steps
    StepParts   one step: its seconds by part
  Finding       what could be faster, by the time that it could save at most
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
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

VERSION = 2  # of profile.json: raised where a key changes its meaning
# What of a rank's record is in it, of the run and of each rank.
OF_RUN = (
    *(
        "zero_stage",
        "pipe_parallel_size",
        "pipe_schedule",
        "pipe_chunks",
        "accumulation",
        "global_batch_size",
    ),
    *("wait", "warmup", "ds_config"),
)
OF_RANK = ("rank", "host", "device", "device_name", "pipe_stage", "flops", "peak_flops", "load")
TOLERANCE = 0.02  # of a step, between its parts and the clock
# Of a step: below it, a step varies by more than a change would gain.
LEAST_SHARE = 0.03
# Of a step's work. What is waited for is not what a rank does by itself.
WORK = ("data", "forward", "backward", "optimizer", "idle", "other")
# A noisy machine delays now this rank, now that one. A slow one works longest in this share of at least so many steps.
LEAST_STEPS, SLOWEST_IN = 3, 0.8
OTHERS, FULL = (
    0.1,
    0.8,
)  # shares of a machine's processors: by other processes, and by all, from which it is busy


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank; its seconds are those of a mean step.

    Args:
        record: What it says of itself.
        trace: The name of its trace's file.
        trace_bytes: Of that file.
        steps: Those that were recorded.
        seconds: Part -> seconds.
        step_s: What they add up to.
        overlapped_s: Communication that computation hides.
        clock_s: By the loop's own clock; None without steps.
        median_s: The median step.
    """

    record: CaptureRecord
    trace: str
    trace_bytes: int
    steps: Sequence[StepParts]
    seconds: Mapping[str, float]
    step_s: float
    overlapped_s: float
    clock_s: float | None
    median_s: float

    @property
    def rank(self) -> int:
        """Its number."""
        return self.record.rank


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs time.

    Args:
        code: Of the cause, e.g. ``slow-loader``.
        seen: What was seen, in a sentence with numbers.
        saves_s: What could be saved of a mean step, at most.
        share: The same, of the step.
        fix: What to try, by the keys to set.
        figures: The numbers that it is based upon.
    """

    code: str
    seen: str
    saves_s: float
    share: float
    fix: str
    figures: Mapping[str, float] = field(default_factory=dict)


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
        """For ``profile.json``: all fields by their names; seconds and bytes, as names say."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "record"}
        ranks = []
        for rank in self.ranks:
            about = rank.record.model_dump(include=set(OF_RANK))
            measured = {
                field.name: getattr(rank, field.name) for field in fields(rank) if field.name != "record"
            }
            ranks.append({**about, **measured, "steps": [asdict(step) for step in rank.steps]})
        found = {"ranks": ranks, "findings": [asdict(finding) for finding in self.findings]}
        of_run = self.record.model_dump(include=set(OF_RUN))
        return {"version": VERSION, "num_ranks": self.record.ranks, **of_run, **own, **found}


def analyse(paths: Sequence[Path]) -> Profile:
    """Read traces, each once.

    Args:
        paths: One of each rank; at least one.

    Raises:
        ConfigError: a file is not a trace of this library, or damaged.
    """
    ranks = []
    for path in paths:  # one at a time: a trace in memory takes twenty times its file
        trace = read_trace(path)
        steps = steps_of(trace)
        seconds = _means([step.seconds for step in steps])
        ranks.append(
            RankProfile(
                record=trace.record,
                trace=path.name,
                trace_bytes=path.stat().st_size,
                steps=steps,
                seconds=seconds,
                step_s=sum(seconds.values()),
                overlapped_s=fmean([step.overlapped_s for step in steps] or [0.0]),
                clock_s=fmean(step.clock_s for step in steps) if steps else None,
                median_s=median([sum(step.seconds.values()) for step in steps] or [0.0]),
            )
        )
    ranks.sort(key=lambda rank: rank.rank)
    seconds = _means([rank.seconds for rank in ranks])
    profile = Profile(
        record=ranks[0].record,
        ranks=ranks,
        seconds=seconds,
        step_s=sum(seconds.values()),
        overlapped_s=fmean(rank.overlapped_s for rank in ranks),
        warnings=[*_oddities(ranks), *_busy_machines([rank.record for rank in ranks])],
    )
    if not profile.step_s:
        return profile
    counted = [rank.record.flops for rank in ranks if rank.record.flops is not None]
    peaks = [rank.record.peak_flops for rank in ranks if rank.record.peak_flops]
    if len(counted) == len(ranks):
        flops_per_s = fmean(counted) / profile.step_s
        mfu = flops_per_s / fmean(peaks) if len(peaks) == len(ranks) else None
        profile = replace(profile, tflops_per_rank=flops_per_s / 1e12, mfu=mfu)
    found = [each for each in _findings(profile) if each.share >= LEAST_SHARE]
    return replace(profile, findings=sorted(found, key=lambda each: -each.saves_s))


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: fmean([seconds[part] for seconds in found] or [0.0]) for part in PARTS}


def _oddities(ranks: Sequence[RankProfile]) -> Iterator[str]:
    num_ranks = ranks[0].record.ranks
    missing = sorted(set(range(num_ranks)) - {rank.rank for rank in ranks})
    if missing:
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        yield f"the traces of {len(missing)} of {num_ranks} ranks are missing ({names}): means are over the others"
    for rank in ranks:
        if not rank.steps:
            yield f"the trace of rank {rank.rank} holds no whole step"
        elif rank.clock_s and abs(rank.step_s / rank.clock_s - 1) > TOLERANCE:
            yield (
                f"the parts of rank {rank.rank} add up to {1000 * rank.step_s:.1f} ms a step, and the loop's clock "
                f"says {1000 * rank.clock_s:.1f} ms"
            )


def _busy_machines(records: Sequence[CaptureRecord]) -> Iterator[str]:
    """Machines whose processors other processes took while steps were recorded."""
    for host in dict.fromkeys(record.host for record in records):
        loads = [record.load for record in records if record.host == host and record.load is not None]
        if not loads:
            continue
        all_of_it = fmean(load.machine for load in loads)
        others = all_of_it - sum(load.own for load in loads)
        if others > OTHERS and all_of_it > FULL:
            yield (
                f"other processes took {percent(others, 0)} of the processors of {host or 'the machine'} meanwhile: "
                "alone, a step would be shorter, and shares would differ; record again on an idle machine"
            )


# ------------------------------------------------------------------------------------------- what could be faster

LONGER = {
    "data": "its data takes {} longer: give each rank the same data, or add num_workers in training_loader(...)",
    "forward": "its forward pass takes {} longer: look for work that only it does, and for other processes there",
    "backward": "its backward pass takes {} longer: look for other processes on its device, and for its clock rate",
    "optimizer": "its optimizer takes {} longer: look for other processes on its machine",
    "idle": "its GPU is idle {} longer: its host launches kernels later; look for other processes on its machine",
    "other": "it spends {} more outside of the passes: callbacks, logging, what only this rank does in train_batch",
}


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
            least_s = min(
                each for each, of in zip(spent, stages, strict=True) if is_one_replica or of == stage
            )
            waited.append(max(min(spent_s, max(0.0, surplus_s)), spent_s - least_s))
    return fmean(waited or [0.0])


def _slow_rank(profile: Profile) -> tuple[RankProfile, dict[str, float], float] | None:
    """The rank that works longer than those of its stage in most steps; how much longer in each part, and in all.

    By the medians of its parts: one step that the system delayed does not make a rank slow.
    """
    slowest: tuple[RankProfile, dict[str, float], float] | None = None
    for stage in {rank.record.pipe_stage for rank in profile.ranks}:
        alike = [rank for rank in profile.ranks if rank.record.pipe_stage == stage]
        steps = list(zip(*(rank.steps for rank in alike), strict=False))
        if len(alike) < 2 or len(steps) < LEAST_STEPS:
            continue
        last = [max(range(len(alike)), key=lambda index: _work_s(same[index])) for same in steps]
        index = max(set(last), key=last.count)
        if last.count(index) < SLOWEST_IN * len(steps):
            continue
        typical = [
            {part: median(step.seconds[part] for step in rank.steps) for part in WORK} for rank in alike
        ]
        others = [each for number, each in enumerate(typical) if number != index]
        more = {part: typical[index][part] - median(each[part] for each in others) for part in WORK}
        whole = [median(map(_work_s, rank.steps)) for rank in alike]
        longer_s = whole[index] - median(each for number, each in enumerate(whole) if number != index)
        if slowest is None or longer_s > slowest[2]:
            slowest = alike[index], more, longer_s
    return slowest


def _findings(profile: Profile) -> Iterator[Finding]:
    """Each cause of lost time with what it could save at most, large or small."""
    step_s, seconds, run = profile.step_s, profile.seconds, profile.record
    on_gpu, is_pipeline = run.device == "cuda", run.pipe_parallel_size > 1
    zero: Mapping[str, Any] = (run.ds_config or {}).get("zero_optimization") or {}

    def finding(code: str, saves_s: float, seen: str, fix: str, **figures: float) -> Finding:
        saves_s = min(saves_s, step_s)
        share = saves_s / step_s
        return Finding(code=code, seen=seen, saves_s=saves_s, share=share, fix=fix, figures=figures)

    data_s = seconds["data"]
    fix = "training_loader(..., num_workers=2) or more, persistent_workers=True; do less for each sample, or do it once"
    fix += "; pin_memory=True" if on_gpu else ""
    yield finding("slow-loader", data_s, f"each step waits {s(data_s)} for its data", fix, data_s=data_s)

    slow = _slow_rank(profile)
    if slow is not None:
        rank, more, longer_s = slow
        part = max(more, key=lambda name: more[name])
        seen = f"rank {rank.rank} works {s(longer_s)} a step longer than the others, which wait for it"
        yield finding("slow-rank", longer_s, seen, LONGER[part].format(s(more[part])), rank=rank.rank)

    waited_s = _waited_s(profile)
    if slow is None and not is_pipeline:
        seen = f"ranks wait {s(waited_s)} a step for each other, none of them always for the same one"
        fix = (
            "samples of like length in a step, no other processes on the machine; more gradient_accumulation_steps: "
            "fewer moments at which ranks meet"
        )
        yield finding("uneven-ranks", waited_s, seen, fix, waited_s=waited_s)

    exposed_s = seconds["communication"] - waited_s  # waiting for a peer is not communication
    fix = "larger train_micro_batch_size_per_gpu or gradient_accumulation_steps: fewer reductions a sample"
    if on_gpu and (run.zero_stage or 0) >= 1 and not zero.get("overlap_comm"):
        fix = f'"zero_optimization": {{"overlap_comm": true}}; {fix}'
    if run.zero_stage == 3:
        fix += "; zero_stage 2 if memory allows: no weights to gather"
    seen = f"communication takes {s(exposed_s)} a step that no computation hides"
    yield finding("communication", exposed_s, seen, fix, exposed_s=exposed_s)

    if is_pipeline:
        yield from _of_pipeline(profile, finding)

    if on_gpu:
        idle_s, optimizer_s = seconds["idle"], seconds["optimizer"]
        seen = f"the GPU is idle {s(idle_s)} a step: the host does not launch its work fast enough"
        fix = "larger train_micro_batch_size_per_gpu; hyperparameters.torch_compile: true"
        yield finding("idle-gpu", idle_s, seen, fix, idle_s=idle_s)
        device = (zero.get("offload_optimizer") or {}).get("device", "none")
        if device not in (None, "none"):
            seen = f"the optimizer takes {s(optimizer_s)} a step on the {device}"
            fix = "leave out zero_optimization.offload_optimizer if det-ds check --memory says that its states fit"
            yield finding("offloaded-optimizer", optimizer_s, seen, fix, optimizer_s=optimizer_s)


def _of_pipeline(profile: Profile, finding: Any) -> Iterator[Finding]:
    """Stages that are uneven, and the bubble: what more micro-batches save is not what waits for a heavier stage."""
    uneven_s, run = 0.0, profile.record
    by_stage: dict[int, list[float]] = {}
    for rank in profile.ranks:
        by_stage.setdefault(rank.record.pipe_stage, []).extend(map(_work_s, rank.steps))
    work = [fmean(by_stage[stage]) for stage in sorted(by_stage) if by_stage[stage]]
    if len(work) == run.pipe_parallel_size:
        slowest, times = work.index(max(work)), ", ".join(map(s, work))
        seen = f"the stages of the pipeline work {times} a step: the others wait for stage {slowest}"
        fix = "hyperparameters.partition_method: measured, which shares layers out by their times"
        uneven_s = max(work) - fmean(work)
        yield finding("uneven-stages", uneven_s, seen, fix, stage=slowest)
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
    saves_s = min(max(0.0, waits_s - uneven_s), profile.step_s * (ideal - with_more))
    yield finding("bubble", saves_s, seen, fix, waits_s=waits_s)
