"""A trial that fails under ``det-ds run``: what the user reads begins in the user's own file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.command import det_ds

BUILDS = "        return torch.nn.Linear(4, 1)\n"
PLACE = "        inputs_B4, targets_B1 = batch\n"


def run(context: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = ("run", context / "experiment.yaml", context, "--run-dir", context / "run", "--slots", "1")
    return det_ds(*words, *more)


def broken(folder: Path, line: str) -> Path:
    """The context directory with a line more in ``loss``."""
    file = folder / "trial.py"
    text = file.read_text()
    assert text.count(PLACE) == 1
    file.write_text(text.replace(PLACE, f"{PLACE}        {line}\n"))
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
    assert "determined_ds/train.py" in kept.read_text()


def test_with_debug_all_of_a_traceback_is_shown(own_model: Path) -> None:
    context = broken(own_model, "raise ArithmeticError('the loss breaks')")
    done = run(context, "--set", "debug=true")
    assert done.returncode == 1
    assert "determined_ds/train.py" in done.stderr
    assert "full traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("import sys; sys.exit(0)", "exit(0)"),
        ("import os; os._exit(0)", "os._exit(0)"),
    ],
)
def test_a_trial_that_exits_has_not_completed(own_model: Path, line: str, call: str) -> None:
    context = broken(own_model, line)
    done = run(context)
    assert done.returncode == 1
    assert f"the trial called {call} at trial.py:" in done.stderr
    assert ", in loss: training had not ended" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_forgotten_is_said_by_an_estimate_too(own_model: Path) -> None:
    file = own_model / "trial.py"
    file.write_text(file.read_text().replace(BUILDS, BUILDS.replace("return ", "")))
    words = ["estimate", str(own_model / "experiment.yaml"), str(own_model), "--gpu-memory", "1GiB"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == EXIT_CONFIG
    assert "TinyTrial.build_model (trial.py:" in result.output
    assert "returned None; expected a torch.nn.Module" in result.output
