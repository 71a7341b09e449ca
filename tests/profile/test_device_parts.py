"""Steps on a GPU, taken apart: traces written by hand, with kernels on streams and the calls that launched them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.package import profile_of
from tests.profile.written_trace import OTHER, PARTS, Raw, kernel, mark, nccl, written


def rank_of(
    folder: Path, events: list[list[Raw]], steps: list[tuple[float, float]], **record: object
) -> dict[str, Any]:
    flat = [raw for each in events for raw in each]
    written(folder, flat, steps, record={"device": "cuda", **record})
    [rank] = profile_of(folder)["ranks"]
    return rank


def in_us(step: dict[str, Any]) -> tuple[dict[str, int], int]:
    found = {part: round(1e6 * seconds) for part, seconds in step["seconds"].items()}
    assert sum(found.values()) == round(step["end_us"] - step["begin_us"])
    return {part: number for part, number in found.items() if number}, round(1e6 * step["overlapped_s"])


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("marks", "kernels", "expected", "hidden", "record"),
    [
        (  # 0-2 the host was at the data; 6-8 and 95-100 it was at something else
            [mark("data", 0, 5), mark("forward", 5, 20), mark("backward", 20, 30), mark("optimizer", 30, 35)],
            [
                kernel("Memcpy HtoD (Pinned -> Device)", 2, 6, launched=1),
                kernel("ampere_sgemm", 8, 40, launched=10),
                kernel("ampere_sgemm", 40, 80, launched=22, tid=OTHER),  # by autograd's thread
                kernel("multi_tensor_apply", 80, 95, launched=31),
            ],
            {"data": 6, "forward": 32, "backward": 40, "optimizer": 15, "idle": 7},
            0,
            {},
        ),
        (
            [mark("backward", 0, 10), mark("optimizer", 10, 12)],
            [
                kernel("gemm", 0, 60, launched=1),
                nccl("AllReduce_Sum_f32_RING_LL", 40, 90, launched=5),
                kernel("adam", 90, 100, launched=11),
            ],
            {"backward": 60, "communication": 30, "optimizer": 10},
            20,
            {},
        ),
        (
            [mark("forward", 0, 2), mark("pipeline", 2, 4), mark("backward", 4, 6)],
            [
                kernel("gemm", 0, 20, launched=1),
                nccl("SendRecv", 20, 70, launched=3),
                kernel("gemm", 70, 100, launched=5),
            ],
            {"forward": 20, "pipeline": 50, "backward": 30},
            0,
            {},
        ),
        (
            [mark("data", 0, 50), mark("forward", 50, 60)],
            [kernel("gemm", 55, 75, launched=52)],
            {"data": 50, "forward": 20, "idle": 30},
            0,
            {},
        ),
        (
            [mark("backward", 0, 20), mark("optimizer", 20, 100)],
            [kernel("gemm", 0, 20, launched=1)],
            {"backward": 20, "optimizer": 80},
            0,
            {"ds_config": OFFLOADED},
        ),
    ],
    ids=["by who launched them", "a hidden collective", "of a pipeline", "waits for data", "offloaded"],
)
def test_kernels_are_the_parts_of_a_step(
    marks: list[Raw],
    kernels: list[list[Raw]],
    expected: dict[str, int],
    hidden: int,
    record: dict[str, Any],
    tmp_path: Path,
) -> None:
    rank = rank_of(tmp_path, [marks, *kernels], [(0, 100)], **record)
    assert in_us(rank["steps"][0]) == (expected, hidden)


def test_the_device_lags_behind_the_host_and_all_steps_take_what_the_clock_says(tmp_path: Path) -> None:
    steps = [
        (0.0, 20.0),
        (21.0, 40.0),
        (41.0, 130.0),
    ]  # the host waits for the device at the end of the last one
    events = [
        [mark("forward", begin, begin + 10) for begin, _ in steps],
        kernel("gemm", 1, 41, launched=1),
        kernel("gemm", 41, 81, launched=22),
        kernel("gemm", 81, 121, launched=42),
    ]
    rank = rank_of(tmp_path, events, steps)
    assert [(step["begin_us"], step["end_us"]) for step in rank["steps"]] == [(0, 41), (41, 81), (81, 130)]
    assert [in_us(step)[0] for step in rank["steps"]] == [
        {"forward": 40, "idle": 1},
        {"forward": 40},
        {"forward": 40, "idle": 9},
    ]
    assert rank["step_s"] == pytest.approx(rank["clock_s"], rel=0.02)  # but for the 2 between them


MARKS = ["data", "forward", "backward", "optimizer", "pipeline"]
SPAN = st.tuples(st.floats(0, 300), st.floats(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    marks=st.lists(st.tuples(st.sampled_from(MARKS), SPAN), max_size=6),
    kernels=st.lists(st.tuples(st.booleans(), SPAN, st.floats(0, 60)), min_size=1, max_size=10),
)
def test_parts_are_disjoint_and_add_up_to_the_steps(marks: list, kernels: list, tmp_path: Path) -> None:
    ends = itertools.accumulate([100.0, 100.0, 100.0])
    steps = [(end - 100, end) for end in ends]
    events = [[mark(name, *span) for name, span in marks]]
    for communicates, (begin, end), earlier in kernels:
        make = nccl if communicates else kernel
        events.append(
            make("AllReduce" if communicates else "gemm", begin, end, launched=max(0.0, begin - earlier))
        )
    rank = rank_of(tmp_path, events, steps)
    for step in rank["steps"]:
        total_s = sum(step["seconds"].values())
        assert set(step["seconds"]) == PARTS
        assert all(seconds >= 0 for seconds in step["seconds"].values())
        assert 1e6 * total_s == pytest.approx(step["end_us"] - step["begin_us"], abs=1e-3)
        assert step["overlapped_s"] <= total_s + 1e-9
    for before, after in itertools.pairwise(rank["steps"]):
        assert before["end_us"] <= after["begin_us"]
