"""Runs of tiny trials, by ``det-ds run``; and a wait for something to be true."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.harness.command import TIMEOUT_S, det_ds

TRIALS = """
import math, os, torch
from determined_ds import DataParallelTrial

class Plain(DataParallelTrial):
    def build_model(self):
        return torch.nn.Linear(4, 3)
    def loss(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs[:, :4]), targets[:, :3])
    def build_training_data_loader(self):
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs))
    build_validation_data_loader = build_training_data_loader

class Scored(Plain):
    # A validation has the score that the hyperparameter says for its batch.
    def evaluate_batch(self, dataloader_iter, batch_idx):
        next(dataloader_iter)
        return {"score": float(self.args.scores[str(self.context._current_batch_idx + 1)]), "other": 1.0}
"""


def words(
    folder: Path,
    run_dir: Path,
    trial: str = "Plain",
    *,
    slots: int = 1,
    fit: Any = None,
    source: str = "",
    **more: Any,
) -> list[str]:
    """The words of a run that reports each batch and, unless ``fit`` says otherwise, never ends and saves nothing.

    ``source`` has more trials, and ``more`` hyperparameters.
    """
    periods = {"max_length": {"batches": 1_000_000}, "reporting_period": {"batches": 1}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {
        "name": "tiny",
        "entrypoint": "python3 -m determined.launch.torch_distributed"
        f" python3 -m determined_ds.train trial:{trial}",
        "resources": {"slots_per_trial": slots},
        "hyperparameters": {
            "global_batch_size": 8,
            "deepspeed_config": {
                "type": "const",
                "val": {"optimizer": optimizer, "zero_optimization": {"stage": 1}},
            },
            "fit": {**periods, "checkpoint_policy": "none", **(fit or {})},
            **more,
        },
        "searcher": {"name": "single", "metric": "score" if trial == "Scored" else "validation_loss"},
    }
    folder.mkdir(exist_ok=True)
    (folder / "trial.py").write_text(TRIALS + source)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(config))
    return ["run", str(folder / "experiment.yaml"), str(folder), "--run-dir", str(run_dir)]


def scored(
    folder: Path, scores: dict[int, str], *further: str, slots: int = 1, **fit: Any
) -> subprocess.CompletedProcess[str]:
    """Train with a validation after each two batches, to ``folder/run``: these are its scores."""
    fit = {"validation_period": {"batches": 2}, "max_length": {"batches": max(scores)}, **fit}
    by_text = {str(batch): score for batch, score in scores.items()}
    given = words(folder, folder / "run", "Scored", slots=slots, fit=fit, scores=by_text)
    return det_ds(*given, *further)


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is true, and hand it back; a guard against hangs, not a measure."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
    return found
