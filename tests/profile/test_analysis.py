"""Traces written by hand are taken apart into steps, and each cause of lost time is found in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.package import profile_of

MAIN, OTHER, STREAM = 100, 200, 7  # two threads of the host, and a stream of a GPU
GPU: dict[str, Any] = {"device": "cuda"}
Spans = Sequence[tuple[float, float]]


def events_of(text: str) -> list[dict[str, Any]]:
    """Events in the Chrome trace event format, each by its name and its microseconds, with commas between them.

    ``forward 12-30`` is a range of ours, ``aten::mm 0-40`` an operator of torch, ``gloo 30-60`` a collective in a
    thread of gloo, and ``gemm 8-40 @10`` a kernel that the host launched at 10, or another of its threads, ``@@10``.
    """
    found = []

    def add(cat: str, name: str, begin: float, end: float, tid: int, **args: Any) -> None:
        times = {"ts": begin, "dur": end - begin}
        found.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "args": args, **times})

    for number, words in enumerate(each.split() for each in text.split(",")):
        name, (begin, end) = words[0], map(float, words[1].split("-"))
        if len(words) > 2:
            at, thread = float(words[2].lstrip("@")), OTHER if words[2].startswith("@@") else MAIN
            add("cuda_runtime", "cudaLaunchKernel", at, at + 1, thread, correlation=number + 1)
            add("gpu_memcpy" if name == "HtoD" else "kernel", KERNELS.get(name, name), begin, end, STREAM)
            found[-1]["args"] = {"correlation": number + 1}
        elif name == "gloo":
            add("user_annotation", "gloo:all_reduce", begin, end, OTHER)
        elif "::" in name:
            add("cpu_op", name, begin, end, MAIN)
        else:
            add("user_annotation", f"determined_ds.{name}", begin, end, MAIN)
    return found


KERNELS = {"HtoD": "Memcpy HtoD (Pinned -> Device)", "nccl": "ncclDevKernel_AllReduce_Sum_f32_RING_LL"}


def write(folder: Path, text: str, steps: Spans, rank: int = 0, **record: Any) -> None:
    """A trace whose steps begin and end at these times, by the clock too."""
    ranges = [f"step#{index} {begin}-{end}" for index, (begin, end) in enumerate(steps)]
    taken = [
        {"batch": 11 + index, "seconds": (end - begin) / 1e6} for index, (begin, end) in enumerate(steps)
    ]
    content = {
        "traceEvents": events_of(",".join(filter(None, [*ranges, text]))),
        "determined_ds": {"rank": rank, "ranks": 1, "steps": taken, **record},
    }
    (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))


def rank_of(folder: Path, text: str, *steps: tuple[float, float], **record: Any) -> dict[str, Any]:
    write(folder, text, steps, **record)
    [rank] = profile_of(folder)["ranks"]
    return dict(rank)


def in_us(step: dict[str, Any]) -> dict[str, int]:
    """The parts of a step that are there, and what is hidden."""
    found = {part: round(1e6 * seconds) for part, seconds in step["seconds"].items()}
    assert sum(found.values()) == round(step["end_us"] - step["begin_us"])
    found["hidden"] = round(1e6 * step["overlapped_s"])
    return {part: number for part, number in found.items() if number}


@pytest.mark.parametrize(
    ("text", "parts", "record"),
    [
        (  # the loss is forward's
            "data 0-10, forward 12-30, aten::cross_entropy 30-38, backward 40-80, optimizer 85-95",
            {"data": 10, "forward": 28, "backward": 40, "optimizer": 10, "other": 12},
            {},
        ),
        (  # a collective is hidden for 10 and waited for for 20; then its own call
            "backward 0-80, aten::mm 0-40, gloo 30-60, aten::mm 60-80, optimizer 80-100, c10d::allgather_ 80-82,"
            "gloo 82-90",
            {"backward": 60, "communication": 30, "optimizer": 10, "hidden": 10},
            {},
        ),
        (  # a collective in a hook
            "backward 0-100, autograd::AccumulateGrad 10-90, aten::add_ 10-20, c10d::allreduce_ 20-25, gloo 25-70",
            {"backward": 50, "communication": 50},
            {},
        ),
        (  # kernels by who launched them: 0-2 the host was at the data; 6-8 and 95-100 it was at something else
            "data 0-5, forward 5-20, backward 20-30, optimizer 30-35, HtoD 2-6 @1, gemm 8-40 @10, gemm 40-80 @@22,"
            "adam 80-95 @31",
            {"data": 6, "forward": 32, "backward": 40, "optimizer": 15, "idle": 7},
            GPU,
        ),
        (  # a hidden collective of a GPU
            "backward 0-10, optimizer 10-12, gemm 0-60 @1, nccl 40-90 @5, adam 90-100 @11",
            {"backward": 60, "communication": 30, "optimizer": 10, "hidden": 20},
            GPU,
        ),
        (
            "forward 0-2, pipeline 2-4, backward 4-6, gemm 0-20 @1, nccl 20-70 @3, gemm 70-100 @5",
            {"forward": 20, "pipeline": 50, "backward": 30},
            GPU,
        ),
        (
            "backward 0-20, optimizer 20-100, gemm 0-20 @1",
            {"backward": 20, "optimizer": 80},
            {**GPU, "ds_config": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}},
        ),
    ],
)
def test_a_step_is_taken_apart(
    text: str, parts: dict[str, int], record: dict[str, Any], tmp_path: Path
) -> None:
    assert in_us(rank_of(tmp_path, text, (0, 100), **record)["steps"][0]) == parts


def test_the_device_lags_behind_the_host_and_all_steps_take_what_the_clock_says(tmp_path: Path) -> None:
    steps = [(0.0, 20.0), (21.0, 40.0), (41.0, 130.0)]  # at the end of the last the host waits for the device
    text = "forward 0-10, forward 21-31, forward 41-51, gemm 1-41 @1, gemm 41-81 @22, gemm 81-121 @42"
    rank = rank_of(tmp_path, text, *steps, **GPU)
    assert [(step["begin_us"], step["end_us"]) for step in rank["steps"]] == [(0, 41), (41, 81), (81, 130)]
    parts = [{"forward": 40, "idle": 1}, {"forward": 40}, {"forward": 40, "idle": 9}]
    assert [in_us(step) for step in rank["steps"]] == parts
    assert rank["step_s"] == pytest.approx(rank["clock_s"], rel=0.02)  # but for the 2 between them


PIPELINE = {"pipe_parallel_size": 2, "accumulation": 2}
EVEN = {"forward": 80, "backward": 120}
HEAVY = {"forward": 110, "backward": 166, "pipeline": 205, "communication": 30}
# DeepSpeed overlaps under ZeRO 3 where overlap_comm is not given, and not under ZeRO 2.
ZERO_2, ZERO_3 = (
    {"zero_stage": stage, "ds_config": {"zero_optimization": {"stage": stage}}} for stage in (2, 3)
)


@pytest.mark.parametrize(
    ("ranks", "record", "found"),
    [
        ([{"data": 2, "communication": 4, **EVEN}] * 2, {}, []),
        (
            [{"communication": 32, **EVEN}, {"communication": 2, **EVEN, "forward": 110}],
            {},
            [("slow-rank", 30, "forward takes it 30 ms longer")],
        ),
        ([{"communication": 100, **EVEN}] * 2, ZERO_3, [("communication", 100, "zero_stage 2")]),
        ([{**EVEN, "nccl": 100}], GPU | ZERO_2, [("communication", 100, '{"overlap_comm": true}')]),
        (
            [{"data": 100, "communication": 50, **EVEN}] * 2,
            {},
            [("slow-loader", 100, "num_workers"), ("communication", 50, "")],
        ),
        ([{**EVEN, "pipeline": 100}] * 2, PIPELINE, [("bubble", 66.7, "gradient_accumulation_steps: 8")]),
        (  # rank 0 comes early to each collective of a pipeline of one replica, and waits for the heavier rank 1
            [{"forward": 30, "backward": 47, "pipeline": 100, "communication": 334}, HEAVY],
            PIPELINE,
            [
                ("uneven-stages", 99.5, "partition_method: measured"),
                ("bubble", 53, ""),
                ("communication", 30, ""),
            ],
        ),
        ([{**EVEN, "idle": 100}], GPU, [("idle-gpu", 100, "torch_compile: true")]),
    ],
)
def test_each_cause_is_named_the_largest_first(
    ranks: list[dict[str, float]], record: dict[str, Any], found: list[tuple[str, float, str]], tmp_path: Path
) -> None:
    """Ranks whose steps have these parts in milliseconds; what each cause costs, and a part of its fix."""
    for rank, milliseconds in enumerate(ranks):
        at, texts, steps = 0.0, [], []
        for _ in range(5):
            begin = at
            for part, length in milliseconds.items():
                span, launched = f"{at}-{at + 1000 * length}", f"@{at}" * ("device" in record)
                texts += [f"gloo {span}"] * (part == "communication")  # a rank waits for others
                if part == "nccl":
                    texts.append(f"nccl {span} {launched}")
                elif part != "idle":
                    texts += [f"{part} {span}", *([f"gemm {span} {launched}"] if launched else [])]
                at += 1000 * length
            steps.append((begin, at))
        stage = {"pipe_stage": rank} if record is PIPELINE else {}
        write(tmp_path, ",".join(texts), steps, rank=rank, **{"ranks": len(ranks), **record, **stage})
    findings = profile_of(tmp_path)["findings"]
    assert [each["code"] for each in findings] == [code for code, _, _ in found]
    for each, (_, saves_ms, fix) in zip(findings, found, strict=True):
        assert 1000 * each["saves_s"] == pytest.approx(saves_ms, rel=0.01)
        assert fix in each["fix"]
        assert ("overlap_comm" in each["fix"]) == ("overlap_comm" in fix)


@pytest.mark.parametrize(
    ("own", "machine", "warned"), [(0.45, 0.95, False), (0.3, 0.95, True), (0.1, 0.4, False)]
)
def test_a_machine_with_other_work_is_named_beside_the_shares(
    own: float, machine: float, warned: bool, tmp_path: Path
) -> None:
    """Two ranks on it; a machine that has room for all is not busy."""
    for rank in range(2):
        record = {"ranks": 2, "own_load": own, "machine_load": machine, "host": "node7"}
        write(tmp_path, "forward 0-1000", [(0, 1000)], rank=rank, **record)
    said = " ".join(profile_of(tmp_path)["warnings"])
    assert ("35 % of the processors of node7" in said) == warned, said
