"""Going on with a run under changed settings, from another run, and after a crash; and what ranks get: real runs."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import yaml
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.cli.own_runs import LENGTH, LOSS, contents, edit, invoke, run, same_weights, steps
from tests.harness.command import det_ds
from tests.package import checkpoints, records

RATE = "hyperparameters.overwrite_deepspeed_args.optimizer.params.lr"
AMSGRAD = "hyperparameters.overwrite_deepspeed_args.optimizer.params.amsgrad=true"
SOURCE = "searcher.source_checkpoint_uuid"


def test_a_changed_rate_is_told_and_takes_effect(copied: Path) -> None:
    before = checkpoints(copied / "run")[0]
    done = run(copied / "own_model", copied / "run", "--resume", sets=[f"{LENGTH}=7", f"{RATE}=0"])
    assert done.returncode == 0, done.stderr
    assert "             deepspeed.optimizer.params.lr: 0.01 -> 0" in done.stdout
    assert records(copied / "run", "training")[-1][1]["lr"] == 0.0
    assert same_weights(before, checkpoints(copied / "run")[0])
    kept = yaml.safe_load((copied / "run/experiment.yaml").read_text())["hyperparameters"]
    assert kept["overwrite_deepspeed_args"]["optimizer"]["params"]["lr"] == 0


def test_what_must_stay_is_refused_before_a_rank_is_started(trained: Path) -> None:
    before = contents(trained / "run")
    for override in (AMSGRAD, "reproducibility.experiment_seed=5"):
        words = ["--run-dir", trained / "run", "--resume", "--set", f"{LENGTH}=9", "--set", override]
        result = invoke("run", trained / "own_model", *words)
        assert result.exit_code == EXIT_CONFIG, result.output
        assert override.replace("=", " = ").rpartition("args.")[2] in result.stderr
        assert "fix: go back to" in result.stderr
        assert contents(trained / "run") == before


SCHEDULE = """
    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=self.total_steps)
"""


def test_a_copied_run_is_trained_longer_by_its_own_command_under_a_new_schedule(own_model: Path) -> None:
    """Of a schedule that ends with the training, the rate goes on as over the longer one, and that is said."""
    with (own_model / "trial.py").open("a") as file:
        file.write(SCHEDULE)
    for name, length in (("run", 2), ("whole", 4)):
        done = run(own_model, own_model.parent / name, sets=[f"{LENGTH}={length}"])
        assert done.returncode == 0, done.stderr
    original, copy = own_model.parent / "run", own_model.parent / "copy"
    shutil.copytree(original, copy, symlinks=True)
    before = contents(original)
    said = CliRunner().invoke(main, ["watch", str(copy)]).stdout
    longer = said.partition("  longer ")[2].splitlines()[0]
    assert f"--run-dir {copy} --resume" in longer
    done = det_ds(*shlex.split(longer)[1:], cwd=own_model.parent)
    assert done.returncode == 0, done.stderr
    assert "schedule    OneCycleLR goes on by its new settings: lr " in done.stdout
    assert (steps(copy), contents(original)) == ([1, 2, 3, 4], before)
    rates = [dict(records(path, "training"))[3]["lr"] for path in (copy, own_model.parent / "whole")]
    assert rates[0] == rates[1]


def test_a_fork_begins_with_the_weights_and_counts_from_zero(copied: Path) -> None:
    """And goes on, when it is resumed, from its own."""
    origin = checkpoints(copied / "run")[0]
    sets = [f"{LENGTH}=1", f"{RATE}=0", f"{SOURCE}={copied / 'run'}"]
    done = run(copied / "own_model", copied / "fork", sets=sets)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"  fork       batch 6 of .*/run, checkpoint {origin.name}\n", done.stdout)
    assert steps(copied / "fork") == [1]
    assert same_weights(origin, checkpoints(copied / "fork")[0])
    config = yaml.safe_load((copied / "fork/experiment.yaml").read_text())
    assert config["searcher"]["source_checkpoint_uuid"] == str(origin)

    shutil.rmtree(copied / "run")
    sets = [f"{LENGTH}=2", f"{RATE}=0.1", f"{SOURCE}={copied / 'run'}"]
    again = run(copied / "own_model", copied / "fork", "--resume", sets=sets)
    assert again.returncode == 0, again.stderr
    assert "  fork " not in again.stdout
    assert steps(copied / "fork") == [1, 2]


def test_what_another_start_does_not_change_is_not_restarted(own_model: Path) -> None:
    edit(own_model / "trial.py", LOSS, f"{LOSS}        raise ArithmeticError('always')\n")
    done = run(own_model, own_model.parent / "run", sets=["max_restarts=3"])
    assert done.returncode == 1
    assert "ArithmeticError: always" in done.stderr
    assert not re.search(r"restart \d of", done.stderr)
