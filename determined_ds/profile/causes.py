"""Causes of lost time, each recognized by a rule: a profile -> findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.timeline import counted_bubble
from determined_ds.profile.lost_time import LEAST_SHARE, LostTime
from determined_ds.profile.reduced_buckets import surplus_reductions
from determined_ds.profile.step_parts import Profile, RankProfile
from determined_ds.profile.straggler import WORK, find_straggler, waits_of
from determined_ds.report.profile_text import milliseconds as ms

SLOW_LOADER = "slow-loader"
SLOW_RANK = "slow-rank"
NEEDLESS_SYNC = "needless-sync"
SMALL_BUCKET = "small-bucket"
COMMUNICATION = "communication"
UNEVEN_RANKS = "uneven-ranks"
UNEVEN_STAGES = "uneven-stages"
BUBBLE = "bubble"
IDLE_GPU = "idle-gpu"
RECOMPUTED = "recomputed"
OFFLOADED = "offloaded-optimizer"

PARTS_OF_A_SLOW_RANK = {
    "data": "its data takes {} longer: the same data for each rank, num_workers in training_loader(...)",
    "forward": "its forward pass takes {} longer: look for work that only it does, and for other processes there",
    "backward": "its backward pass takes {} longer: look for other processes on its device, and for its clock rate",
    "optimizer": "its optimizer takes {} longer: look for other processes on its machine",
    "idle": "its GPU is idle {} longer: its host launches kernels later; look for other processes on its machine",
    "other": "it spends {} more outside of the passes: callbacks, logging, what only this rank does in train_batch",
}


def with_findings(profile: Profile) -> Profile:
    """A profile with its straggler and its findings, those that could save most first."""
    profile = replace(profile, straggler=find_straggler(profile.ranks))
    step_s = profile.step_s
    if not step_s:
        return profile
    found = [finding for rule in RULES for finding in rule(profile)]
    large = [finding for finding in found if finding.share >= LEAST_SHARE]
    return replace(profile, findings=sorted(large, key=lambda finding: -finding.saves_s))


def _finding(profile: Profile, code: str, saves_s: float, seen: str, fix: str, **figures: float) -> LostTime:
    saves_s = min(saves_s, profile.step_s)
    share = saves_s / profile.step_s
    return LostTime(code=code, seen=seen, saves_s=saves_s, share=share, fix=fix, figures=figures)


# ------------------------------------------------------------------------------------ the four most common


def _slow_loader(profile: Profile) -> Iterator[LostTime]:
    data_s = profile.seconds["data"]
    fix = "training_loader(..., num_workers=2) or more, persistent_workers=True; do less for each sample, or do it once"
    if any(rank.device == "cuda" for rank in profile.ranks):
        fix += "; pin_memory=True"
    seen = f"each step waits {ms(data_s)} for its data"
    yield _finding(profile, SLOW_LOADER, data_s, seen, fix, data_s=data_s)


def _slow_rank(profile: Profile) -> Iterator[LostTime]:
    found = profile.straggler
    if found is None:
        return
    seen = (
        f"the other ranks wait {ms(found.seconds)} a step for rank {found.rank}, "
        f"the last in {found.steps} of {found.of_steps} steps"
    )
    fix = PARTS_OF_A_SLOW_RANK[found.part].format(ms(found.part_seconds))
    yield _finding(profile, SLOW_RANK, found.seconds, seen, fix, rank=found.rank, last_in=found.steps)


def _needless_sync(profile: Profile) -> Iterator[LostTime]:
    by_call: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for rank in profile.ranks:
        for call in rank.waiting_calls:
            by_call[call.function, call.place].append((call.seconds, call.calls))
    for (function, place), found in by_call.items():
        seconds = sum(each for each, _ in found) / len(profile.ranks)
        calls = fmean(each for _, each in found)
        seen = f"{function} at {place} is called {calls:.0f} times a step and waits {ms(seconds)} in all"
        yield _finding(profile, NEEDLESS_SYNC, seconds, seen, _without(function, place), calls=calls)


def _without(function: str, place: str) -> str:
    if function in ("item", "tolist", "cpu", "numpy", "float", "int", "bool", "index", "synchronize"):
        return (
            f"remove it at {place}: return tensors as metrics, they are summed on the device and read at each "
            "report; for printing, use a callback at reports"
        )
    return f"remove it at {place}, or do it once a step or a report: metrics are averaged over ranks by the library"


def _small_bucket(profile: Profile) -> Iterator[LostTime]:
    found = surplus_reductions(profile)
    if found is None:
        return
    seen = (
        f"{found.calls:.0f} collectives a step carry {found.num_bytes / 2**20:.3g} MiB of {found.what}, where "
        f"{found.needed} would do: {found.key} is {found.configured:,}"
    )
    fix = f'"zero_optimization": {{"{found.key}": {found.advised}}}'.replace(",", "_", 0)
    yield _finding(profile, SMALL_BUCKET, found.seconds, seen, fix, calls=found.calls, needed=found.needed)


# ------------------------------------------------------------------------------------ between ranks


def _communication(profile: Profile) -> Iterator[LostTime]:
    """What collectives cost beyond waiting for a rank, calls of the user, and buckets that are too small."""
    surplus = surplus_reductions(profile)
    elsewhere = _waited_s(profile) + _called_s(profile) + (surplus.seconds if surplus else 0.0)
    exposed_s = profile.seconds["communication"] - elsewhere
    zero: Mapping[str, Any] = profile.ds_config.get("zero_optimization") or {}
    on_gpu = any(rank.device == "cuda" for rank in profile.ranks)
    fix = "larger train_micro_batch_size_per_gpu or gradient_accumulation_steps: fewer reductions a sample"
    if on_gpu and (profile.zero_stage or 0) >= 1 and not zero.get("overlap_comm"):
        fix = f'"zero_optimization": {{"overlap_comm": true}}; {fix}'
    if profile.zero_stage == 3:
        fix += "; zero_stage 2 if memory allows: no weights to gather"
    seen = f"communication takes {ms(exposed_s)} a step that no computation hides"
    yield _finding(profile, COMMUNICATION, exposed_s, seen, fix, exposed_s=exposed_s)


def _uneven_ranks(profile: Profile) -> Iterator[LostTime]:
    """Ranks wait for each other by turns."""
    if profile.straggler is not None or profile.pipe_parallel_size > 1:
        return
    surplus = surplus_reductions(profile)
    waited_s = _waited_s(profile) - _called_s(profile) - (surplus.seconds if surplus else 0.0)
    seen = f"ranks wait {ms(waited_s)} a step for each other, none of them always for the same one"
    fix = (
        "samples of like length in a step, no other processes on the machine; "
        "more gradient_accumulation_steps: fewer moments at which ranks meet"
    )
    yield _finding(profile, UNEVEN_RANKS, waited_s, seen, fix, waited_s=waited_s)


def _waited_s(profile: Profile) -> float:
    """What a rank waits in a mean step for the last one to come to its collectives; the mean over ranks."""
    waited = []
    for stage in {rank.pipe_stage for rank in profile.ranks}:
        alike = [rank for rank in profile.ranks if rank.pipe_stage == stage]
        if len(alike) > 1:
            found = waits_of(alike)
            waited += [sum(found[rank.rank].values()) / max(1, len(rank.steps)) for rank in alike]
    return fmean(waited) if waited else 0.0


def _called_s(profile: Profile) -> float:
    """What waiting calls of the user take in a mean step; the mean over ranks."""
    return fmean(sum(call.seconds for call in rank.waiting_calls) for rank in profile.ranks)


# ------------------------------------------------------------------------------------ pipelines


def _work_s(rank: RankProfile) -> float:
    return sum(rank.seconds[part] for part in WORK)


def _uneven_stages(profile: Profile) -> Iterator[LostTime]:
    if profile.pipe_parallel_size < 2:
        return
    work = [
        fmean(_work_s(rank) for rank in profile.ranks if rank.pipe_stage == stage)
        for stage in sorted({rank.pipe_stage for rank in profile.ranks})
    ]
    if len(work) < profile.pipe_parallel_size:
        return
    saves_s, slowest = max(work) - fmean(work), work.index(max(work))
    times = ", ".join(ms(each) for each in work)
    seen = f"the stages of the pipeline work {times} a step: the others wait for stage {slowest}"
    fix = "hyperparameters.partition_method: measured, which shares layers out by their times"
    yield _finding(profile, UNEVEN_STAGES, saves_s, seen, fix, stage=slowest)


def _bubble(profile: Profile) -> Iterator[LostTime]:
    if profile.pipe_parallel_size < 2:
        return
    micro_batches = profile.accumulation
    pipe = Pipeline(
        schedule=profile.pipe_schedule,
        ranks=profile.pipe_parallel_size,
        micro_batches=micro_batches,
        chunks=profile.pipe_chunks,
    )
    ideal, more = (counted_bubble(replace(pipe, micro_batches=n * micro_batches)) for n in (1, 4))
    waits_s = profile.seconds["pipeline"]
    saves_s = min(waits_s, profile.step_s * (ideal - more))
    seen = (
        f"stages of the pipeline wait {ms(waits_s)} a step; {micro_batches} micro-batches leave a bubble of "
        f"{100 * ideal:.0f} %"
    )
    fix = (
        f"gradient_accumulation_steps: {4 * micro_batches}, with a smaller train_micro_batch_size_per_gpu or a larger "
        f"global_batch_size: a bubble of {100 * more:.0f} %"
    )
    yield _finding(profile, BUBBLE, saves_s, seen, fix, waits_s=waits_s)


# ------------------------------------------------------------------------------------ within a rank


def _idle_gpu(profile: Profile) -> Iterator[LostTime]:
    if not any(rank.device == "cuda" for rank in profile.ranks):
        return
    idle_s = profile.seconds["idle"]
    seen = f"the GPU is idle {ms(idle_s)} a step: the host does not launch its work fast enough"
    fix = "larger train_micro_batch_size_per_gpu; hyperparameters.torch_compile: true"
    yield _finding(profile, IDLE_GPU, idle_s, seen, fix, idle_s=idle_s)


def _recomputed(profile: Profile) -> Iterator[LostTime]:
    again_s = fmean(rank.operators.seconds_by_phase.get("recomputed", 0.0) for rank in profile.ranks)
    peak = max((rank.memory.peak_bytes for rank in profile.ranks if rank.memory), default=0)
    seen = f"activation checkpointing computes {ms(again_s)} a step again; the peak is {peak / 2**30:.3g} GiB"
    fix = "less of it where memory allows: checkpoint fewer layers, or a smaller train_micro_batch_size_per_gpu without"
    yield _finding(profile, RECOMPUTED, again_s, seen, fix, again_s=again_s)


def _offloaded(profile: Profile) -> Iterator[LostTime]:
    zero: Mapping[str, Any] = profile.ds_config.get("zero_optimization") or {}
    device = (zero.get("offload_optimizer") or {}).get("device", "none")
    if device in (None, "none") or not any(rank.device == "cuda" for rank in profile.ranks):
        return
    optimizer_s = profile.seconds["optimizer"]
    seen = f"the optimizer takes {ms(optimizer_s)} a step on the {device}"
    fix = "leave out zero_optimization.offload_optimizer if det-ds check --memory says that its states fit"
    yield _finding(profile, OFFLOADED, optimizer_s, seen, fix, optimizer_s=optimizer_s)


RULES = (
    *(_slow_loader, _slow_rank, _needless_sync, _small_bucket),
    *(_communication, _uneven_ranks),
    *(_uneven_stages, _bubble),
    *(_idle_gpu, _recomputed, _offloaded),
)
