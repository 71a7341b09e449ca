"""Traces written by hand are taken apart into steps, and each cause of lost time is found in them."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import ConfigError
from tests.package import profile_of

MAIN, OTHER = 100, 200  # threads
PARTS = {"data", "forward", "backward", "communication", "optimizer", "pipeline", "idle", "other"}
Raw = dict[str, Any]
_correlations = itertools.count(1)


def event(
    name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = MAIN, **args: Any
) -> list[Raw]:
    """An event of the Chrome trace event format, in microseconds."""
    about = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "args": args}
    return [{**about, "ts": begin, "dur": end - begin}]


def mark(name: str, begin: float, end: float) -> list[Raw]:
    """A range of ours."""
    return event(f"determined_ds.{name}", begin, end, cat="user_annotation")


def gloo(begin: float, end: float) -> list[Raw]:
    return event("gloo:all_reduce", begin, end, cat="user_annotation", tid=OTHER)


def kernel(name: str, begin: float, end: float, *, launched: float, tid: int = MAIN) -> list[Raw]:
    """A kernel and the call that launched it, on a thread of the host."""
    number, cat = next(_correlations), "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    call = event("cudaLaunchKernel", launched, launched + 1, cat="cuda_runtime", tid=tid, correlation=number)
    return [*call, *event(name, begin, end, cat=cat, tid=7, correlation=number)]


def nccl(name: str, begin: float, end: float, *, launched: float) -> list[Raw]:
    return kernel(f"ncclDevKernel_{name}", begin, end, launched=launched)


def write(
    folder: Path, events: list[Any], steps: Sequence[tuple[float, float]], rank: int = 0, **record: Any
) -> None:
    """A trace whose steps begin and end at these times, by the clock too."""
    ranges = [mark(f"step#{index}", *span) for index, span in enumerate(steps)]
    taken = [
        {"batch": 11 + index, "seconds": (end - begin) / 1e6} for index, (begin, end) in enumerate(steps)
    ]
    content = {
        "traceEvents": [*itertools.chain(*ranges, *events)],
        "determined_ds": {"rank": rank, "ranks": 1, "steps": taken, **record},
    }
    (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))


def rank_of(folder: Path, events: list[Any], *steps: tuple[float, float], **record: Any) -> dict[str, Any]:
    write(folder, events, steps, **record)
    [rank] = profile_of(folder)["ranks"]
    return dict(rank)


def in_us(step: dict[str, Any]) -> dict[str, int]:
    """The parts of a step that are there, and what is hidden."""
    found = {part: round(1e6 * seconds) for part, seconds in step["seconds"].items()}
    assert sum(found.values()) == round(step["end_us"] - step["begin_us"])
    found["hidden"] = round(1e6 * step["overlapped_s"])
    return {part: number for part, number in found.items() if number}


GPU: dict[str, Any] = {"device": "cuda"}
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
STEPS: dict[str, tuple[list[Any], dict[str, int], dict[str, Any]]] = {
    "the loss is forward's": (
        [
            mark("data", 0, 10),
            mark("forward", 12, 30),
            event("aten::cross_entropy", 30, 38),
            mark("backward", 40, 80),
            mark("optimizer", 85, 95),
        ],
        {"data": 10, "forward": 28, "backward": 40, "optimizer": 10, "other": 12},
        {},
    ),
    "the inner range": (
        [mark("backward", 0, 100), mark("backward", 10, 90), mark("data", 20, 30), mark("pipeline", 40, 60)],
        {"backward": 70, "data": 10, "pipeline": 20},
        {},
    ),
    "a collective": (
        [
            mark("backward", 0, 80),
            event("aten::mm", 0, 40),
            gloo(30, 60),  # hidden for 10, waited for 20
            event("aten::mm", 60, 80),
            mark("optimizer", 80, 100),
            event("c10d::allgather_", 80, 82),  # the call itself
            gloo(82, 90),
        ],
        {"backward": 60, "communication": 30, "optimizer": 10, "hidden": 10},
        {},
    ),
    "a collective in a hook": (
        [
            mark("backward", 0, 100),
            event("autograd::engine::evaluate_function: AccumulateGrad", 10, 90),
            event("aten::add_", 10, 20),
            event("c10d::allreduce_", 20, 25),
            gloo(25, 70),
        ],
        {"backward": 50, "communication": 50},
        {},
    ),
    "a pipeline": (
        [mark("pipeline", 10, 60), gloo(15, 60), mark("communication", 70, 80), gloo(70, 80)],
        {"pipeline": 50, "communication": 10, "other": 40},
        {},
    ),
    "kernels by who launched them": (  # 0-2 the host was at the data; 6-8 and 95-100 it was at something else
        [
            *(
                mark("data", 0, 5),
                mark("forward", 5, 20),
                mark("backward", 20, 30),
                mark("optimizer", 30, 35),
            ),
            kernel("Memcpy HtoD (Pinned -> Device)", 2, 6, launched=1),
            kernel("ampere_sgemm", 8, 40, launched=10),
            kernel("ampere_sgemm", 40, 80, launched=22, tid=OTHER),  # by autograd's thread
            kernel("multi_tensor_apply", 80, 95, launched=31),
        ],
        {"data": 6, "forward": 32, "backward": 40, "optimizer": 15, "idle": 7},
        GPU,
    ),
    "a hidden collective of a GPU": (
        [
            *(mark("backward", 0, 10), mark("optimizer", 10, 12)),
            kernel("gemm", 0, 60, launched=1),
            nccl("AllReduce_Sum_f32_RING_LL", 40, 90, launched=5),
            kernel("adam", 90, 100, launched=11),
        ],
        {"backward": 60, "communication": 30, "optimizer": 10, "hidden": 20},
        GPU,
    ),
    "a pipeline of GPUs": (
        [
            *(mark("forward", 0, 2), mark("pipeline", 2, 4), mark("backward", 4, 6)),
            kernel("gemm", 0, 20, launched=1),
            nccl("SendRecv", 20, 70, launched=3),
            kernel("gemm", 70, 100, launched=5),
        ],
        {"forward": 20, "pipeline": 50, "backward": 30},
        GPU,
    ),
    "a GPU that waits for data": (
        [mark("data", 0, 50), mark("forward", 50, 60), kernel("gemm", 55, 75, launched=52)],
        {"data": 50, "forward": 20, "idle": 30},
        GPU,
    ),
    "an offloaded optimizer": (
        [mark("backward", 0, 20), mark("optimizer", 20, 100), kernel("gemm", 0, 20, launched=1)],
        {"backward": 20, "optimizer": 80},
        {**GPU, "ds_config": OFFLOADED},
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_taken_apart(case: str, tmp_path: Path) -> None:
    events, expected, record = STEPS[case]
    assert in_us(rank_of(tmp_path, events, (0, 100), **record)["steps"][0]) == expected


def test_the_device_lags_behind_the_host_and_all_steps_take_what_the_clock_says(tmp_path: Path) -> None:
    steps = [(0.0, 20.0), (21.0, 40.0), (41.0, 130.0)]  # at the end of the last the host waits for the device
    marks = [mark("forward", begin, begin + 10) for begin, _ in steps]
    kernels = [kernel("gemm", begin, begin + 40, launched=at) for begin, at in ((1, 1), (41, 22), (81, 42))]
    rank = rank_of(tmp_path, [*marks, *kernels], *steps, **GPU)
    assert [(step["begin_us"], step["end_us"]) for step in rank["steps"]] == [(0, 41), (41, 81), (81, 130)]
    parts = [{"forward": 40, "idle": 1}, {"forward": 40}, {"forward": 40, "idle": 9}]
    assert [in_us(step) for step in rank["steps"]] == parts
    assert rank["step_s"] == pytest.approx(rank["clock_s"], rel=0.02)  # but for the 2 between them


SPAN = st.tuples(st.floats(0, 300), st.floats(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))
NAMES = st.sampled_from(["data", "forward", "backward", "optimizer", "pipeline"])


@given(
    marks=st.lists(st.tuples(NAMES, SPAN), max_size=6),
    kernels=st.lists(st.tuples(st.booleans(), SPAN, st.floats(0, 60)), min_size=1, max_size=10),
)
def test_parts_are_disjoint_and_add_up_to_the_steps(marks: list, kernels: list, tmp_path: Path) -> None:
    events = [mark(name, *span) for name, span in marks]
    for communicates, (begin, end), earlier in kernels:
        make = nccl if communicates else kernel
        events.append(make("any", begin, end, launched=max(0.0, begin - earlier)))
    rank = rank_of(tmp_path, events, (0, 100), (100, 200), (200, 300), **GPU)
    for step in rank["steps"]:
        total_s = sum(step["seconds"].values())
        assert set(step["seconds"]) == PARTS
        assert all(seconds >= 0 for seconds in step["seconds"].values())
        assert 1e6 * total_s == pytest.approx(step["end_us"] - step["begin_us"], abs=1e-3)
        assert step["overlapped_s"] <= total_s + 1e-9
    for before, after in itertools.pairwise(rank["steps"]):
        assert before["end_us"] <= after["begin_us"]


def test_means_are_over_steps_and_the_ranks_that_are_there(tmp_path: Path) -> None:
    for rank, data in ((0, 10), (2, 30)):
        write(tmp_path, [mark("data", 0, data)], [(0, 100), (100, 200)], rank=rank, ranks=3)
    profile = profile_of(tmp_path)
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 2]
    assert profile["seconds"]["data"] == pytest.approx(10e-6)
    assert profile["ranks"][1]["seconds"]["data"] == pytest.approx(15e-6)
    assert profile["step_s"] == profile["ranks"][0]["clock_s"] == pytest.approx(100e-6)
    assert len(profile["warnings"]) == 1
    assert "1 of 3 ranks are missing (1)" in profile["warnings"][0]


@pytest.mark.parametrize("content", [b"", b'{"traceEvents": []}', b"[1, 2]", b"\x1f\x8bdamaged"])
def test_what_is_not_a_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(content)
    with pytest.raises(ConfigError):
        profile_of(tmp_path)


# ------------------------------------------------------------------------------------------- what could be faster

PIPELINE = {"pipe_parallel_size": 2, "accumulation": 2}
EVEN = {"forward": 80, "backward": 120}
Found = list[tuple[str, float, str]]  # cause, milliseconds that it costs, words of its fix


@pytest.mark.parametrize(
    ("ranks", "record", "found"),
    [
        ([{"data": 2, "communication": 4, **EVEN}] * 2, {}, []),
        ([{"data": 100, **EVEN}], {}, [("slow-loader", 100, "num_workers")]),
        (
            [{"communication": 32, **EVEN}, {"communication": 2, **EVEN, "forward": 110}],
            {},
            [("slow-rank", 30, "forward takes it 30 ms longer")],
        ),
        ([{"communication": 100, **EVEN}] * 2, {"zero_stage": 3}, [("communication", 100, "zero_stage 2")]),
        (
            [{"data": 100, "communication": 50, **EVEN}] * 2,
            {},
            [("slow-loader", 100, ""), ("communication", 50, "")],
        ),
        ([{**EVEN, "pipeline": 100}] * 2, PIPELINE, [("bubble", 66.7, "gradient_accumulation_steps: 8")]),
        (
            [{"forward": 40, "backward": 60, "pipeline": 100}, EVEN],
            PIPELINE,
            [("uneven-stages", 50, "partition_method: measured")],
        ),
        # Rank 0 comes early to each collective of a pipeline of one replica, and waits there for the heavier rank 1.
        (
            [
                {"forward": 30, "backward": 47, "pipeline": 100, "communication": 334},
                {"forward": 110, "backward": 166, "pipeline": 205, "communication": 30},
            ],
            PIPELINE,
            [("uneven-stages", 99.5, ""), ("bubble", 53, ""), ("communication", 30, "")],
        ),
        ([{**EVEN, "idle": 100}], GPU, [("idle-gpu", 100, "torch_compile: true")]),
    ],
)
def test_each_cause_is_named_the_largest_first(
    ranks: list[dict[str, float]], record: dict[str, Any], found: Found, tmp_path: Path
) -> None:
    """Ranks whose steps have these parts in milliseconds, in this order."""
    for rank, milliseconds in enumerate(ranks):
        at, events, steps = 0.0, [], []
        for _ in range(5):
            begin = at
            for part, length in milliseconds.items():
                end = at + 1000 * length
                if part == "communication":  # a rank waits for others
                    events.append(gloo(at, end))
                if part != "idle":
                    events.append(mark(part, at, end))
                    events += [kernel("gemm", at, end, launched=at)] if record is GPU else []
                at = end
            steps.append((begin, at))
        stage = {"pipe_stage": rank} if record is PIPELINE else {}
        write(tmp_path, events, steps, rank=rank, **{"ranks": len(ranks), **record, **stage})
    findings = profile_of(tmp_path)["findings"]
    assert [each["code"] for each in findings] == [code for code, _, _ in found]
    for each, (_, saves_ms, fix) in zip(findings, found, strict=True):
        assert 1000 * each["saves_s"] == pytest.approx(saves_ms, rel=0.01)
        assert fix in each["fix"]


@pytest.mark.parametrize("stage", [2, 3])
def test_overlapping_is_advised_where_deepspeed_does_not_by_itself(stage: int, tmp_path: Path) -> None:
    """ZeRO 3 overlaps where ``overlap_comm`` is not given, ZeRO 1 and 2 do not."""
    events, steps = [], []
    for begin in (0.0, 2e5, 4e5):
        events += [mark("forward", begin, begin + 1e5), kernel("gemm", begin, begin + 1e5, launched=begin)]
        events.append(kernel("ncclDevKernel_AllReduce", begin + 1e5, begin + 2e5, launched=begin + 1e5))
        steps.append((begin, begin + 2e5))
    write(tmp_path, events, steps, **GPU, zero_stage=stage, ds_config={"zero_optimization": {"stage": stage}})
    [fix] = [each["fix"] for each in profile_of(tmp_path)["findings"] if each["code"] == "communication"]
    assert ("overlap_comm" in fix) == (stage == 2)


@pytest.mark.parametrize(
    ("own", "machine", "warned"), [(0.45, 0.95, False), (0.3, 0.95, True), (0.1, 0.4, False)]
)
def test_a_machine_with_other_work_is_named_beside_the_shares(
    own: float, machine: float, warned: bool, tmp_path: Path
) -> None:
    """Two ranks on it; a machine that has room for all is not busy."""
    for rank in range(2):
        record = {"ranks": 2, "own_load": own, "machine_load": machine, "host": "node7"}
        write(tmp_path, [mark("forward", 0, 1000)], [(0, 1000)], rank=rank, **record)
    said = " ".join(profile_of(tmp_path)["warnings"])
    assert ("35 % of the processors of node7" in said) == warned, said
