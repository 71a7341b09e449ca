"""Findings: each cause is recognized by its numbers, and what costs little is not mentioned."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.profile.arrivals import Arrival
from determined_ds.profile.causes import with_findings
from determined_ds.profile.lost_time import LostTime
from determined_ds.profile.operators import OperatorCosts
from determined_ds.profile.step_parts import PARTS, Profile, RankProfile, StepParts
from determined_ds.profile.waiting_calls import WaitingCall

STEPS = 5


def a_rank(rank: int = 0, *, more: dict[str, Any] | None = None, **parts: float) -> RankProfile:
    """A rank whose parts of a step are in milliseconds; 200 ms of computation if none are given."""
    seconds = dict.fromkeys(PARTS, 0.0) | {"forward": 0.08, "backward": 0.12}
    seconds |= {part: value / 1000 for part, value in parts.items()}
    step = StepParts(batch=1, begin_us=0, end_us=2e5, clock_s=None, seconds=seconds)
    return RankProfile(rank=rank, trace="", trace_bytes=0, steps=[step] * STEPS, **(more or {}))


def found(*ranks: RankProfile, **more: Any) -> list[LostTime]:
    """The findings of ranks."""
    return list(with_findings(Profile(ranks=ranks, num_ranks=len(ranks), **more)).findings)


def reductions(calls: int, num_bytes: int, each_ms: float, late_ms: float = 0) -> list[Arrival]:
    """So many collectives in each step; the rank comes to each so late."""
    return [
        Arrival(
            step=step,
            kind="all_reduce",
            num_bytes=num_bytes,
            begin_us=1000 * (200 * step + 4 * index + late_ms),
            end_us=1000 * (200 * step + 4 * index + each_ms),
        )
        for step in range(STEPS)
        for index in range(calls)
    ]


def test_where_nothing_costs_more_than_three_percent_nothing_is_found() -> None:
    assert found(a_rank(data=2, communication=4), a_rank(1, data=2, communication=4)) == []


def test_a_slow_loader() -> None:
    [first] = found(a_rank(data=100))
    assert (first.code, first.saves_s, round(first.share, 3)) == ("slow-loader", 0.1, 0.333)
    assert "num_workers" in first.fix


def test_a_slow_rank_with_what_takes_it_longer() -> None:
    late = reductions(4, 4000, 3.5, late_ms=3)
    ranks = (
        a_rank(0, communication=14, more={"arrivals": reductions(4, 4000, 3.5)}),
        a_rank(1, forward=92, communication=2, more={"arrivals": late}),
    )
    first, *_ = found(*ranks)
    assert (first.code, round(first.saves_s, 6), first.figures["rank"]) == ("slow-rank", 0.012, 1)
    assert "forward pass takes 12 ms longer" in first.fix


def test_a_call_that_waits_is_named_by_its_line() -> None:
    call = WaitingCall(function="barrier", place="trial.py:12", seconds=0.05, calls=4)
    more = {"waiting_calls": [call]}
    [first] = found(a_rank(communication=50, more=more), a_rank(1, communication=50, more=more))
    assert first.code == "needless-sync"
    assert "barrier at trial.py:12 is called 4 times a step and waits 50 ms in all" in first.seen


def with_bucket(size: int | None, calls: int, num_bytes: int) -> list[LostTime]:
    """Two ranks that reduce gradients in so many collectives of 3 ms."""
    more = {"arrivals": reductions(calls, num_bytes, 3)}
    zero = {"stage": 1} if size is None else {"stage": 1, "reduce_bucket_size": size}
    ranks = (a_rank(rank, communication=3 * calls, more=more) for rank in range(2))
    return found(*ranks, zero_stage=1, ds_config={"zero_optimization": zero})


def test_a_tiny_bucket() -> None:
    first, *_ = with_bucket(1000, 40, 4000)
    assert first.code == "small-bucket"
    assert '"reduce_bucket_size": 65536' in first.fix


@pytest.mark.parametrize(("size", "calls", "num_bytes"), [(None, 40, 4000), (1000, 2, 2000)])
def test_many_collectives_with_a_large_bucket_are_another_matter(
    size: int | None, calls: int, num_bytes: int
) -> None:
    assert "small-bucket" not in {each.code for each in with_bucket(size, calls, num_bytes)}


def test_what_is_spent_otherwise_is_not_the_communications() -> None:
    """A tiny bucket's time is not counted again as communication."""
    codes = [each.code for each in with_bucket(1000, 40, 4000)]
    assert "communication" not in codes


def test_a_pipelines_bubble_and_its_uneven_stages() -> None:
    ranks = (
        a_rank(0, forward=40, backward=60, pipeline=100),
        a_rank(1, forward=80, backward=120, pipeline=0, more={"pipe_stage": 1}),
    )
    by_code = {each.code: each for each in found(*ranks, pipe_parallel_size=2, accumulation=2)}
    assert by_code["uneven-stages"].figures["stage"] == 1
    assert round(by_code["uneven-stages"].saves_s, 6) == 0.05
    assert "gradient_accumulation_steps: 8" in by_code["bubble"].fix


def test_what_is_computed_again() -> None:
    more = {"operators": OperatorCosts(seconds_by_phase={"recomputed": 0.04})}
    [first] = found(a_rank(more=more))
    assert (first.code, first.saves_s) == ("recomputed", 0.04)


def test_an_idle_gpu_is_asked_for_more_work_or_for_a_compiler() -> None:
    [first] = found(a_rank(idle=100, more={"device": "cuda"}))
    assert first.code == "idle-gpu"
    assert "torch_compile: true" in first.fix
    assert found(a_rank(idle=100)) == []


def test_the_largest_is_first() -> None:
    call = WaitingCall(function="item", place="trial.py:12", seconds=0.02, calls=4)
    codes = [each.code for each in found(a_rank(data=100, more={"waiting_calls": [call]}))]
    assert codes == ["slow-loader", "needless-sync"]
