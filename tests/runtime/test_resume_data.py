"""A run on torch's own loader or on a stream, killed and resumed, ends bit for bit as one never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import ROOT, det_ds
from tests.runtime.test_resume import experiment
from tests.runtime.victim import differences, last_words


def written(folder: Path, trial: str, **options: Any) -> Path:
    """An experiment of two ranks with that trial."""
    config = experiment(zero=1, **options)
    config["entrypoint"] = f"python3 -m determined_ds.train tests.runtime.victim:{trial}"
    path = folder / f"{trial}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(config: Path, run_dir: Path, *options: str, code: int = 0, **env: str) -> str:
    """``det-ds run`` to its end; returns what it printed."""
    done = det_ds("run", config, ROOT, "--run-dir", run_dir, *options, env=env)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize(
    ("trial", "num_workers"),
    [
        ("TorchVictim", 0),
        ("TorchVictim", 2),
        ("StreamVictim", 0),
        ("StreamVictim", 2),
        ("PlacedStreamVictim", 0),
        ("PlacedStreamVictim", 2),
        ("PipelineStreamVictim", 2),
    ],
)
def test_killed_and_resumed_ends_as_if_never_interrupted(
    trial: str, num_workers: int, tmp_path: Path
) -> None:
    """Two micro-batches to a batch; the kills are in the first, the second and the third pass over the data."""
    pipe = 2 if trial.startswith("Pipeline") else 1
    config = written(tmp_path, trial, accumulation=2, num_workers=num_workers, pipe=pipe)
    run(config, tmp_path / "whole")
    run(config, tmp_path / "killed", code=1, KILL_AT="before:5")
    run(config, tmp_path / "killed", "--resume", code=1, KILL_AT="saved:9")
    said = run(config, tmp_path / "killed", "--resume", code=1, KILL_AT="after:16")
    assert ("skipping" in said) == (trial == "StreamVictim")
    run(config, tmp_path / "killed", "--resume")
    assert differences(last_words(tmp_path / "whole"), last_words(tmp_path / "killed")) == []


def test_torchs_loader_trains_what_determineds_does(tmp_path: Path) -> None:
    """The same samples in each step and in each validation, in the same order."""
    for trial in ("Victim", "TorchVictim"):
        run(written(tmp_path, trial), tmp_path / trial)
    assert differences(last_words(tmp_path / "Victim"), last_words(tmp_path / "TorchVictim")) == []
