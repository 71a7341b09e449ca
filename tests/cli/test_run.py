"""The run directory, and what a failure looks like: real runs of a tiny model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds import load_experiment
from determined_ds.cli.main import main
from tests.cli.own_runs import LENGTH, LOSS, OWN_MODEL, edit, result, run, steps
from tests.harness.command import det_ds, det_ds_program
from tests.package import checkpoints

SEED = 441365315  # what a master draws for the first trial of experiment_seed 0


COUNTING = """
    def on_step_end(self, batch_idx, metrics):
        import sys
        print("modules", sum(name.startswith("determined_ds") for name in sys.modules), flush=True)
"""


def test_a_run_shows_plain_lines_and_resumes_from_its_newest_checkpoint_with_every_step_once(
    own_model: Path, tmp_path: Path
) -> None:
    """Four batches by two ranks; then, from the checkpoint at the second, as if it had been killed, to the sixth."""
    run_dir = tmp_path / "run"
    with (own_model / "trial.py").open("a") as file:
        file.write(COUNTING)
    first = det_ds_program(
        "run", own_model / "experiment.yaml", own_model, "--run-dir", run_dir, "--set", f"{LENGTH}=4"
    )
    assert (first.returncode, first.stderr) == (0, "")
    assert {int(count) <= 90 for count in re.findall("modules ([0-9]+)", first.stdout)} == {True}
    shutil.rmtree(checkpoints(run_dir)[0])
    second = run(OWN_MODEL, run_dir, "--resume", sets=[f"{LENGTH}=6"])
    assert second.returncode == 0, second.stderr
    assert not {"\x1b", "\r"} & set(first.stdout)
    lines = first.stdout.splitlines()
    assert any(line.startswith("training    batch 1/4  loss ") for line in lines)
    assert any(line.startswith("validation  batch 2/4  validation_loss ") for line in lines)
    assert "resume     batch 2, checkpoint" in second.stdout
    for checkpoint in checkpoints(run_dir):
        assert json.loads((checkpoint / "load_data.json").read_text())["trial_seed"] == SEED
    assert (steps(run_dir), steps(run_dir, "validation")) == ([1, 2, 3, 4, 5, 6], [2, 4, 6])
    found = result(run_dir)
    assert (found["status"], found["trial_seed"], found["slots"]) == ("completed", SEED, 2)


def test_a_rank_that_raises_is_named_and_the_other_ends(own_model: Path) -> None:
    fails = (
        "        if self.context.distributed.rank == 1 and self.context._current_batch_idx == 3:\n"
        "            raise ArithmeticError('only rank 1 breaks')\n"
    )
    edit(own_model / "trial.py", LOSS, fails + LOSS)
    words = ("run", "experiment.yaml", ".", "--run-dir", "my run")
    done = det_ds(*words, cwd=own_model)
    assert done.returncode == 1
    said, _, traceback = done.stderr.partition("Traceback (most recent call last):\n")
    assert "rank 1 failed first" in said
    assert "Traceback" not in traceback, "the other rank's is a consequence"
    assert "trial.py" in traceback.splitlines()[0]
    kept = own_model / "my run/logs/traceback-rank1.txt"
    assert f"full traceback: {kept}" in done.stderr
    assert "determined_ds/train/rank.py" in kept.read_text()
    command = "det-ds run 'my run/experiment.yaml' . --run-dir 'my run' --resume --accelerator cpu"
    assert command in done.stdout + done.stderr
    found = result(own_model / "my run")
    assert (found["status"], found["cause"]) == ("failed", "crash")
    assert found["reason"] == "ArithmeticError: only rank 1 breaks"


def test_a_trial_that_exits_has_not_completed(own_model: Path) -> None:
    edit(own_model / "trial.py", LOSS, f"{LOSS}        import sys; sys.exit(0)\n")
    done = run(own_model, own_model.parent / "run", "--slots", "1")
    assert done.returncode == 1
    assert "the trial called exit(0) at trial.py:" in done.stderr
    assert ", in loss: training had not ended" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_has_a_line_for_each_command_and_fits_a_screen_with_options_in_groups() -> None:
    _, _, listed = CliRunner().invoke(main, ["--help"]).output.partition("Commands:\n")
    lines = [line.split(maxsplit=1) for line in listed.splitlines()]
    names = "run check new compare autotune search report watch profile doctor checkpoint"
    assert [name for name, _ in lines] == names.split()
    shown = CliRunner().invoke(main, ["run", "--help"], prog_name="det-ds", terminal_width=80)
    lines_of_run = shown.output.splitlines()
    assert len(lines_of_run) <= 50
    groups = [line[:-1] for line in lines_of_run if line.endswith(":") and not line.startswith(" ")]
    assert groups == ["Basic", "Resuming", "Evaluating", "Machines"]


def test_an_experiment_is_written_as_it_would_be_read(own_model: Path, tmp_path: Path) -> None:
    """Strings that look like numbers, mappings that look like a search, one point of a real search."""
    overrides = {
        "name": '"1e3"',
        "description": '"2026-01-01"',
        "data.path": "größe.txt",
        "hyperparameters.tag": '"1e-3"',
        "hyperparameters.tiny": "1e-30",
        "hyperparameters.model": "{type: const, val: {type: mlp, sizes: [4, 1]}}",
        "hyperparameters.rate": "{type: log, minval: -4, maxval: -2, base: 10}",
        LENGTH: "2",
    }
    done = run(own_model, tmp_path / "run", sets=[f"{key}={value}" for key, value in overrides.items()])
    assert done.returncode == 0, done.stderr
    again = load_experiment(tmp_path / "run" / "experiment.yaml")
    assert (again.name, again.config["description"]) == ("1e3", "2026-01-01")
    assert again.config["data"] == {"path": "größe.txt"}
    hyperparameters = again.hyperparameters.data
    assert (hyperparameters["tag"], hyperparameters["tiny"]) == ("1e-3", 1e-30)
    assert hyperparameters["model"] == {"type": "mlp", "sizes": [4, 1]}
    assert hyperparameters["rate"] == pytest.approx(1e-3)
    assert again.searched == ()
