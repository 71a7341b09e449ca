"""Steps on a CPU, taken apart: traces written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds import ConfigError
from tests.package import profile_of
from tests.profile.written_trace import OTHER, PARTS, Raw, event, mark, written


def gloo(begin: float, end: float) -> Raw:
    return event("gloo:all_reduce", begin, end, cat="user_annotation", tid=OTHER)


def parts(folder: Path, events: list[Raw], end: float = 100) -> tuple[dict[str, int], int]:
    """Of one step from 0: the parts that are there, and what is hidden, in microseconds."""
    written(folder, events, [(0, end)])
    [rank] = profile_of(folder)["ranks"]
    [step] = rank["steps"]
    found = {part: round(1e6 * seconds) for part, seconds in step["seconds"].items()}
    assert sum(found.values()) == end
    return {part: number for part, number in found.items() if number}, round(1e6 * step["overlapped_s"])


@pytest.mark.parametrize(
    ("events", "expected", "hidden"),
    [
        (
            [
                mark("data", 0, 10),
                mark("forward", 12, 30),
                event("aten::cross_entropy", 30, 38),
                mark("backward", 40, 80),
                mark("optimizer", 85, 95),
            ],
            {"data": 10, "forward": 28, "backward": 40, "optimizer": 10, "other": 12},
            0,
        ),
        (
            [
                mark("backward", 0, 100),
                mark("backward", 10, 90),
                mark("data", 20, 30),
                mark("pipeline", 40, 60),
            ],
            {"backward": 70, "data": 10, "pipeline": 20},
            0,
        ),
        (
            [
                mark("backward", 0, 80),
                event("aten::mm", 0, 40),
                gloo(30, 60),  # hidden for 10, waited for 20
                event("aten::mm", 60, 80),
                mark("optimizer", 80, 100),
                event("c10d::allgather_", 80, 82),  # the call itself
                gloo(82, 90),
            ],
            {"backward": 60, "communication": 30, "optimizer": 10},
            10,
        ),
        (
            [
                mark("backward", 0, 100),
                event("autograd::engine::evaluate_function: AccumulateGrad", 10, 90),
                event("aten::add_", 10, 20),
                event("c10d::allreduce_", 20, 25),
                gloo(25, 70),
            ],
            {"backward": 50, "communication": 50},
            0,
        ),
        (
            [mark("pipeline", 10, 60), gloo(15, 60), mark("communication", 70, 80), gloo(70, 80)],
            {"pipeline": 50, "communication": 10, "other": 40},
            0,
        ),
    ],
    ids=["the loss is forward's", "the inner range", "a collective", "in a hook", "of a pipeline"],
)
def test_a_step_is_taken_apart(
    events: list[Raw], expected: dict[str, int], hidden: int, tmp_path: Path
) -> None:
    assert parts(tmp_path, events) == (expected, hidden)


def test_means_over_steps_and_ranks(tmp_path: Path) -> None:
    for rank, data in ((0, 10), (1, 30)):
        written(tmp_path, [mark("data", 0, data)], [(0, 100), (100, 200)], rank=rank, record={"ranks": 2})
    profile = profile_of(tmp_path)
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 1]
    assert profile["seconds"]["data"] == pytest.approx(10e-6)
    assert profile["ranks"][1]["seconds"]["data"] == pytest.approx(15e-6)
    assert profile["step_s"] == profile["ranks"][0]["clock_s"] == pytest.approx(100e-6)
    assert set(profile["seconds"]) == PARTS
    assert profile["warnings"] == []


def test_missing_ranks_are_warned_of(tmp_path: Path) -> None:
    for rank in (0, 2):
        written(tmp_path, [], [(0, 1000)], rank=rank, record={"ranks": 3})
    (missing,) = profile_of(tmp_path)["warnings"]
    assert missing == "the traces of 1 of 3 ranks are missing (1): means are over the others"


@pytest.mark.parametrize("content", [b"", b'{"traceEvents": []}', b"[1, 2]", b"\x1f\x8bdamaged"])
def test_what_is_not_a_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(content)
    with pytest.raises(ConfigError):
        profile_of(tmp_path)
