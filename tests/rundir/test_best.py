"""A validation that is not finite is never the best, never kept for it, and a reason to stop."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.own_runs import result, steps_of
from tests.package import checkpoints, records
from tests.rundir.conftest import FIT
from tests.rundir.runs import scored


def test_the_first_finite_validation_is_the_best_to_the_end_and_after_a_resume(copied: Path) -> None:
    """Each batch is reported once, whatever a killed run has left of later ones, or of a line."""
    run = copied / "run"
    newest, best = checkpoints(run)
    assert [steps_of(newest), steps_of(best)] == [8, 4]
    found = result(run)["best"]
    assert found == {"metric": "score", "value": 3.0, "steps_completed": 4, "checkpoint": best.name}
    links = [os.readlink(run / name) for name in ("best", "last")]
    assert links == [f"checkpoints/{best.name}", f"checkpoints/{newest.name}"]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)
    scores = [(steps, metrics["score"]) for steps, metrics in records(run, "validation")]
    assert scores == [(2, "NaN"), (4, 3.0), (6, "Infinity"), (8, 5.0)]

    later = lines[-2].replace('"steps_completed": 8', '"steps_completed": 9')
    (run / "metrics.jsonl").write_text("".join([*lines, later, later[:30]]))
    done = scored(copied, {2: "0", 4: "0", 6: "0", 8: "0", 10: "4", 12: "3.5"}, "--resume", slots=2, **FIT)
    assert done.returncode == 0, done.stderr
    assert list(map(steps_of, checkpoints(run))) == [12, 4]
    assert [steps for steps, _ in records(run, "training")] == list(range(1, 13))
    assert result(run)["best"]["value"] == 3.0


def test_a_run_stops_at_what_is_not_finite_after_reporting_it(tmp_path: Path) -> None:
    """No checkpoint is made of those weights; named are the metric, the batch and the last good checkpoint."""
    done = scored(tmp_path, {2: "3", 4: "nan", 6: "1"}, checkpoint_policy="best")
    assert done.returncode == 1
    (kept,) = checkpoints(tmp_path / "run")
    assert steps_of(kept) == 2
    said = f"score was not finite in the validation at batch 4: the last good checkpoint is {kept.name}"
    assert said in done.stderr
    assert records(tmp_path / "run", "validation")[-1][1]["score"] == "NaN"
    found = result(tmp_path / "run")
    assert (found["status"], found["steps_completed"]) == ("failed", 4)
