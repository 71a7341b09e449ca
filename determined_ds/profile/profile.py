"""The traces of the ranks of a run -> one :class:`Profile`: where a step's time goes, and what could be faster.

Profile
  RankProfile   one rank: its trace, its steps
    StepParts   one step: its seconds by part
  Finding       what could be faster, by the time that it could save at most
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from determined_ds.documents.files import write_whole
from determined_ds.pipe.orders import ONE_F_ONE_B, Pipeline
from determined_ds.pipe.timeline import counted_bubble
from determined_ds.profile.steps import PARTS, StepParts, steps_of
from determined_ds.profile.trace_file import read_trace
from determined_ds.report.profile_text import milliseconds as ms

VERSION = 2  # of profile.json: raised where a key changes its meaning
TOLERANCE = 0.02  # of a step, between its parts and the clock
# Of a step: below it, a step varies by more than a change would gain.
LEAST_SHARE = 0.03
# Of a step's work. What is waited for is not what a rank does by itself.
WORK = ("data", "forward", "backward", "optimizer", "idle", "other")
# A noisy machine delays now this rank, now that one. A slow one works longest in this share of at least so many steps.
LEAST_STEPS, SLOWEST_IN = 3, 0.8


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank.

    Args:
        rank: Its number.
        trace: The name of its trace's file.
        trace_bytes: Of that file.
        host: The machine.
        device: ``cpu`` or ``cuda``.
        device_name: Of the GPU; empty on a CPU.
        pipe_stage: Of the pipeline; 0 without one.
        steps: Those that were recorded.
        flops: Floating-point operations of the model that the rank does in a step; None where they were not counted.
        peak_flops: The most that it does in a second, measured.
    """

    rank: int
    trace: str
    trace_bytes: int
    host: str = ""
    device: str = "cpu"
    device_name: str = ""
    pipe_stage: int = 0
    steps: Sequence[StepParts] = ()
    flops: int | None = None
    peak_flops: float | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Of a mean step: part -> seconds."""
        return mean_parts([step.seconds for step in self.steps])

    @property
    def overlapped_s(self) -> float:
        """Of a mean step."""
        return fmean([step.overlapped_s for step in self.steps] or [0.0])

    @property
    def step_s(self) -> float:
        """A mean step: what its parts add up to."""
        return sum(self.seconds.values())

    @property
    def clock_s(self) -> float | None:
        """A mean step by the loop's own clock; None where the trace does not say."""
        found = [step.clock_s for step in self.steps if step.clock_s is not None]
        return fmean(found) if found else None

    @property
    def median_s(self) -> float:
        """The median step."""
        return median([step.total_s for step in self.steps] or [0.0])


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
    """All ranks.

    Args:
        ranks: In their order. Where traces are missing, those that are there.
        num_ranks: Of the run.
        zero_stage: Of the strategy; None where no ZeRO engine trains.
        pipe_parallel_size: Stages of the pipeline.
        pipe_schedule: What they compute in which order.
        pipe_chunks: Parts of the model that each of them holds.
        accumulation: Micro-batches of a rank in a step.
        global_batch_size: Samples in a step; 0 where the traces do not say.
        wait: Steps that were trained before the warm-up.
        warmup: Steps that the profiler ran for without a record.
        ds_config: What DeepSpeed was given; empty where the traces do not say.
        findings: What could be faster, by the time that it could save at most.
        warnings: What is missing or odd in the traces, as sentences.
    """

    ranks: Sequence[RankProfile]
    num_ranks: int = 1
    zero_stage: int | None = None
    pipe_parallel_size: int = 1
    pipe_schedule: str = ONE_F_ONE_B
    pipe_chunks: int = 1
    accumulation: int = 1
    global_batch_size: int = 0
    wait: int = 0
    warmup: int = 0
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    warnings: Sequence[str] = ()

    @property
    def seconds(self) -> dict[str, float]:
        """Of a mean step, the mean over ranks: part -> seconds."""
        return mean_parts([rank.seconds for rank in self.ranks])

    @property
    def overlapped_s(self) -> float:
        """Of a mean step, the mean over ranks."""
        return fmean([rank.overlapped_s for rank in self.ranks] or [0.0])

    @property
    def step_s(self) -> float:
        """A mean step, the mean over ranks."""
        return sum(self.seconds.values())

    @property
    def tflops_per_rank(self) -> float | None:
        """Floating-point operations of the model that a rank does in a second of a mean step, in 10^12."""
        counted = [rank.flops for rank in self.ranks if rank.flops is not None]
        if len(counted) < len(self.ranks) or not self.step_s:
            return None
        return fmean(counted) / self.step_s / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the same as a share of the peak of the ranks."""
        peaks = [rank.peak_flops for rank in self.ranks if rank.peak_flops]
        if self.tflops_per_rank is None or len(peaks) < len(self.ranks):
            return None
        return self.tflops_per_rank * 1e12 / fmean(peaks)


def mean_parts(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part, 0 where there is nothing."""
    return {part: fmean([seconds[part] for seconds in found] or [0.0]) for part in PARTS}


