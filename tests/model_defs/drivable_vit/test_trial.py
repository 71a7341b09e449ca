"""The drivable-space trial: one training under every ZeRO stage, checkpointed activations, IoU of all ranks, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ranks import Ranks

STEPS = 4
# fp32 sums in another order.
TOLERANCE = 1e-4


class Way(NamedTuple):
    """How a run is carried out."""

    zero_stage: int = 1
    accumulation: int = 1
    activation_checkpointing: bool = False
    num_workers: int = 0


def hyperparameters(way: Way) -> dict[str, Any]:
    return {
        "global_batch_size": 8,
        "deepspeed_config": f"experiments/deepspeed/zero{way.zero_stage}.json",
        "overwrite_deepspeed_args": {
            "gradient_accumulation_steps": way.accumulation,
            "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
        },
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 32,
        "spatial_layers": 1,
        "cross_view_layers": 1,
        "temporal_layers": 1,
        "num_heads": 2,
        "activation_checkpointing": way.activation_checkpointing,
        "learning_rate": 0.003,
        "warmup_num_steps": 2,
    }


def train(run_dir: Path, way: Way, stop: int = STEPS, resume: bool = False) -> dict[str, list[float]]:
    """Train in this rank; what was reported since the run directory was made."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from model_defs.drivable_vit.trial import DrivableViTTrial

    # 13 samples: more batches on one rank than on the other, and a last one that is not full.
    data = {
        "num_train_scenes": 32,
        "num_validation_scenes": 13,
        "num_views": 2,
        "num_workers": way.num_workers,
    }
    with open_context(
        hparams=hyperparameters(way),
        exp_conf={"data": data, "reproducibility": {"experiment_seed": 3}},
        run_dir=run_dir,
        accelerator="cpu",
        enable_tensorboard_logging=False,
    ) as context:
        found = sorted((run_dir / "checkpoints").iterdir()) if resume else []
        Trainer(DrivableViTTrial(context), context).fit(
            max_length=Batch(stop),
            reporting_period=Batch(1),
            validation_period=Batch(STEPS),
            checkpoint_period=Batch(STEPS // 2),
            checkpoint_policy="none",
            latest_checkpoint=found[-1].name if found else None,
        )
    lines = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        name: [line[name] for line in lines if name in line]
        for name in ("loss", "validation_loss", "validation_iou", "validation_pixel_accuracy")
    }


@pytest.fixture(scope="module")
def plain(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """One rank, one whole batch at a time."""
    return one_rank.run(train, tmp_path_factory.mktemp("plain"), Way(zero_stage=0))[0]


@pytest.mark.parametrize(
    "way",
    [
        Way(zero_stage=0),
        Way(zero_stage=1),
        Way(zero_stage=2, accumulation=2),
        Way(zero_stage=3),
        Way(zero_stage=3, activation_checkpointing=True),
    ],
    ids=str,
)
def test_losses_and_iou_are_those_of_one_rank(
    way: Way, two_ranks: Ranks, plain: dict[str, list[float]], tmp_path: Path
) -> None:
    found = two_ranks.run(train, tmp_path, way)[0]
    assert len(found["loss"]) == STEPS
    for name, values in plain.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE), name


def test_activation_checkpointing_changes_no_digit(
    one_rank: Ranks, plain: dict[str, list[float]], tmp_path: Path
) -> None:
    way = Way(zero_stage=0, activation_checkpointing=True)
    assert one_rank.run(train, tmp_path, way)[0] == plain


def options_of_checkpointing(ds_config: dict[str, Any]) -> dict[str, Any]:
    """How many blocks were run by DeepSpeed's checkpointing, and with which of its options."""
    import deepspeed
    import torch
    from deepspeed.runtime.activation_checkpointing import checkpointing

    from model_defs.drivable_vit.model import DrivableViT, model_config

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    deepspeed.checkpointing.configure(None, deepspeed_config=ds_config)
    model = DrivableViT(model_config(hyperparameters(Way())), checkpoint=deepspeed.checkpointing.checkpoint)
    calls = []
    for block in (*model.spatial, *model.cross_view, *model.temporal):
        block.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    model(torch.zeros(1, 1, 1, 3, 16, 16)).sum().backward()
    return {"calls": calls, "synchronize": checkpointing.SYNCHRONIZE, "cpu": checkpointing.CPU_CHECKPOINT}


def test_activation_checkpointing_is_that_of_the_json(one_rank: Ranks) -> None:
    section = {"synchronize_checkpoint_boundary": True}
    ds_config = {"train_batch_size": 1, "activation_checkpointing": section}
    found = one_rank.run(options_of_checkpointing, ds_config)[0]
    # Each of three blocks once without a graph, and once more on the way back.
    assert found == {"calls": [False] * 3 + [True] * 3, "synchronize": True, "cpu": False}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_is_the_whole_one(num_workers: int, two_ranks: Ranks, tmp_path: Path) -> None:
    way = Way(num_workers=num_workers)
    whole = two_ranks.run(train, tmp_path / "whole", way)[0]
    two_ranks.run(train, tmp_path / "parts", way, stop=STEPS // 2)
    parts = two_ranks.run(train, tmp_path / "parts", way, resume=True)[0]
    assert parts["loss"] == whole["loss"]
    for name, values in parts.items():
        assert values[-1] == whole[name][-1], name
