"""Freezing by hand is refused where the engine would not follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks, RanksFailed
from tests.train.small import fit, hyperparameters, linear_trial


def train(run_dir: Path) -> None:
    """In a rank: the bias is frozen after the first step."""

    class Mine(linear_trial()):  # type: ignore[misc]
        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            self.engine.module.bias.requires_grad_(False)

    fit(run_dir, Mine, hparams=hyperparameters(2), max_length=("batches", 6))


def test_what_the_engine_would_not_follow_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="bias was frozen in training"):
        two_ranks.run(train, tmp_path)
