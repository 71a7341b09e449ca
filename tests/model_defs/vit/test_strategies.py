"""ZeRO shares out the training of a ViT, and changes nothing of it: the losses of every stage agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks

STEPS = 8
# Relative. fp32 sums in another order differ by about 1e-6 of a loss.
TOLERANCE = 1e-4


def hyperparameters(stage: int, checkpointing: bool) -> dict[str, Any]:
    return {
        "global_batch_size": 16,
        "deepspeed_config": f"experiments/deepspeed/zero{stage}.json",
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
        "model_size": "tiny",
        "activation_checkpointing": checkpointing,
        "learning_rate": 0.002,
        "weight_decay": 0.05,
        "warmup_num_steps": 3,
    }


def train(run_dir: Path, stage: int, checkpointing: bool) -> None:
    """Train in this rank."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from model_defs.vit.trial import ViTTrial

    with open_context(
        hparams=hyperparameters(stage, checkpointing),
        # Two epochs, and a validation that divides by nothing.
        exp_conf={"data": {"validation_fraction": 0.96}, "reproducibility": {"experiment_seed": 5}},
        run_dir=run_dir,
        accelerator="cpu",
        enable_tensorboard_logging=False,
    ) as context:
        trial = ViTTrial(context)
        trial.validation.images = Part(trial.validation.images)
        Trainer(trial, context).fit(
            max_length=Batch(STEPS),
            reporting_period=Batch(1),
            validation_period=Batch(STEPS),
            checkpoint_period=Batch(STEPS),
            checkpoint_policy="none",
        )


class Part:
    """The first images of more."""

    def __init__(self, images: Any) -> None:
        self.label, self.image = images.label, images.image

    def __len__(self) -> int:
        return 37


def reported(run_dir: Path) -> tuple[list[float], list[float]]:
    """Training losses, then validation loss and accuracy."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    training = [line["metrics"]["loss"] for line in lines if line["group"] == "training"]
    (last,) = [line["metrics"] for line in lines if line["group"] == "validation"]
    return training, [last["validation_loss"], last["validation_accuracy"]]


@pytest.fixture(scope="module")
def without(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    run_dir = tmp_path_factory.mktemp("zero0")
    two_ranks.run(train, run_dir, 0, False)
    return reported(run_dir)


@pytest.mark.parametrize(("stage", "checkpointing"), [(1, False), (2, False), (3, False), (3, True)])
def test_losses_are_those_without_zero(
    stage: int,
    checkpointing: bool,
    without: tuple[list[float], list[float]],
    two_ranks: Ranks,
    tmp_path: Path,
) -> None:
    two_ranks.run(train, tmp_path, stage, checkpointing)
    training, validation = reported(tmp_path)
    assert len(training) == STEPS
    assert training == pytest.approx(without[0], rel=TOLERANCE)
    assert validation == pytest.approx(without[1], rel=TOLERANCE)
