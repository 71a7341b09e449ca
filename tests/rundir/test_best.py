"""A validation that is not finite is never the best, never kept for it, and a reason to stop."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cli.own_runs import result, steps_of
from tests.package import checkpoints, records
from tests.rundir.runs import scored


def test_the_first_finite_validation_is_the_best_to_the_end(trained: Path) -> None:
    """A checkpoint for batch 4, which is the best and is kept; none for what is not a number."""
    run = trained / "run"
    assert list(map(steps_of, checkpoints(run))) == [8, 4]
    newest, best = checkpoints(run)
    found = result(run)
    assert (found["status"], found["steps_completed"]) == ("completed", 8)
    at_4 = {"steps_completed": 4, "checkpoint": best.name}
    assert found["best"] == {"metric": "score", "value": 3.0, **at_4}
    assert found["checkpoint"] == {"uuid": newest.name, "steps_completed": 8}
    links = [os.readlink(run / name) for name in ("best", "last")]
    assert links == [f"checkpoints/{best.name}", f"checkpoints/{newest.name}"]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (trained / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    scores = [(steps, metrics["score"]) for steps, metrics in records(trained / "run", "validation")]
    assert scores == [(2, "NaN"), (4, 3.0), (6, "Infinity"), (8, 5.0)]


def test_a_resumed_run_knows_the_same_best(copied: Path) -> None:
    """And reports each batch once, whatever a killed run has left of later ones, or of a line."""
    run = copied / "run"
    newest = checkpoints(run)[0]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    later = lines[-2].replace('"steps_completed": 8', '"steps_completed": 9')
    (run / "metrics.jsonl").write_text("".join([*lines, later, later[:30]]))
    scores = {2: "0", 4: "0", 6: "0", 8: "0", 10: "4", 12: "3.5"}
    fit = {"checkpoint_policy": "best", "stop_on_nan": False, "save_total_limit": 2}
    done = scored(copied, scores, "--resume", slots=2, **fit)
    assert done.returncode == 0, done.stderr
    assert "resumed at batch 8 of 12" in done.stdout
    assert list(map(steps_of, checkpoints(run))) == [12, 4]
    assert not newest.exists()
    assert [steps for steps, _ in records(run, "training")] == list(range(1, 13))
    assert result(run)["best"]["value"] == 3.0


def test_a_run_stops_at_what_is_not_finite_after_reporting_it(tmp_path: Path) -> None:
    """No checkpoint is made of those weights; named are the metric, the batch and the last good checkpoint."""
    done = scored(tmp_path, {2: "3", 4: "nan", 6: "1"}, checkpoint_policy="best")
    assert done.returncode == 1
    (kept,) = checkpoints(tmp_path / "run")
    assert list(map(steps_of, checkpoints(tmp_path / "run"))) == [2]
    said = f"score was not finite in the validation at batch 4: the last good checkpoint is {kept.name}"
    assert said in done.stderr
    assert records(tmp_path / "run", "validation")[-1][1]["score"] == "NaN"
    found = result(tmp_path / "run")
    assert (found["status"], found["steps_completed"]) == ("failed", 4)
    assert said in found["reason"]
