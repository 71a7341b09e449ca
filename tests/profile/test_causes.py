"""Findings: each cause of lost time is recognized in traces, and what costs little is not mentioned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.package import profile_of
from tests.profile.written_trace import OTHER, Raw, event, kernel, mark, written

STEPS = 5


def trace(folder: Path, *, rank: int = 0, ranks: int = 1, record: Any = None, **milliseconds: float) -> None:
    """A rank whose steps have these parts, in this order; in `communication` it waits in a collective for others."""
    step_us = 1000 * sum(milliseconds.values())
    events: list[Raw] = []
    for index in range(STEPS):
        at = index * step_us
        for part, length in milliseconds.items():
            end = at + 1000 * length
            if part == "communication":
                floats = {"Input Dims": [[1000]], "Input type": ["float"]}
                events.append(event("gloo:all_reduce", at, end, cat="user_annotation", tid=OTHER, **floats))
            if part != "idle":
                events.append(mark(part, at, end))
            if (record or {}).get("device") == "cuda" and part != "idle":
                events += kernel("gemm", at, end, launched=at)
            at = end
    spans = [(index * step_us, (index + 1) * step_us) for index in range(STEPS)]
    written(folder, events, spans, rank=rank, record={"ranks": ranks, **(record or {})})


def findings(folder: Path) -> list[dict[str, Any]]:
    """Those of all traces in a folder, the largest first."""
    found: list[dict[str, Any]] = profile_of(folder)["findings"]
    assert [each["saves_s"] for each in found] == sorted((each["saves_s"] for each in found), reverse=True)
    assert all(each["fix"] for each in found)
    return found


def test_where_nothing_costs_more_than_three_percent_nothing_is_found(tmp_path: Path) -> None:
    for rank in range(2):
        trace(tmp_path, rank=rank, ranks=2, data=2, forward=80, communication=4, backward=120)
    assert findings(tmp_path) == []


def test_a_slow_loader(tmp_path: Path) -> None:
    trace(tmp_path, data=100, forward=80, backward=120)
    [first] = findings(tmp_path)
    assert (first["code"], round(first["share"], 3)) == ("slow-loader", 0.333)
    assert first["saves_s"] == pytest.approx(0.1)
    assert "num_workers" in first["fix"]


def test_a_slow_rank_with_the_part_that_takes_it_longer(tmp_path: Path) -> None:
    trace(tmp_path, rank=0, ranks=2, forward=80, communication=32, backward=120)
    trace(tmp_path, rank=1, ranks=2, forward=110, communication=2, backward=120)
    first, *_ = findings(tmp_path)
    assert (first["code"], first["figures"]["rank"]) == ("slow-rank", 1)
    assert first["saves_s"] == pytest.approx(0.03)
    assert "forward pass takes 30 ms longer" in first["fix"]


def test_communication_that_no_computation_hides(tmp_path: Path) -> None:
    for rank in range(2):
        trace(tmp_path, rank=rank, ranks=2, forward=40, backward=60, communication=100)
    assert findings(tmp_path)[0]["code"] == "communication"


def test_a_pipelines_bubble_and_its_uneven_stages(tmp_path: Path) -> None:
    pipeline = {"pipe_parallel_size": 2, "accumulation": 2}
    parts = {"forward": 40, "backward": 60, "pipeline": 100}
    trace(tmp_path, rank=0, ranks=2, record=pipeline, **parts)
    trace(tmp_path, rank=1, ranks=2, record={**pipeline, "pipe_stage": 1}, forward=80, backward=120)
    by_code = {each["code"]: each for each in findings(tmp_path)}
    assert set(by_code) == {"bubble", "uneven-stages"}
    assert by_code["uneven-stages"]["figures"]["stage"] == 1
    assert by_code["uneven-stages"]["saves_s"] == pytest.approx(0.05)
    assert "gradient_accumulation_steps: 8" in by_code["bubble"]["fix"]


def test_an_idle_gpu_is_asked_for_more_work_or_for_a_compiler(tmp_path: Path) -> None:
    trace(tmp_path, record={"device": "cuda"}, forward=80, backward=120, idle=100)
    [first] = findings(tmp_path)
    assert first["code"] == "idle-gpu"
    assert "torch_compile: true" in first["fix"]


def test_an_offloaded_optimizer_that_takes_long(tmp_path: Path) -> None:
    ds_config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    parts = {"forward": 80, "backward": 120, "optimizer": 100}
    trace(tmp_path, record={"device": "cuda", "ds_config": ds_config}, **parts)
    assert [each["code"] for each in findings(tmp_path)] == ["offloaded-optimizer"]


def test_the_largest_cause_is_first(tmp_path: Path) -> None:
    for rank in range(2):
        trace(tmp_path, rank=rank, ranks=2, data=100, forward=80, communication=50, backward=120)
    assert [each["code"] for each in findings(tmp_path)] == ["slow-loader", "communication"]
