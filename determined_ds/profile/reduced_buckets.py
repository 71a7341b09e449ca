"""Whether a bucket of ZeRO's is so small that gradients or weights travel in many small collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from determined_ds.profile.arrivals import Arrival
from determined_ds.profile.step_parts import Profile, RankProfile

# Bucket -> what travels in it, and by which collectives. In elements.
BUCKETS = {
    "reduce_bucket_size": (
        "gradients",
        ("all_reduce", "allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    ),
    "allgather_bucket_size": (
        "weights",
        ("all_gather", "allgather", "_allgather_base", "all_gather_into_tensor"),
    ),
}
DEFAULT = 500_000_000  # of both, in deepspeed 0.19.8's runtime/zero/config.py
SCALARS_BYTES = 256  # what is smaller is a norm, a loss or a flag
MANY = 4  # times as many collectives as are needed


@dataclass(frozen=True, kw_only=True)
class SurplusReductions:
    """Collectives that a larger bucket would spare.

    Args:
        key: Of ``zero_optimization``.
        configured: Its value, in elements.
        advised: A value that holds everything, in elements.
        what: ``gradients`` or ``weights``.
        calls: In a mean step.
        needed: How many are enough.
        num_bytes: That they carry in a mean step.
        seconds: What the others cost in a mean step, at most; waiting for each other in them included.
    """

    key: str
    configured: int
    advised: int
    what: str
    calls: float
    needed: int
    num_bytes: float
    seconds: float


def surplus_reductions(profile: Profile) -> SurplusReductions | None:
    """The bucket whose size costs most; None where none is too small."""
    zero: Mapping[str, Any] = profile.ds_config.get("zero_optimization") or {}
    found = [
        surplus
        for key in BUCKETS
        if profile.zero_stage and (surplus := _of_bucket(profile, key, int(zero.get(key) or DEFAULT)))
    ]
    return max(found, key=lambda each: each.seconds, default=None)


def _of_bucket(profile: Profile, key: str, configured: int) -> SurplusReductions | None:
    what, kinds = BUCKETS[key]
    by_rank = [_large(rank, kinds) for rank in profile.ranks]
    num_steps = fmean(len(rank.steps) or 1 for rank in profile.ranks)
    calls = fmean(len(each) for each in by_rank) / num_steps
    num_bytes = fmean(sum(one.num_bytes for one in each) for each in by_rank) / num_steps
    # From stage 2 on, each micro-batch is reduced.
    passes = profile.accumulation if (profile.zero_stage or 0) >= 2 and key == "reduce_bucket_size" else 1
    item = 4  # bytes; of two, the buckets that are needed are fewer still
    needed = passes * max(1, math.ceil(num_bytes / passes / item / DEFAULT))
    if calls <= MANY * needed or configured * item > num_bytes / passes / 2:
        return None
    return SurplusReductions(
        key=key,
        configured=configured,
        advised=min(DEFAULT, 2 ** math.ceil(math.log2(max(2.0, num_bytes / passes / item)))),
        what=what,
        calls=calls,
        needed=needed,
        num_bytes=num_bytes,
        seconds=fmean(_surplus_s(each, needed * num_steps) for each in by_rank) / num_steps,
    )


def _large(rank: RankProfile, kinds: tuple[str, ...]) -> list[Arrival]:
    return [one for one in rank.arrivals if one.kind in kinds and one.num_bytes > SCALARS_BYTES]


def _surplus_s(collectives: list[Arrival], needed: float) -> float:
    """What collectives take beyond as few as are needed, which would move the same bytes."""
    if not collectives:
        return 0.0
    by_size = sorted(collectives, key=lambda one: one.num_bytes)
    small, large = by_size[: len(by_size) // 2], by_size[len(by_size) // 2 :]
    (small_bytes, small_s), (large_bytes, large_s) = _typical(small or large), _typical(large)
    more_bytes = large_bytes - small_bytes
    a_byte_s = max(0.0, large_s - small_s) / more_bytes if more_bytes else 0.0
    a_call_s = max(0.0, small_s - a_byte_s * small_bytes)
    num_bytes = sum(one.num_bytes for one in collectives)
    took_s = sum((one.end_us - one.begin_us) / 1e6 for one in collectives)
    return max(0.0, took_s - needed * a_call_s - num_bytes * a_byte_s)


def _typical(collectives: list[Arrival]) -> tuple[float, float]:
    """Bytes and seconds of the one in the middle."""
    times = [(one.end_us - one.begin_us) / 1e6 for one in collectives]
    return median(one.num_bytes for one in collectives), median(times)
