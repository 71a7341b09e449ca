"""Findings: each cause of lost time is recognized in traces, and what costs little is not mentioned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.package import profile_of
from tests.profile.written_trace import OTHER, Raw, event, kernel, mark, written

STEPS = 5
PIPELINE = {"pipe_parallel_size": 2, "accumulation": 2}


def traces(folder: Path, *ranks: dict[str, float], **record: Any) -> None:
    """Ranks whose steps have these parts in milliseconds, in this order; in `communication` a rank waits for others."""
    for rank, milliseconds in enumerate(ranks):
        step_us = 1000 * sum(milliseconds.values())
        events: list[Raw] = []
        for index in range(STEPS):
            at = index * step_us
            for part, length in milliseconds.items():
                end = at + 1000 * length
                if part == "communication":
                    events.append(event("gloo:all_reduce", at, end, cat="user_annotation", tid=OTHER))
                if part != "idle":
                    events.append(mark(part, at, end))
                if record.get("device") == "cuda" and part != "idle":
                    events += kernel("gemm", at, end, launched=at)
                at = end
        spans = [(index * step_us, (index + 1) * step_us) for index in range(STEPS)]
        stage = {"pipe_stage": rank} if "pipe_parallel_size" in record else {}
        written(folder, events, spans, rank=rank, record={"ranks": len(ranks), **record, **stage})


EVEN = {"forward": 80, "backward": 120}


@pytest.mark.parametrize(
    ("ranks", "record", "found", "saves_ms", "fix"),
    [
        ([{"data": 2, "communication": 4, **EVEN}] * 2, {}, [], 0, ""),
        ([{"data": 100, **EVEN}], {}, ["slow-loader"], 100, "num_workers"),
        (
            [{"communication": 32, **EVEN}, {"communication": 2, **EVEN, "forward": 110}],
            {},
            ["slow-rank"],
            30,
            "forward takes it 30 ms longer",
        ),
        ([{"communication": 100, **EVEN}] * 2, {"zero_stage": 3}, ["communication"], 100, "zero_stage 2"),
        (
            [{"data": 100, "communication": 50, **EVEN}] * 2,
            {},
            ["slow-loader", "communication"],
            100,
            "",
        ),
        (
            [{**EVEN, "pipeline": 100}] * 2,
            PIPELINE,
            ["bubble"],
            66.7,
            "gradient_accumulation_steps: 8",
        ),
        (
            [{"forward": 40, "backward": 60, "pipeline": 100}, EVEN],
            PIPELINE,
            ["uneven-stages"],
            50,
            "partition_method: measured",
        ),
        # Rank 0 comes early to each collective of a pipeline of one replica, and waits there for the heavier rank 1.
        (
            [
                {"forward": 30, "backward": 47, "pipeline": 100, "communication": 334},
                {"forward": 110, "backward": 166, "pipeline": 205, "communication": 30},
            ],
            PIPELINE,
            ["uneven-stages", "bubble", "communication"],
            99.5,
            "partition_method: measured",
        ),
        ([{**EVEN, "idle": 100}], {"device": "cuda"}, ["idle-gpu"], 100, "torch_compile: true"),
    ],
)
def test_each_cause_is_named_the_largest_first(
    ranks: list[dict[str, float]],
    record: dict[str, Any],
    found: list[str],
    saves_ms: float,
    fix: str,
    tmp_path: Path,
) -> None:
    traces(tmp_path, *ranks, **record)
    findings = profile_of(tmp_path)["findings"]
    assert [each["code"] for each in findings] == found
    assert [each["saves_s"] for each in findings] == sorted(
        (each["saves_s"] for each in findings), reverse=True
    )
    assert "bucket" not in str(findings)  # DeepSpeed's own sizes, which ZeRO 3 never reads
    if found:
        assert 1000 * findings[0]["saves_s"] == pytest.approx(saves_ms, rel=0.01)
        assert fix in findings[0]["fix"]


@pytest.mark.parametrize(
    ("own", "machine", "warned"), [(0.45, 0.95, False), (0.3, 0.95, True), (0.1, 0.4, False)]
)
def test_a_machine_with_other_work_is_named_beside_the_shares(
    own: float, machine: float, warned: bool, tmp_path: Path
) -> None:
    """Two ranks on it; a machine that has room for all is not busy."""
    traces(tmp_path, EVEN, EVEN, own_load=own, machine_load=machine, host="node7")
    done = CliRunner().invoke(main, ["profile", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert ("of the processors of node7" in " ".join(done.output.split())) == warned
    assert "which take 200 ms to 200 ms" in " ".join(done.output.split())
