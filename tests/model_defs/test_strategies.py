"""A strategy changes how a model is trained, and nothing of what it learns: losses and metrics are the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import ROOT, Ranks
from tests.model_defs.training import train
from tests.package import checkpoints, records

STEPS = 4
# Small parameters would stay whole, and these are all small.
SPLIT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
# Models as small as can be: hyperparameters and data.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit": ({"global_batch_size": 16, "weight_decay": 0.05}, {"validation_fraction": 0.02}),
    "drivable_vit": (
        {"global_batch_size": 8, "img_size": 16, "patch_size": 4, "embed_dim": 32, "num_heads": 2}
        | dict.fromkeys(("spatial_layers", "cross_view_layers", "temporal_layers"), 1),
        # 13 samples: more batches on one rank than on the other, and a last one that is not full.
        {"num_train_scenes": 32, "num_validation_scenes": 13, "num_views": 2},
    ),
    "gpt2": ({"global_batch_size": 4, "sequence_length": 16}, {"path": str(ROOT / "LICENSE")}),
    "dcgan": (
        {"global_batch_size": 64, "image_size": 8, "discriminator_learning_rate": 0.002}
        | dict.fromkeys(("latent_size", "generator_features", "discriminator_features"), 8),
        {},
    ),
}
DRAWING = ("vit", "dcgan")  # each rank draws crops or latents: two ranks are no one rank


def hyperparameters(model: str, stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    overwritten = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.1}
    return {
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "zero_stage": stage,
        "learning_rate": 0.002,
        "warmup_num_steps": 2,
        "overwrite_deepspeed_args": overwritten | (SPLIT_ALL if stage == 3 else {}),
        **MODELS[model][0],
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


def curves(run_dir: Path) -> dict[str, list[float]]:
    """Metric of training or of validation -> its values."""
    found: dict[str, list[float]] = {}
    for group in ("training", "validation"):
        for _, metrics in records(run_dir, group):
            for name in filter(re.compile("loss|accuracy|iou|distance").search, metrics):
                found.setdefault(f"{group} {name}", []).append(metrics[name])
    return found


@pytest.fixture(scope="module")
def plain(
    one_rank: Ranks, two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, list[float]]]:
    """``plain(model)``: what a model reports without ZeRO, one whole batch at a time."""
    known: dict[str, dict[str, list[float]]] = {}

    def of(model: str) -> dict[str, list[float]]:
        if model not in known:
            run_dir = tmp_path_factory.mktemp("plain")
            ranks = two_ranks if model in DRAWING else one_rank
            ranks.run(train, run_dir, hyperparameters(model, 0), MODELS[model][1], STEPS, model=model)
            known[model] = curves(run_dir)
        return known[model]

    return of


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_metrics_are_those_without_zero(
    way: str, two_ranks: Ranks, plain: Callable[[str], dict[str, list[float]]], tmp_path: Path
) -> None:
    model, stage, accumulation, more = WAYS[way]
    hparams = hyperparameters(model, stage, accumulation, **more)
    two_ranks.run(train, tmp_path, hparams, MODELS[model][1], STEPS, model=model)
    found = curves(tmp_path)
    assert len(found["training loss"]) == STEPS
    # fp32 sums in another order differ by about 1e-6 of a loss.
    assert found == {name: pytest.approx(values, rel=1e-4) for name, values in plain(model).items()}


def test_a_resumed_dcgan_is_the_whole_one(two_ranks: Ranks, tmp_path: Path) -> None:
    """Each engine under another stage, latents that are drawn, and a process that reads ahead."""
    hparams, data = hyperparameters("dcgan", 0, 2, **engines(2, 1)), {"num_workers": 1}
    two_ranks.run(train, tmp_path / "whole", hparams, data, STEPS, model="dcgan", period=2)
    two_ranks.run(train, tmp_path / "parts", hparams, data, 2, model="dcgan")
    (latest,) = checkpoints(tmp_path / "parts")
    two_ranks.run(train, tmp_path / "parts", hparams, data, STEPS, latest.name, model="dcgan", period=2)
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")
