"""``result.json``: what a program reads of a run that has ended."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from determined_ds.errors import EXIT_CONFIG
from determined_ds.launch.ranks.hang import Hang
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.run_ranks import Outcome
from determined_ds.protocol.conclusion import read_result, write_result
from determined_ds.protocol.run_dir import RunDir

KILLED = Failure(rank=1, code=-signal.SIGKILL, cause="killed", time=0.0)
INVALID = Failure(
    rank=0, code=2, exit_code=EXIT_CONFIG, cause="configuration", reason="x: is wrong", time=0.0
)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(), ("completed", None, None)),
        (Outcome(signals=(signal.SIGINT,)), ("stopped", None, None)),
        (Outcome(signals=(signal.SIGINT, signal.SIGINT), failures=(KILLED,)), ("stopped", None, None)),
        (Outcome(failures=(KILLED,)), ("failed", "killed", "it ended without a message: killed by SIGKILL")),
        (Outcome(failures=(Failure(rank=0, code=7, time=0.0),)), ("failed", "crash", "exit code 7")),
        (Outcome(hang=Hang(seconds=9.0, steps=3, behind=(1,))), ("failed", "hang", "rank 1 hangs")),
        (Outcome(failures=(INVALID, KILLED)), ("invalid", "configuration", "x: is wrong")),
    ],
    ids=["complete", "stopped", "stopped at once", "killed", "ended", "hung", "invalid"],
)
def test_how_it_ended(outcome: Outcome, expected: tuple[str, Any, Any], tmp_path: Path) -> None:
    there = RunDir(tmp_path)
    write_result(
        there, status=outcome.status, cause=outcome.cause, reason=outcome.reason, trial_seed=441365315
    )
    result = read_result(there)
    assert result is not None
    assert (result.status, result.cause) == expected[:2]
    assert (expected[2] or "") in (result.reason or "")
    assert (result.steps_completed, result.trial_seed, result.best, result.checkpoint) == (
        0,
        441365315,
        None,
        None,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_how_far_it_came_what_was_best_and_how_to_resume(tmp_path: Path) -> None:
    """A line that a killed run left half-written counts for nothing."""
    there = RunDir(tmp_path)
    values = {5: "NaN", 10: 0.5, 20: 0.25, 30: 0.75}
    records = [
        {"group": "validation", "steps_completed": s, "metrics": {"loss": v}} for s, v in values.items()
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    there.metrics.write_text(text + '{"group": "validation", "steps_com')

    def result(**given: Any) -> Any:
        write_result(there, status="stopped", metric="loss", resume="det-ds run", **given)
        return read_result(there)

    assert (result().steps_completed, result().checkpoint, result().resume) == (30, None, None)
    assert result().best == {"metric": "loss", "value": 0.25, "steps_completed": 20, "checkpoint": None}
    for uuid, steps in (("abc", 20), ("def", 35)):
        (there.checkpoints / uuid).mkdir(parents=True)
        (there.checkpoints / uuid / "metadata.json").write_text(json.dumps({"steps_completed": steps}))
    assert (result().steps_completed, result().resume) == (35, "det-ds run")
    assert result().best["checkpoint"] == "abc"
    assert result().checkpoint == {"uuid": "def", "steps_completed": 35}
    assert result(smaller_is_better=False).best["value"] == 0.75


def test_what_is_not_a_result_is_none(tmp_path: Path) -> None:
    there = RunDir(tmp_path)
    assert read_result(there) is None
    for text in ("", "[]", "{}", '{"status": "completed", "of another program": 1}'):
        there.result.write_text(text)
        assert read_result(there) is None, text
