"""``result.json``: what a program reads of a run that has ended."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from determined_ds.errors import EXIT_CONFIG
from determined_ds.launch.ranks.hang import Hang
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.start import Outcome
from determined_ds.protocol.result import write_result

KILLED = Failure(rank=1, code=-signal.SIGKILL, time=0.0)


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(), "completed"),
        (Outcome(signals=(signal.SIGINT,)), "stopped"),
        (Outcome(signals=(signal.SIGINT, signal.SIGINT), failures=(KILLED,)), "stopped"),
        (Outcome(failures=(KILLED,)), "failed"),
        (Outcome(failures=(Failure(rank=0, code=1, exit_code=1, time=0.0),)), "failed"),
        (Outcome(hang=Hang(seconds=9.0, steps=3, behind=(1,), stack="")), "failed"),
        (Outcome(failures=(Failure(rank=0, code=2, exit_code=EXIT_CONFIG, time=0.0),)), "invalid"),
    ],
    ids=["complete", "stopped", "stopped at once", "killed", "raised", "hung", "invalid"],
)
def test_how_it_ended(outcome: Outcome, status: str, tmp_path: Path) -> None:
    write_result(tmp_path, exit_code=outcome.exit_code, stopped=outcome.stopped, trial_seed=441365315)
    expected = {"status": status, "steps_completed": 0, "trial_seed": 441365315}
    assert json.loads((tmp_path / "result.json").read_text()) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_how_far_it_came_is_the_furthest_that_anything_tells(tmp_path: Path) -> None:
    """A line that a killed run left half-written tells nothing."""
    (tmp_path / "metrics.jsonl").write_text('{"steps_completed": 10}\n{"steps_completed": 20}\n{"steps_com')
    write_result(tmp_path, exit_code=0, stopped=False, trial_seed=0)
    assert json.loads((tmp_path / "result.json").read_text())["steps_completed"] == 20
    checkpoint = tmp_path / "checkpoints/abc"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text('{"steps_completed": 25}')
    write_result(tmp_path, exit_code=0, stopped=False, trial_seed=0)
    assert json.loads((tmp_path / "result.json").read_text())["steps_completed"] == 25