def analyse(paths: Sequence[Path]) -> Profile:
    """Read traces, each once.

    Args:
        paths: One of each rank; at least one.

    Raises:
        ConfigError: a file is not a trace of this library, or damaged.
    """
    ranks, first = [], None
    for path in paths:  # one at a time: a trace in memory takes twenty times its file
        trace = read_trace(path)
        record = trace.record
        first = first or record
        own = ("rank", "host", "device", "device_name", "pipe_stage", "flops", "peak_flops")
        about = {name: getattr(record, name) for name in own}
        size = path.stat().st_size
        ranks.append(RankProfile(trace=path.name, trace_bytes=size, steps=steps_of(trace), **about))
    assert first is not None
    of_all = (
        "zero_stage",
        "pipe_parallel_size",
        "pipe_schedule",
        "pipe_chunks",
        "accumulation",
        "global_batch_size",
    )
    profile = Profile(
        ranks=sorted(ranks, key=lambda rank: rank.rank),
        num_ranks=first.ranks,
        wait=first.wait,
        warmup=first.warmup,
        ds_config=first.ds_config or {},
        warnings=tuple(_oddities(ranks, first.ranks)),
        **{name: getattr(first, name) for name in of_all},
    )
    found = [each for each in _findings(profile) if each.share >= LEAST_SHARE] if profile.step_s else []
    return replace(profile, findings=sorted(found, key=lambda each: -each.saves_s))


def _oddities(ranks: Sequence[RankProfile], num_ranks: int) -> Iterator[str]:
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


def as_json(profile: Profile) -> dict[str, Any]:
    """All fields of a profile by their names, and the means that it derives; seconds and bytes, as names say."""

    def means(one: Profile | RankProfile) -> dict[str, Any]:
        found = {"step_s": one.step_s, "seconds": one.seconds, "overlapped_s": one.overlapped_s}
        if isinstance(one, Profile):
            return {**found, "tflops_per_rank": one.tflops_per_rank, "mfu": one.mfu}
        return {**found, "clock_s": one.clock_s, "median_s": one.median_s}

    ranks = [{**asdict(rank), **means(rank)} for rank in profile.ranks]
    return {"version": VERSION, **means(profile), **asdict(profile), "ranks": ranks}


def write_profile(profile: Profile, path: Path) -> None:
    """Write ``profile.json``, whole or not at all."""
    write_whole(path, json.dumps(as_json(profile), indent=1) + "\n")


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
    """What a rank waits in collectives of a mean step for one that works longer; the mean over ranks.

    Ranks meet in every step, so each waits as much as it works less than the one that works longest; what it waits for
    a neighbouring stage is a part of its own.
    """
    waited = []
    for same in zip(*(rank.steps for rank in profile.ranks), strict=False):
        longest = max(map(_work_s, same))
        for step in same:
            surplus_s = longest - _work_s(step) - step.seconds["pipeline"]
            waited.append(min(step.seconds["communication"], max(0.0, surplus_s)))
    return fmean(waited or [0.0])


