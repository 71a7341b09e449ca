"""A pipeline stops and continues under another schedule, whose ranks hold other layers and read other data.

The position in the data and the averages of ``EMA`` follow the layers, not the rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds.callbacks import EMA
from tests.checkpoints.strategies import ZERO, hyperparameters, trial_class
from tests.harness.ranks import Ranks
from tests.interrupted.compared import losses_of
from tests.package import checkpoints
from tests.train.small import fit


def train(run_dir: Path, schedule: str, steps: int, resume: str | None = None) -> str:
    """Train in this rank, with a report of each batch and four to a validation. Returns the newest checkpoint."""

    class Averaged(trial_class(ZERO[schedule])):  # type: ignore[misc]
        def build_callbacks(self) -> Any:
            return {"ema": EMA(0.8)}

    periods: dict[str, Any] = {"reporting_period": ("batches", 1), "validation_period": ("batches", 4)}
    how = {**periods, "checkpoint_policy": "none", "latest_checkpoint": resume}
    fit(run_dir, Averaged, hparams=hyperparameters(ZERO[schedule]), max_length=("batches", steps), **how)
    return checkpoints(run_dir)[0].name


WAY = ["dualpipev_zero1", "pipe2_zero1", "interleaved4"]  # every change of what ranks hold


def test_it_continues_as_if_nothing_had_changed(two_ranks: Ranks, tmp_path: Path) -> None:
    """Four batches under each."""
    two_ranks.run(train, tmp_path / "whole", "pipe2_zero1", 4 * len(WAY))
    uuid = None
    for number, schedule in enumerate(WAY):
        uuid, *_ = two_ranks.run(train, tmp_path / "run", schedule, 4 * (number + 1), uuid)
    whole, found = losses_of(tmp_path / "whole"), losses_of(tmp_path / "run")
    assert len(whole) == 5 * len(WAY)
    assert found == pytest.approx(whole, rel=1e-5)
