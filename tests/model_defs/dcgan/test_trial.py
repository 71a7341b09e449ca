"""Two engines in one trial: a resumed run is the whole one, and both are in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.model_defs.training import reported, train
from tests.package import checkpoints

STEPS = 4
HPARAMS = {
    "global_batch_size": 64,
    "deepspeed_config": "experiments/deepspeed/zero1.json",
    "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
    "generator_zero_stage": 2,
    "discriminator_learning_rate": 0.002,
    "learning_rate": 0.001,
    "warmup_num_steps": 2,
    "image_size": 8,
    "latent_size": 8,
    "generator_features": 8,
    "discriminator_features": 8,
}


def steps_of_engines(trial: Any) -> dict[str, int]:
    return {name: engine.global_steps for name, engine in trial.engines.items()}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_run_is_the_whole_one(num_workers: int, two_ranks: Ranks, tmp_path: Path) -> None:
    """Each engine under another stage, and latents that are drawn."""
    data, whole, parts = {"num_workers": num_workers}, tmp_path / "whole", tmp_path / "parts"
    half = STEPS // 2
    two_ranks.run(train, whole, "dcgan", HPARAMS, data, STEPS, period=half)
    two_ranks.run(train, parts, "dcgan", HPARAMS, data, half)
    (latest,) = checkpoints(parts)
    steps = two_ranks.run(
        *(train, parts, "dcgan", HPARAMS, data, STEPS),
        period=half,
        latest_checkpoint=latest.name,
        then=steps_of_engines,
    )
    assert steps == [{"generator": STEPS, "discriminator": STEPS}] * 2
    for name in ("d_loss", "g_loss", "loss"):
        assert reported(parts, name) == reported(whole, name), name
        assert len(reported(parts, name)) == STEPS
    for name in ("validation_d_loss", "validation_g_loss", "validation_frechet_distance"):
        assert reported(parts, name, group="validation") == reported(whole, name, group="validation"), name


def test_images_in_tensorboard_and_both_engines_in_the_checkpoint(one_rank: Ranks, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one_rank.run(train, tmp_path, "dcgan", HPARAMS, {}, STEPS, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("generated")
    assert (image.step, image.width, image.height) == (STEPS, 64, 64)
    (checkpoint,) = checkpoints(tmp_path)
    assert {"model0", "model1"} <= {path.name for path in checkpoint.iterdir()}
