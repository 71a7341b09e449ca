"""Runs that meet faults, and what they end with."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.harness.command import ROOT, det_ds
from tests.interrupted.compared import last_words
from tests.interrupted.experiments import STRATEGIES, experiment
from tests.package import records

NUM_BATCHES = 24
ON_SPIKE = {"window": 10, "skip": 3, "deviations": 100}


def faulty(name: str = "zero1", *, plain: bool = False, trial: str = "", **fit: Any) -> dict[str, Any]:
    """The experiment of a strategy of ``interrupted/experiments.py``, or of the script for ``session``."""
    is_session = name == "session"
    config = experiment(**STRATEGIES["zero1" if is_session else name])
    is_pipeline = config["hyperparameters"]["pipe_parallel_size"] > 1
    trial = trial or f"{'Plain' * plain}Faulty{'Pipeline' * is_pipeline}"
    config["entrypoint"] = f"python3 -m determined_ds.train tests.recovery.trials:{trial}"
    if is_session:
        launcher = "python3 -m determined.launch.torch_distributed"
        config["entrypoint"] = f"{launcher} python3 -m tests.recovery.script"
    periods = {"max_length": NUM_BATCHES, "checkpoint_period": 4, "reporting_period": 3}
    lengths = {key: {"batches": number} for key, number in periods.items()}
    asynchronous = config["hyperparameters"]["fit"]["asynchronous_checkpoints"]
    config["hyperparameters"]["fit"] = {**lengths, "asynchronous_checkpoints": asynchronous, **fit}
    return {**config, "max_restarts": 3}


def run(
    config: Mapping[str, Any], run_dir: Path, *options: str, **faults: Any
) -> subprocess.CompletedProcess[str]:
    """``det-ds run`` of an experiment to its end."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(config)))
    faults = {"marks": str(run_dir.parent), **faults}
    return det_ds("run", path, ROOT, "--run-dir", run_dir, *options, env={"FAULTS": json.dumps(faults)})


def result(run_dir: Path) -> Any:
    """Its ``result.json``."""
    return json.loads((run_dir / "result.json").read_text())


def words(run_dir: Path) -> dict[str, Any]:
    """Everything that its last checkpoint holds, and what its script has written."""
    own = {file.name: file.read_text() for file in run_dir.glob("words*.json")}
    return {**last_words(run_dir), "own": own}


def poison_of(batch: int, config: Mapping[str, Any], folder: Path) -> int:
    """A sample of a batch of the data, as a run says that leaves this batch out."""
    fit = {**config["hyperparameters"]["fit"], "skip_batches": [batch, batch], "on_spike": None}
    short = {**config, "hyperparameters": {**config["hyperparameters"], "fit": fit}}
    assert run(short, folder / "poison").returncode == 0
    [(_, said)] = records(folder / "poison", "skipped")
    assert (said["skipped_first"], said["skipped_last"]) == (batch, batch)
    return int(said["skipped_samples"][0])
