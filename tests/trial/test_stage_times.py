"""Where stages stand, and how ``partition_method: measured`` evens them out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import strategies
from tests.harness.ranks import Ranks
from tests.package import records
from tests.trial.regression import train, trial_class

STAGES, MICRO_BATCHES = 2, 4
QUICK, SLOW = 0.001, 0.012
HEAVY_END = (QUICK, QUICK, QUICK, SLOW)  # by parameters, or by number, two layers a stage


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Slow(torch.nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(4, 4)
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(super().forward(inputs), 0.2, self.training)
        return Sleep.apply(dropped, self.seconds)


def run(run_dir: Path, seconds: tuple[float, ...], steps: int = 2, **hyperparameters: Any) -> list[int]:
    """In a rank: train a pipeline of such layers; where each of its parts begins."""
    from deepspeed.pipe import LayerSpec

    hparams = {
        "global_batch_size": 2 * MICRO_BATCHES,
        "pipe_parallel_size": STAGES,
        "learning_rate": 0.1,
        "deepspeed_config": {"optimizer": {"type": "AdamW"}},
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": MICRO_BATCHES},
        **hyperparameters,
    }
    trial = trial_class("pipeline", build_layers=lambda self: [LayerSpec(Slow, own) for own in seconds])
    trained = train(run_dir, trial, hparams, steps=steps, checkpoint_policy="none")
    return [int(bound) for bound in trained.engine.module.parts]


def test_a_stage_of_slow_layers_gets_few_and_measuring_changes_no_number(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """The slow layer takes as long as all others; weights and dropout are drawn as without measuring."""
    assert two_ranks.run(run, tmp_path / "heavy", HEAVY_END, partition_method="measured") == [[0, 3, 4]] * 2
    losses = []
    for method in ("measured", "uniform"):
        bounds = two_ranks.run(run, tmp_path / method, (SLOW,) * 4, partition_method=method)
        assert bounds == [[0, 2, 4]] * 2
        losses.append([metrics["loss"] for _, metrics in records(tmp_path / method, "training")])
    assert losses[0] == losses[1]


def place(run_dir: Path, within: bool) -> tuple[list[int], list[int]]:
    """In a rank: the ranks of its stage in all replicas, and those of its pipeline in the order of stages."""
    from determined_ds import open_context

    strategy = strategies.ZERO["pipe2_zero1"]
    hparams = strategies.hyperparameters(strategy, pipe_within_machine=within)
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        grid = strategies.trial_class(strategy)(context).engine.grid
        return list(grid.dp_group), list(grid.pp_group)


def test_ranks_stand_where_det_ds_says(four_ranks: Ranks, tmp_path: Path) -> None:
    """On two machines of two: stages apart and replicas together, or ``pipe_within_machine``."""
    machines, across = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert four_ranks.run(place, tmp_path, False) == list(zip(machines, across, strict=True))
    assert four_ranks.run(place, tmp_path, True) == list(zip(across, machines, strict=True))
