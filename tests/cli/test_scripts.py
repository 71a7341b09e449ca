"""An experiment whose entrypoint is a script runs like any other: real runs of ``own_script``."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED
from tests.cli.own_runs import OWN_SCRIPT, losses, result, steps, steps_of
from tests.harness.command import Started, det_ds
from tests.package import checkpoints, damage

STEPS = 8


def words(folder: Path, arguments: str, *options: str, run_dir: str = "run") -> list[str]:
    launch = "python3 -m determined.launch.deepspeed python3"
    entrypoint = f"entrypoint={launch} {arguments or 'train.py'}"
    there = [str(folder / "experiment.yaml"), str(folder), "--run-dir", str(folder / run_dir)]
    return ["run", *there, "--set", entrypoint, *options]


@pytest.fixture
def own_script(tmp_path: Path) -> Path:
    """A copy of ``own_script``."""
    return Path(shutil.copytree(OWN_SCRIPT, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with ``run``, trained by two ranks, and what was printed."""
    folder = tmp_path_factory.mktemp("scripts") / "own"
    shutil.copytree(OWN_SCRIPT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    done = det_ds(*words(folder, "", "--set", "hyperparameters.learning_rate=0.01"))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_script_finds_its_trial_and_reports_to_the_run_directory(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    info = json.loads(printed.split("INFO ")[1].splitlines()[0])
    assert (info["hparams"], info["slots"], info["latest"]) == ({"learning_rate": 0.01}, [0, 1], None)
    assert list(losses(folder / "run")) == list(range(1, STEPS + 1))
    found = result(folder / "run")
    assert (found["status"], found["steps_completed"]) == ("completed", STEPS)
    assert found["best"]["checkpoint"] == found["checkpoint"]["uuid"]
    assert {damage(checkpoint) for checkpoint in checkpoints(folder / "run")} == {None}


def test_after_a_crash_it_resumes_from_its_checkpoint(own_script: Path, trained: tuple[Path, str]) -> None:
    done = det_ds(*words(own_script, "train.py --crash 6", "--set", "hyperparameters.learning_rate=0.01"))
    assert done.returncode == 0, done.stderr
    assert "ArithmeticError: step 6" in done.stderr
    assert "restart 1 of 1 from checkpoint" in done.stderr
    assert losses(own_script / "run") == pytest.approx(losses(trained[0] / "run"), rel=1e-6)


def test_a_signal_is_its_preemption_and_it_resumes(own_script: Path) -> None:
    slow = words(own_script, f"train.py --steps {STEPS} --sleep 0.3", "--slots", "1")
    started = Started(*slow, merged=True)
    metrics = own_script / "run/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert started.poll() is None
    started.send_signal(signal.SIGTERM)
    said, _ = started.communicate(120)
    assert started.wait(10) == 0
    assert "  resume      det-ds run" in said
    found = result(own_script / "run")
    assert found["status"] == "stopped"
    assert steps_of(checkpoints(own_script / "run")[0]) == found["steps_completed"] < STEPS
    done = det_ds(*words(own_script, "", "--slots", "1", "--resume"))
    assert done.returncode == 0, done.stderr
    assert list(losses(own_script / "run")) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("train.py --exit 3", EXIT_TRAINING_FAILED, "train.py ended with exit code 3"),
        ("train.py --impossible", EXIT_CONFIG, "cannot run with this point: the width must be even"),
    ],
)
def test_how_it_ends_is_how_the_run_ends(own_script: Path, arguments: str, code: int, said: str) -> None:
    done = det_ds(*words(own_script, arguments, "--slots", "1"))
    assert done.returncode == code, done.stderr
    assert said in done.stderr


def test_a_trial_in_determineds_own_form_is_trained_as_long_as_its_experiment_says(own_script: Path) -> None:
    sets = ("searcher.max_length={batches: 4}", "min_validation_period={batches: 2}", "scheduling_unit=1")
    there = [own_script / "experiment.yaml", own_script, "--run-dir", own_script / "run", "--slots", "1"]
    options = [word for each in ("entrypoint=model_def:OwnTrial", *sets) for word in ("--set", each)]
    done = det_ds("run", *there, *options)
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stderr
    assert (steps(own_script / "run"), steps(own_script / "run", "validation")) == ([1, 2, 3, 4], [2, 4])
    given = json.loads((own_script / "run/deepspeed_config.json").read_text())
    assert given["train_batch_size"] == 8  # its engine's


def test_a_search_runs_a_script_at_each_point_and_leaves_to_it_what_it_decides(own_script: Path) -> None:
    rates = "hyperparameters.learning_rate={type: categorical, vals: [0.1, 0.01]}"
    searcher = "searcher={name: grid, metric: validation_loss, max_length: {epochs: 3}}"
    there = [own_script / "experiment.yaml", own_script, "--run-dir", own_script / "search"]
    done = det_ds("search", *there, "--slots", "1", "--set", rates, "--set", searcher)
    assert done.returncode == 0, done.stderr
    assert "2 trials: 2 completed" in done.stdout
    trials = [yaml.safe_load(path.read_text()) for path in own_script.glob("search/trials/*/experiment.yaml")]
    assert {trial["hyperparameters"]["learning_rate"] for trial in trials} == {0.1, 0.01}
    assert all(trial["searcher"]["max_length"] == {"epochs": 3} for trial in trials)
