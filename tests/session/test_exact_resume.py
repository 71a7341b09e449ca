"""A script with a session, killed or stopped anywhere and resumed, ends bit for bit as one never interrupted.

Weights, optimizer, generators, the order of the data, unreported metrics, objects of the script, metrics.jsonl: with
dropout, an augmentation that draws random numbers, accumulation, several epochs and draws between them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import ROOT, det_ds
from tests.runtime.test_resume import experiment
from tests.runtime.victim import differences, last_words

SCRIPT = "tests/session/victim_script.py"
# In the middle of an accumulation, at the last batch of a pass, in the validation after it and after that; a pass is
# five batches, a checkpoint comes every third one and after each validation.
KILLS: dict[str, tuple[str, ...]] = {
    "range": ("KILL_AT=micro:5", "KILL_AT=validating:5", "STOP_AT=micro:8", "KILL_AT=validated:10"),
    "epochs": ("KILL_AT=validated:5", "STOP_AT=micro:10"),
    "steps": ("KILL_AT=micro:7",),
}


def written(folder: Path, form: str, *, max_length: int | None = None, **options: Any) -> Path:
    """An experiment of two ranks whose entrypoint is the script."""
    config = experiment(**{"zero": 1, "accumulation": 2, **options})
    config["entrypoint"] = f"python3 -m determined.launch.torch_distributed python3 {SCRIPT} {form}"
    fit = {
        "checkpoint_period": {"batches": 3},
        "reporting_period": {"batches": 4},
        "asynchronous_checkpoints": form == "range",
    }
    config["hyperparameters"]["fit"] = {
        **fit,
        **({"max_length": {"batches": max_length}} if max_length else {}),
    }
    path = folder / f"{form}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(config: Path, run_dir: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return det_ds("run", config, ROOT, "--run-dir", run_dir, *options, env=env)


def interrupted(config: Path, run_dir: Path, points: tuple[str, ...], **env: str) -> None:
    """Run to each point in turn, and then to the end."""
    for index, point in enumerate(points):
        name, _, place = point.partition("=")
        done = run(config, run_dir, *(["--resume"] if index else []), **{name: place, **env})
        assert done.returncode == (name == "KILL_AT"), (point, done.stdout, done.stderr)
    done = run(config, run_dir, "--resume", **env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", KILLS)
def test_killed_and_stopped_it_ends_as_if_never_interrupted(form: str, tmp_path: Path) -> None:
    config = written(tmp_path, form)
    whole = run(config, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    interrupted(config, tmp_path / "run", KILLS[form])
    assert differences(last_words(tmp_path / "whole"), last_words(tmp_path / "run")) == []
    for rank in range(2):
        words = [(tmp_path / name / f"words{rank}.json").read_text() for name in ("whole", "run")]
        assert words[0] == words[1], rank


@pytest.mark.long("test_killed_and_stopped_it_ends_as_if_never_interrupted under one strategy")
@pytest.mark.parametrize(("zero", "accumulation"), [(0, 1), (2, 1), (3, 2)])
def test_under_any_strategy(zero: int, accumulation: int, tmp_path: Path) -> None:
    config = written(tmp_path, "range", zero=zero, accumulation=accumulation)
    assert run(config, tmp_path / "whole").returncode == 0
    interrupted(config, tmp_path / "run", KILLS["range"])
    assert differences(last_words(tmp_path / "whole"), last_words(tmp_path / "run")) == []


@pytest.mark.long("the same with data that runtime/test_resume_data.py has for trials")
@pytest.mark.parametrize("data", ["stream", "torch"])
def test_with_any_data(data: str, tmp_path: Path) -> None:
    config = written(tmp_path, "range")
    assert run(config, tmp_path / "whole", DATA=data).returncode == 0
    points = ("KILL_AT=micro:5", "STOP_AT=micro:8", "KILL_AT=validated:10")
    interrupted(config, tmp_path / "run", points, DATA=data)
    assert differences(last_words(tmp_path / "whole"), last_words(tmp_path / "run")) == []


def test_a_stated_length_ends_a_pass_and_a_longer_one_continues_it(tmp_path: Path) -> None:
    """8 batches end in the second pass, which the script validates; with 13 the rest of that pass comes first."""
    config = written(tmp_path, "range", max_length=8)
    first = run(config, tmp_path / "run")
    assert first.returncode == 0, first.stderr
    longer = ("--set", "hyperparameters.fit.max_length.batches=13")
    assert run(config, tmp_path / "run", "--resume", *longer).returncode == 0
    metrics = last_words(tmp_path / "run")["metrics"]
    assert [each[:2] for each in metrics if each[0] == "validation"] == [
        ("validation", 5),
        ("validation", 8),
        ("validation", 10),
        ("validation", 13),
    ]


def test_one_batch_is_tested(tmp_path: Path) -> None:
    done = run(written(tmp_path, "epochs"), tmp_path / "run", "--test")
    assert done.returncode == 0, done.stderr
    assert "test passed" in done.stdout
    [*_, last] = last_words(tmp_path / "run")["metrics"]
    assert last[:2] == ("validation", 1)
