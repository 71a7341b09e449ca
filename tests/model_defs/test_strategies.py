"""A strategy changes how a model is trained, and nothing of what it learns: losses and metrics are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness.ranks import ROOT, Ranks
from tests.model_defs.training import reported, train

STEPS = 4
# Relative. fp32 sums in another order differ by about 1e-6 of a loss.
TOLERANCE = 1e-4
# Small parameters would stay whole, and these are all small.
SPLIT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class Model(NamedTuple):
    """A model as small as can be: hyperparameters, data, what it reports, and whether one rank draws as two do."""

    hparams: dict[str, Any]
    data: dict[str, Any]
    training: tuple[str, ...]
    validation: tuple[str, ...]
    on_one_rank: bool = True


MODELS = {
    "vit": Model(
        hparams={"global_batch_size": 16, "model_size": "tiny", "weight_decay": 0.05},
        data={"validation_fraction": 0.02},
        training=("loss", "accuracy"),
        validation=("validation_loss", "validation_accuracy"),
        on_one_rank=False,  # each rank draws how its images are varied
    ),
    "drivable_vit": Model(
        hparams={
            "global_batch_size": 8,
            "img_size": 16,
            "patch_size": 4,
            "embed_dim": 32,
            "spatial_layers": 1,
            "cross_view_layers": 1,
            "temporal_layers": 1,
            "num_heads": 2,
        },
        # 13 samples: more batches on one rank than on the other, and a last one that is not full.
        data={"num_train_scenes": 32, "num_validation_scenes": 13, "num_views": 2},
        training=("loss",),
        validation=("validation_loss", "validation_iou", "validation_pixel_accuracy"),
    ),
    "gpt2": Model(
        hparams={"global_batch_size": 4, "sequence_length": 16, "dropout": 0.0},
        data={"path": str(ROOT / "LICENSE")},
        training=("loss",),
        validation=("validation_loss",),
    ),
    "dcgan": Model(
        hparams={
            "global_batch_size": 64,
            "image_size": 8,
            "latent_size": 8,
            "generator_features": 8,
            "discriminator_features": 8,
            "discriminator_learning_rate": 0.002,
            "overwrite_deepspeed_args": {"gradient_clipping": 0.1},
        },
        data={},
        training=("d_loss", "g_loss", "loss"),
        validation=("validation_d_loss", "validation_g_loss", "validation_frechet_distance"),
        on_one_rank=False,  # each rank draws its latents
    ),
}


def hyperparameters(model: str, stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    own = MODELS[model].hparams
    overwritten = {**own.get("overwrite_deepspeed_args", {}), "gradient_accumulation_steps": accumulation}
    return {
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "zero_stage": stage,
        "learning_rate": 0.002,
        "warmup_num_steps": 2,
        **own,
        "overwrite_deepspeed_args": overwritten | (SPLIT_ALL if stage == 3 else {}),
        **more,
    }


def engines(generator: int, discriminator: int) -> dict[str, int]:
    """The ZeRO stages of DCGAN's engines."""
    return {"generator_zero_stage": generator, "discriminator_zero_stage": discriminator}


RECOMPUTED = {"activation_checkpointing": True}
# Model, ZeRO stage, accumulation, more hyperparameters.
WAYS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "vit, ZeRO 1": ("vit", 1, 1, {}),
    "vit, ZeRO 3, computed again": ("vit", 3, 1, RECOMPUTED),
    "drivable_vit, two ranks": ("drivable_vit", 0, 1, {}),
    "drivable_vit, ZeRO 2, accumulation 2": ("drivable_vit", 2, 2, {}),
    "drivable_vit, ZeRO 3, computed again": ("drivable_vit", 3, 1, RECOMPUTED),
    "gpt2, ZeRO 2": ("gpt2", 2, 1, {}),
    "gpt2, ZeRO 3, threes computed again": ("gpt2", 3, 1, {"activation_checkpoint_interval": 3}),
    "dcgan, ZeRO 1, accumulation 4": ("dcgan", 0, 4, engines(1, 1)),
    "dcgan, ZeRO 1 and 2, accumulation 2": ("dcgan", 0, 2, engines(1, 2)),
    "dcgan, ZeRO 3": ("dcgan", 0, 1, engines(3, 3)),
}


def curves(model: str, run_dir: Path) -> dict[str, list[float]]:
    """Metric -> its values."""
    training, validation = MODELS[model].training, MODELS[model].validation
    of_steps = {name: reported(run_dir, name) for name in training}
    return of_steps | {name: reported(run_dir, name, group="validation") for name in validation}


@pytest.fixture(scope="module")
def plain(
    one_rank: Ranks, two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, list[float]]]:
    """``plain(model)``: what a model reports without ZeRO, one whole batch at a time."""
    known: dict[str, dict[str, list[float]]] = {}

    def of(model: str) -> dict[str, list[float]]:
        if model not in known:
            run_dir = tmp_path_factory.mktemp("plain")
            ranks = one_rank if MODELS[model].on_one_rank else two_ranks
            ranks.run(train, run_dir, model, hyperparameters(model, 0), MODELS[model].data, STEPS)
            known[model] = curves(model, run_dir)
        return known[model]

    return of


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_metrics_are_those_without_zero(
    way: str, two_ranks: Ranks, plain: Callable[[str], dict[str, list[float]]], tmp_path: Path
) -> None:
    model, stage, accumulation, more = WAYS[way]
    hparams = hyperparameters(model, stage, accumulation, **more)
    two_ranks.run(train, tmp_path, model, hparams, MODELS[model].data, STEPS)
    found = curves(model, tmp_path)
    assert len(found["loss"]) == STEPS
    for name, values in plain(model).items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE), name
