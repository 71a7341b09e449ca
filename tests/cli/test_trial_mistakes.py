"""A trial that fails under ``det-ds run``: what the user reads begins in the user's own file."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cli.own_runs import LOSS, edit
from tests.harness.command import det_ds


def run(context: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = ("run", context / "experiment.yaml", context, "--run-dir", context / "run", "--slots", "1")
    return det_ds(*words, *more)


def broken(folder: Path, line: str) -> Path:
    """The context directory with a line more in ``loss``."""
    edit(folder / "trial.py", LOSS, f"{LOSS}        {line}\n")
    return folder


def test_a_traceback_begins_at_the_authors_line(own_model: Path) -> None:
    context = broken(own_model, "raise ArithmeticError('the loss breaks')")
    done = run(context)
    assert done.returncode == 1
    head, _, shown = done.stderr.partition("Traceback (most recent call last):\n")
    assert "rank 0 failed first" in head
    first, second, *_ = shown.splitlines()
    assert first.strip().startswith(f'File "{context / "trial.py"}", line ')
    assert second.strip() == "raise ArithmeticError('the loss breaks')"
    kept = context / "run" / "logs" / "traceback-rank0.txt"
    assert f"full traceback: {kept}" in shown
    assert "determined_ds/train/rank_process.py" in kept.read_text()


def test_with_debug_all_of_a_traceback_is_shown(own_model: Path) -> None:
    context = broken(own_model, "raise ArithmeticError('the loss breaks')")
    done = run(context, "--set", "debug=true")
    assert done.returncode == 1
    assert "determined_ds/train/rank_process.py" in done.stderr
    assert "full traceback" not in done.stderr


def test_a_trial_that_exits_has_not_completed(own_model: Path) -> None:
    done = run(broken(own_model, "import sys; sys.exit(0)"))
    assert done.returncode == 1
    assert "the trial called exit(0) at trial.py:" in done.stderr
    assert ", in loss: training had not ended" in done.stderr
    assert "Traceback" not in done.stderr