def _slow_rank(profile: Profile) -> tuple[RankProfile, dict[str, float], float] | None:
    """The rank that works longer than those of its stage in most steps; how much longer in each part, and in all.

    By the medians of its parts: one step that the system delayed does not make a rank slow.
    """
    slowest: tuple[RankProfile, dict[str, float], float] | None = None
    for stage in {rank.pipe_stage for rank in profile.ranks}:
        alike = [rank for rank in profile.ranks if rank.pipe_stage == stage]
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
    step_s, seconds = profile.step_s, profile.seconds
    on_gpu = any(rank.device == "cuda" for rank in profile.ranks)
    zero: Mapping[str, Any] = profile.ds_config.get("zero_optimization") or {}
    is_pipeline = profile.pipe_parallel_size > 1

    def finding(code: str, saves_s: float, seen: str, fix: str, **figures: float) -> Finding:
        saves_s = min(saves_s, step_s)
        return Finding(
            code=code, seen=seen, saves_s=saves_s, share=saves_s / step_s, fix=fix, figures=figures
        )

    data_s = seconds["data"]
    fix = "training_loader(..., num_workers=2) or more, persistent_workers=True; do less for each sample, or do it once"
    fix += "; pin_memory=True" if on_gpu else ""
    yield finding("slow-loader", data_s, f"each step waits {ms(data_s)} for its data", fix, data_s=data_s)

    slow = _slow_rank(profile)
    if slow is not None:
        rank, more, longer_s = slow
        part = max(more, key=lambda name: more[name])
        seen = f"rank {rank.rank} works {ms(longer_s)} a step longer than the others, which wait for it"
        yield finding("slow-rank", longer_s, seen, LONGER[part].format(ms(more[part])), rank=rank.rank)

    waited_s = _waited_s(profile)
    if slow is None and not is_pipeline:
        seen = f"ranks wait {ms(waited_s)} a step for each other, none of them always for the same one"
        fix = (
            "samples of like length in a step, no other processes on the machine; more gradient_accumulation_steps: "
            "fewer moments at which ranks meet"
        )
        yield finding("uneven-ranks", waited_s, seen, fix, waited_s=waited_s)

    exposed_s = seconds["communication"] - waited_s  # waiting for a peer is not communication
    fix = "larger train_micro_batch_size_per_gpu or gradient_accumulation_steps: fewer reductions a sample"
    if on_gpu and (profile.zero_stage or 0) >= 1 and not zero.get("overlap_comm"):
        fix = f'"zero_optimization": {{"overlap_comm": true}}; {fix}'
    if profile.zero_stage == 3:
        fix += "; zero_stage 2 if memory allows: no weights to gather"
    seen = f"communication takes {ms(exposed_s)} a step that no computation hides"
    yield finding("communication", exposed_s, seen, fix, exposed_s=exposed_s)

    work = [
        fmean(_work_s(step) for rank in profile.ranks if rank.pipe_stage == stage for step in rank.steps)
        for stage in sorted({rank.pipe_stage for rank in profile.ranks if rank.steps})
    ]
    if is_pipeline and len(work) == profile.pipe_parallel_size:
        slowest = work.index(max(work))
        times = ", ".join(ms(each) for each in work)
        seen = f"the stages of the pipeline work {times} a step: the others wait for stage {slowest}"
        fix = "hyperparameters.partition_method: measured, which shares layers out by their times"
        yield finding("uneven-stages", max(work) - fmean(work), seen, fix, stage=slowest)
    if is_pipeline:
        micro_batches = profile.accumulation
        ideal, more_of_them = (
            counted_bubble(
                Pipeline(
                    schedule=profile.pipe_schedule,
                    ranks=profile.pipe_parallel_size,
                    micro_batches=times * micro_batches,
                    chunks=profile.pipe_chunks,
                )
            )
            for times in (1, 4)
        )
        waits_s = seconds["pipeline"]
        seen = (
            f"stages of the pipeline wait {ms(waits_s)} a step; {micro_batches} micro-batches leave a bubble of "
            f"{100 * ideal:.0f} %"
        )
        fix = (
            f"gradient_accumulation_steps: {4 * micro_batches}, with a smaller train_micro_batch_size_per_gpu or a "
            f"larger global_batch_size: a bubble of {100 * more_of_them:.0f} %"
        )
        yield finding("bubble", min(waits_s, step_s * (ideal - more_of_them)), seen, fix, waits_s=waits_s)

    if on_gpu:
        idle_s, optimizer_s = seconds["idle"], seconds["optimizer"]
        seen = f"the GPU is idle {ms(idle_s)} a step: the host does not launch its work fast enough"
        fix = "larger train_micro_batch_size_per_gpu; hyperparameters.torch_compile: true"
        yield finding("idle-gpu", idle_s, seen, fix, idle_s=idle_s)
        device = (zero.get("offload_optimizer") or {}).get("device", "none")
        if device not in (None, "none"):
            seen = f"the optimizer takes {ms(optimizer_s)} a step on the {device}"
            fix = "leave out zero_optimization.offload_optimizer if det-ds check --memory says that its states fit"
            yield finding("offloaded-optimizer", optimizer_s, seen, fix, optimizer_s=optimizer_s)
