"""A group whose rate is 0 stays bit for bit as it is; freezing by hand is refused where the engine would not follow."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks, RanksFailed
from tests.train.small import fit, hyperparameters, linear_trial


def train(run_dir: Path, zero_stage: int, *, by_hand: bool = False) -> Any:
    """In a rank: the first layer's rate is 0 in steps 2 and 3. Returns its weights after each of six steps."""
    import deepspeed

    seen: list[Any] = []

    class Mine(linear_trial()):  # type: ignore[misc]
        def build_model(self) -> Any:
            return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))

        def build_parameters(self, model: Any) -> Any:
            return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]

        def build_scheduler(self, optimizer: Any) -> Any:
            rates = [lambda step: float(step not in (2, 3)), lambda step: 1.0]
            return torch.optim.lr_scheduler.LambdaLR(optimizer, rates)

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            self.engine.module[0].requires_grad_(not by_hand)
            parameters = list(self.engine.module.parameters())
            with deepspeed.zero.GatheredParameters(parameters, enabled=zero_stage == 3):
                seen.append([part.detach().float().numpy().copy() for part in parameters])

    fit(run_dir, Mine, hparams=hyperparameters(zero_stage, gradient_clipping=0.5), max_length=("batches", 6))
    return seen


def test_a_group_with_a_rate_of_0_stays(two_ranks: Ranks, tmp_path: Path) -> None:
    """As docs/your-model.md freezes layers for some steps; the other group trains on."""
    seen = two_ranks.run(train, tmp_path, 3)[0]
    moved = [
        ((now[0] != before[0]).any(), (now[2] != before[2]).any()) for before, now in itertools.pairwise(seen)
    ]
    assert moved == [(True, True), (False, True), (False, True), (True, True), (True, True)]


def test_what_the_engine_would_not_follow_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"0\.weight was frozen in training"):
        two_ranks.run(train, tmp_path, 2, by_hand=True)
