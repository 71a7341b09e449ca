"""``det-ds run --evaluate``: the numbers of the training, at any ranks and under any strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.errors import EXIT_CONFIG
from tests.cli.own_runs import at, contents, edit, invoke, result, run
from tests.harness.command import det_ds
from tests.package import records


def test_evaluated_on_one_rank_under_zero_3_is_what_two_ranks_validated(copied: Path) -> None:
    """Ten samples divide by neither the ranks nor the micro-batch. The run stays as it is."""
    there = copied / "run"
    before = contents(there)
    edit(copied / "own_model/ds.json", '"stage": 1', '"stage": 3')
    done = run(copied / "own_model", there, "--evaluate", "last", "--slots", "1")
    assert done.returncode == 0, done.stderr
    assert "validation  batch 6  validation_loss" in done.stdout
    (evaluated,) = (there / "evaluated").iterdir()
    ((step, metrics),) = records(evaluated, "validation")
    now, then = metrics["validation_loss"], records(there, "validation")[-1][1]["validation_loss"]
    assert (step, now) == (6, pytest.approx(then, rel=1e-5))
    found = result(evaluated)
    assert (found["status"], found["steps_completed"], found["best"]["value"]) == ("completed", 6, now)
    assert {name: content for name, content in contents(there).items() if "evaluated" not in name} == before


def test_a_checkpoint_is_named_by_its_uuid_alone_where_the_current_folder_has_the_run(copied: Path) -> None:
    there = copied / "own_model/runs/tiny/now"
    there.parent.mkdir(parents=True)
    (copied / "run").rename(there)
    words = ("experiment.yaml", ".", "--evaluate", at(there, 2).name, "--slots", "1")
    done = det_ds("run", *words, cwd=copied / "own_model")
    assert done.returncode == 0, done.stderr
    assert "validation  batch 2  validation_loss" in done.stdout
    for words, said in (
        (("nowhere",), "there is no such checkpoint"),
        (("best", "--test"), "together with --test"),
        (("last", "--set", "entrypoint=python3 trial.py"), "runs trials"),
    ):
        done = invoke("run", copied / "own_model", "--run-dir", there, "--evaluate", *words)
        assert (done.exit_code, said in done.stderr, "fix:" in done.stderr) == (EXIT_CONFIG, True, True)
