"""A script with a session under ``det-ds run``: a stated length, a longer one, and the test of one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.interrupted.compared import last_words
from tests.interrupted.experiments import run, session_experiment


def written(folder: Path, form: str, **options: Any) -> Path:
    path = folder / f"{form}.yaml"
    path.write_text(yaml.safe_dump(session_experiment(form, **options)))
    return path


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
