"""Settings that change between a checkpoint and the start from it take effect; other models are refused.

On real engines, two ranks, under every ZeRO stage.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds import ConfigError, load_state_dict_from_checkpoint_path
from tests.harness.ranks import Ranks
from tests.package import checkpoints

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 20, "warmup_type": "linear"},
}
BEFORE, AFTER = 4, 6


def trial_class(width: int = 4, *, more: bool = False) -> Any:
    from determined_ds import DataParallelTrial

    class Two(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            layers = [torch.nn.Linear(4, width), torch.nn.Linear(width, 2)]
            return torch.nn.Sequential(*layers, *([torch.nn.Linear(2, 2)] if more else []))

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return torch.nn.functional.mse_loss(model(inputs), targets)

        def build_training_data_loader(self) -> Any:
            inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
            return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs[:, :2]))

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(
                torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
            )

    return Two


def train(
    run_dir: str, ds_config: dict[str, Any], batches: int, resume: str | None = None, **trial: Any
) -> dict[str, Any]:
    """In a rank: train; what was loaded, and the uuid of the last checkpoint."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        built = trial_class(**trial)(context)
        try:
            Trainer(built, context).fit(
                max_length=Batch(batches), reporting_period=Batch(1), latest_checkpoint=resume
            )
        except ConfigError as error:
            return {"error": str(error)}
        [group] = built.engine.optimizer.param_groups
        group = {key: value for key, value in group.items() if key != "params"}
        clip_grad = getattr(built.engine.optimizer, "clip_grad", None)
    return {"uuid": checkpoints(Path(run_dir))[0].name, "group": group, "clip_grad": clip_grad}


def weights(run_dir: Path, uuid: str) -> dict[str, torch.Tensor]:
    return load_state_dict_from_checkpoint_path(run_dir / "checkpoints" / uuid)


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "optimizer": ADAM, **more}


def changed(ds_config: dict[str, Any], section: str, **params: Any) -> dict[str, Any]:
    other = copy.deepcopy(ds_config)
    other[section]["params"].update(params)
    return other


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("scheduler", [None, WARMUP], ids=["no scheduler", "WarmupLR"])
def test_a_new_learning_rate_is_the_one_of_the_next_step(
    stage: int, scheduler: dict[str, Any] | None, two_ranks: Ranks, tmp_path: Path, metrics_of: Any
) -> None:
    """At a rate of 0 no weight moves: of the first step on, it is what the optimizer really uses."""
    ds_config = config(stage, **({"scheduler": scheduler} if scheduler else {}))
    [first, _] = two_ranks.run(train, str(tmp_path), ds_config, BEFORE)
    still = (
        changed(ds_config, "scheduler", warmup_max_lr=0.0)
        if scheduler
        else changed(ds_config, "optimizer", lr=0.0)
    )
    [second, _] = two_ranks.run(train, str(tmp_path), still, AFTER, first["uuid"])
    assert [report["lr"] for report in metrics_of(tmp_path, "training")][BEFORE:] == [0.0] * (AFTER - BEFORE)
    before, after = weights(tmp_path, first["uuid"]), weights(tmp_path, second["uuid"])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


SCHEDULES = {
    "WarmupLR": (WARMUP["params"], {"warmup_max_lr": 0.02, "warmup_num_steps": 10}),
    "StepLR": ({"step_size": 3, "gamma": 0.5}, {"gamma": 0.1}),
    "MultiStepLR": ({"milestones": [2, 5], "gamma": 0.5}, {"milestones": [3, 5]}),
    "CosineAnnealingLR": ({"T_max": 10}, {"T_max": 20}),
    "OneCycleLR": ({"max_lr": 0.05, "total_steps": AFTER}, {"total_steps": 2 * AFTER}),
}
LONG = pytest.mark.long("the same schedule as under ZeRO 1")


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("WarmupLR", 1), pytest.param("WarmupLR", 3, marks=LONG), *((kind, 0) for kind in SCHEDULES)],
)
def test_a_schedule_goes_on_by_its_new_settings(
    kind: str, stage: int, two_ranks: Ranks, tmp_path: Path, metrics_of: Any
) -> None:
    """As if it had been so from the beginning: the rates are those of a run with the new settings."""
    params, new = SCHEDULES[kind]
    before = config(stage, scheduler={"type": kind, "params": params})
    after = changed(changed(before, "scheduler", **new), "optimizer", lr=0.02)
    [first, _] = two_ranks.run(train, str(tmp_path / "run"), before, BEFORE)
    two_ranks.run(train, str(tmp_path / "run"), after, AFTER, first["uuid"])
    two_ranks.run(train, str(tmp_path / "whole"), after, AFTER)
    run, whole = (
        [report["lr"] for report in metrics_of(tmp_path / name, "training")] for name in ("run", "whole")
    )
    assert run[BEFORE:] == pytest.approx(whole[BEFORE:])
    assert run[:BEFORE] != whole[:BEFORE]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_other_settings_of_the_optimizer_and_clipping(stage: int, two_ranks: Ranks, tmp_path: Path) -> None:
    ds_config = config(stage, gradient_clipping=1.0)
    [first, _] = two_ranks.run(train, str(tmp_path), ds_config, BEFORE)
    other = changed(ds_config, "optimizer", weight_decay=0.1, betas=[0.8, 0.9], eps=1e-6)
    [second, _] = two_ranks.run(
        train, str(tmp_path), {**other, "gradient_clipping": 0.5}, AFTER, first["uuid"]
    )
    group = second["group"]
    assert (group["weight_decay"], tuple(group["betas"]), group["eps"]) == (0.1, (0.8, 0.9), 1e-6)
    assert group["lr"] == 0.01
    assert second["clip_grad"] in ((0.5,) if stage else (None,))


def test_a_schedule_that_cannot_change_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    params = {"T_0": 5}
    ds_config = config(0, scheduler={"type": "CosineAnnealingWarmRestarts", "params": params})
    [first] = one_rank.run(train, str(tmp_path), ds_config, BEFORE)
    [second] = one_rank.run(
        train, str(tmp_path), changed(ds_config, "scheduler", T_0=7), AFTER, first["uuid"]
    )
    assert (
        "scheduler = 'CosineAnnealingWarmRestarts': computes each rate from the one before" in second["error"]
    )
    assert "T_0" in second["error"]


# ------------------------------------------------------------------------------------------ another model


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        ({"width": 6}, "0.weight has shape (4, 4) in it, and (6, 4) in this model"),
        ({"more": True}, "it has no 2.weight (2, 2)"),
    ],
    ids=["width", "layers"],
)
def test_a_checkpoint_of_another_model_is_refused_in_a_message(
    stage: int, trial: dict[str, Any], reason: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Before anything is loaded, on all ranks alike; under ZeRO 3, DeepSpeed itself might load it without a word."""
    [first, _] = two_ranks.run(train, str(tmp_path), config(stage), 1)
    found = two_ranks.run(train, str(tmp_path), config(stage), AFTER, first["uuid"], **trial)
    for rank in found:
        assert rank["error"].startswith(f"checkpoint = '{first['uuid']}': does not fit this model")
        assert reason in rank["error"]
        assert "fix: " in rank["error"]
