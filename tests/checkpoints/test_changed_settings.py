"""Settings that change between a checkpoint and the start from it take effect; other models are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds import load_state_dict_from_checkpoint_path
from tests.harness.ranks import Ranks
from tests.package import checkpoints, records
from tests.train.small import fit, linear_trial

BEFORE, AFTER = 4, 6
SCHEDULES = {
    "WarmupLR": (
        {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 20, "warmup_type": "linear"},
        {"warmup_max_lr": 0.02, "warmup_num_steps": 10},
    ),
    "StepLR": ({"step_size": 3, "gamma": 0.5}, {"gamma": 0.1}),
    "OneCycleLR": ({"max_lr": 0.05, "total_steps": AFTER}, {"total_steps": 2 * AFTER}),
    "CosineAnnealingWarmRestarts": ({"T_0": 5}, {"T_0": 7}),
}


def config(stage: int, schedule: str = "", new: dict[str, Any] | None = None, **adam: Any) -> dict[str, Any]:
    """A DeepSpeed JSON; with other parameters of its schedule and of its optimizer."""
    found: dict[str, Any] = {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    found["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0, **adam}}
    if schedule:
        found["scheduler"] = {"type": schedule, "params": {**SCHEDULES[schedule][0], **(new or {})}}
    return found


def train(
    run_dir: Path, ds_config: dict[str, Any], batches: int, resume: Path | None = None, layers: int = 2
) -> dict[str, Any]:
    """In a rank: train, with a report of each batch. Returns the settings of the optimizer at the end."""

    class Deep(linear_trial()):  # type: ignore[misc]
        def build_model(self) -> torch.nn.Module:
            more = [torch.nn.Linear(2, 2) for _ in range(2, layers)]
            return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), *more)

    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    length: dict[str, Any] = {"max_length": ("batches", batches), "reporting_period": ("batches", 1)}
    trial = fit(run_dir, Deep, hparams=hparams, latest_checkpoint=resume and str(resume), **length)
    optimizer = trial.engine.optimizer
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return {**settings, "clip_grad": getattr(optimizer, "clip_grad", None)}


def rates(run_dir: Path) -> dict[int, float]:
    return {batch: metrics["lr"] for batch, metrics in records(run_dir, "training")}


@pytest.fixture(scope="module")
def trained(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``trained(stage, schedule)``: the checkpoint after four batches."""

    @functools.cache
    def checkpoint(stage: int, schedule: str) -> Path:
        run_dir = tmp_path_factory.mktemp("trained")
        two_ranks.run(train, run_dir, config(stage, schedule), BEFORE)
        return checkpoints(run_dir)[0]

    return checkpoint


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["", "WarmupLR"], ids=["no scheduler", "WarmupLR"])
def test_new_settings_are_those_of_the_next_step(
    stage: int, schedule: str, trained: Callable[..., Path], two_ranks: Ranks, tmp_path: Path
) -> None:
    """At a rate of 0 no weight moves: of the first step on, it is what the optimizer really uses."""
    first = trained(stage, schedule)
    adam = {"weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "lr": 0.01 if schedule else 0.0}
    new = config(stage, schedule, {"warmup_max_lr": 0.0}, **adam)
    settings, _ = two_ranks.run(train, tmp_path, {**new, "gradient_clipping": 0.5}, AFTER, first)
    assert rates(tmp_path) == dict.fromkeys(range(BEFORE + 1, AFTER + 1), 0.0)
    before, after = map(load_state_dict_from_checkpoint_path, (first, checkpoints(tmp_path)[0]))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (settings["weight_decay"], [*settings["betas"]], settings["eps"]) == (0.1, [0.8, 0.9], 1e-6)
    assert settings["clip_grad"] == (0.5 if stage else None)


@pytest.mark.parametrize(
    ("schedule", "stage"), [("WarmupLR", 1), ("WarmupLR", 3), *((each, 0) for each in [*SCHEDULES][:-1])]
)
def test_a_schedule_goes_on_by_its_new_settings(
    schedule: str, stage: int, trained: Callable[..., Path], two_ranks: Ranks, tmp_path: Path
) -> None:
    """As if it had been so from the beginning: the rates are those of a run with the new settings."""
    first, after = trained(stage, schedule), config(stage, schedule, SCHEDULES[schedule][1], lr=0.02)
    two_ranks.run(train, tmp_path / "run", after, AFTER, first)
    two_ranks.run(train, tmp_path / "whole", after, AFTER)
    before, run, whole = map(rates, (first.parent.parent, tmp_path / "run", tmp_path / "whole"))
    assert run == pytest.approx({batch: whole[batch] for batch in range(BEFORE + 1, AFTER + 1)})
    assert before != {batch: whole[batch] for batch in before}


def refused(ranks: Ranks, *words: str, arguments: tuple[Any, ...]) -> None:
    """By all ranks, in these words."""
    with pytest.raises(AssertionError) as error:
        ranks.run(train, *arguments)
    assert all(each in str(error.value) for each in (*words, "fix: ")), error.value
    assert "has not ended" not in str(error.value)


def test_a_schedule_that_cannot_change_is_refused(
    trained: Callable[..., Path], two_ranks: Ranks, tmp_path: Path
) -> None:
    schedule = "CosineAnnealingWarmRestarts"
    first, after = trained(0, schedule), config(0, schedule, SCHEDULES[schedule][1])
    words = (f"scheduler = '{schedule}': computes each rate from the one before", "T_0")
    refused(two_ranks, *words, arguments=(tmp_path, after, AFTER, first))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_of_another_model_is_refused_in_a_message(
    stage: int, trained: Callable[..., Path], two_ranks: Ranks, tmp_path: Path
) -> None:
    """Before anything is loaded, on all ranks alike; under ZeRO 3, DeepSpeed itself might load it without a word."""
    first = trained(stage, "")
    words = (f"{first.name}': does not fit this model", "it has no 2.weight (2, 2)")
    refused(two_ranks, *words, arguments=(tmp_path, config(stage), AFTER, first, 3))
    assert not (tmp_path / "metrics.jsonl").exists()
