"""``--resume UUID|PATH|best|last``: which checkpoint a run continues from, and what its user is told: real runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from determined_ds.errors import EXIT_CONFIG
from tests.cli.own_runs import (
    LENGTH,
    LOSS,
    at,
    contents,
    edit,
    invoke,
    result,
    run,
    same_weights,
    steps,
    steps_of,
)
from tests.package import checkpoints


def be_best(run_dir: Path, batch: int) -> None:
    """Have the validation at a batch be the best."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["group"] == "validation":
            record["metrics"]["validation_loss"] = abs(record["steps_completed"] - batch) + 0.5
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))


def test_from_an_earlier_one_the_run_is_trained_again_from_there(trained: Path, copied: Path) -> None:
    """Bit for bit as before; what was written after it is kept apart, and is the run's no longer."""
    there = copied / "run"
    be_best(there, 4)
    before = {steps_of(each): each.name for each in checkpoints(there)}
    done = run(copied / "own_model", there, "--resume", "best", sets=[f"{LENGTH}=7"])
    assert done.returncode == 0, done.stderr
    assert f"  superseded {before[6]} (batch 6)\n" in done.stdout
    assert steps(there) == [1, 2, 3, 4, 5, 6, 7]
    after = {steps_of(each): each.name for each in checkpoints(there)}
    assert sorted(after) == [2, 4, 6, 7]
    assert (after[2], after[4]) == (before[2], before[4])
    assert after[6] != before[6]
    assert [each.name for each in checkpoints(there / "superseded")] == [before[6]]
    assert same_weights(at(there, 6), at(trained / "run", 6))
    found = result(there)
    assert (found["steps_completed"], found["checkpoint"]["uuid"]) == (7, after[7])


def test_a_flipped_bit_is_found_before_the_ranks_start(copied: Path) -> None:
    there = copied / "run"
    damaged, good = at(there, 6), at(there, 4)
    file = next(damaged.glob("model0/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = run(copied / "own_model", there, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"{file.name} is not what was written (its checksum differs)" in done.stderr
    assert f"  resume     batch 4, checkpoint {good.name}\n" in done.stdout


def test_what_cannot_be_resumed_is_refused_and_nothing_changes(copied: Path) -> None:
    there, newest = copied / "run", at(copied / "run", 6)
    shutil.copytree(there, copied / "other")
    before, other = contents(there), str(at(copied / "other", 2))
    for where, named, said in (
        (["--run-dir", there], "nowhere", "--resume = 'nowhere': there is no such checkpoint"),
        (["--run-dir", there], other, "give a new --run-dir, which continues from it"),
        ([], other, "needs the --run-dir"),
        (["--run-dir", there], newest.name, "is damaged: trial_state.json has 2 bytes"),
    ):
        if named == newest.name:
            (newest / "trial_state.json").write_text("{}")
            before = contents(there)
        done = invoke("run", copied / "own_model", *where, "--resume", named)
        assert done.exit_code == EXIT_CONFIG, done.output
        assert said in done.stderr
        assert contents(there) == before


def test_a_crash_is_restarted_from_the_named_one_until_there_is_a_newer(trained: Path, copied: Path) -> None:
    """In a new run directory, and the other run stays as it is. It is killed before the named one is loaded and fails
    after a checkpoint of its own: with optimizer and place in the data, as if it had never crashed."""
    crashes = f"""
        import os, pathlib, signal
        first, second = (pathlib.Path({str(copied)!r}) / name for name in ("first", "second"))
        number = self.context._current_batch_idx
        if self.context.distributed.rank == 1 and model.training:
            if number == 2 and not first.exists():
                first.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 5 and not second.exists():
                second.touch()
                raise ArithmeticError("once only")
"""
    edit(copied / "own_model/trial.py", LOSS, crashes + LOSS)
    named, new, before = at(copied / "run", 2), copied / "new", contents(copied / "run")
    done = run(copied / "own_model", new, "--resume", named, sets=["max_restarts=2"])
    assert done.returncode == 0, done.stderr
    first, second = (line for line in done.stderr.splitlines() if "restart " in line)
    assert f"restart 1 of 2 from checkpoint {named.name} at batch 2; it crashed: " in first
    assert "killed by SIGKILL" in first
    assert f"restart 2 of 2 from checkpoint {at(new, 4).name} at batch 4" in second
    assert (steps(new), contents(copied / "run")) == ([3, 4, 5, 6], before)
    assert same_weights(at(new, 6), at(trained / "run", 6))
