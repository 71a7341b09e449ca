"""Steps recorded in an ordinary training: it stays the same to the bit, and the parts add up to the loop's clock."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks
from tests.package import profile_of
from tests.trial.regression import train, trial_class

PROFILE = {"wait": 2, "warmup": 1, "active": 3}
# Three products of matrices for each layer, and no gradient of the inputs.
LINEAR = 16 * 2 * (3 * (4 * 64 + 6 * 64 * 64 + 64 * 1) - 4 * 64)
SAMPLES, TOKENS, LAYERS, WIDTH, WORDS = 2, 128, 2, 64, 256
# 6 x parameters in matrices x tokens, and 12 x layers x width x tokens x sequence length for attention.
TRANSFORMER = SAMPLES * TOKENS * (6 * (12 * LAYERS * WIDTH**2 + WORDS * WIDTH) + 12 * LAYERS * WIDTH * TOKENS)


def recorded(run_dir: Path, profile: Any, zero_stage: int = 1) -> tuple[list[float], bool]:
    """Train in this rank. Returns the losses, and whether DeepSpeed's engine is left as it was."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from determined.pytorch import Batch

    losses: list[float] = []

    def build_model(self: Any) -> Any:
        wide = [torch.nn.Linear(64, 64) for _ in range(6)]
        layers = [torch.nn.Linear(4, 64), *wide, torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)]
        return torch.nn.Sequential(*layers)

    def loss(self: Any, model: Any, batch: Any) -> Any:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    def patched() -> list[Any]:
        return [getattr(DeepSpeedEngine, name) for name in ("forward", "backward", "step")]

    mine = trial_class(
        build_model=build_model,
        loss=loss,
        on_step_end=lambda self, batch_idx, metrics: losses.append(float(metrics["loss"])),
    )
    ds_config = {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    hparams = {"global_batch_size": 16, "deepspeed_config": ds_config}
    fit = {"checkpoint_policy": "none", "validation_period": Batch(4), "profile": profile}
    before = patched()
    train(run_dir, mine, hparams, steps=8, **fit)
    return losses, before == patched()


def assert_adds_up(profile: dict[str, Any]) -> None:
    """Parts against the clock of the loop: the median, as a rank may be put off between the two."""
    steps = [step for rank in profile["ranks"] for step in rank["steps"]]
    ratios = [sum(step["seconds"].values()) / step["clock_s"] for step in steps]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)


def test_losses_are_those_of_a_training_that_is_not_recorded(one_rank: Ranks, tmp_path: Path) -> None:
    [(plain, _)] = one_rank.run(recorded, tmp_path / "plain", None)
    [(found, unpatched)] = one_rank.run(recorded, tmp_path / "profiled", PROFILE)
    assert len(plain) == 8
    assert found == plain
    assert unpatched
    assert not (tmp_path / "plain" / "profile").exists()
    profile = profile_of(tmp_path / "profiled")
    [rank] = profile["ranks"]
    assert [step["batch"] for step in rank["steps"]] == [4, 5, 6]
    assert_adds_up(profile)
    assert all(rank["seconds"][part] > 0 for part in ("data", "forward", "backward", "optimizer"))
    assert rank["seconds"]["pipeline"] == rank["seconds"]["idle"] == 0
    assert rank["flops"] == LINEAR
    assert 0 < profile["mfu"] < 1


def test_two_ranks_wait_for_their_collectives(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(recorded, tmp_path, PROFILE, 3)
    profile = profile_of(tmp_path)
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 1]
    assert_adds_up(profile)
    assert all(rank["seconds"]["communication"] > 0 for rank in profile["ranks"])


def recorded_transformer(run_dir: Path) -> None:
    """In a rank: GPT-2 of two layers, a sample a micro-batch."""
    import transformers

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "vocab_size": WORDS, "n_positions": TOKENS}

    def build_model(self: Any) -> Any:
        config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, attn_implementation="sdpa")
        model = transformers.GPT2LMHeadModel(config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def build_data_loader(self: Any) -> Any:
        return self.training_loader(torch.zeros(64, TOKENS, dtype=torch.long))

    mine = trial_class(
        build_model=build_model,
        loss=lambda self, model, batch: model(input_ids=batch, labels=batch).loss,
        build_training_data_loader=build_data_loader,
        build_validation_data_loader=build_data_loader,
    )
    ds_config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    hparams = {"global_batch_size": SAMPLES, "deepspeed_config": ds_config}
    train(run_dir, mine, hparams, steps=5, checkpoint_policy="none", profile={**PROFILE, "active": 1})


def test_a_transformers_step_has_the_operations_of_the_formula(one_rank: Ranks, tmp_path: Path) -> None:
    """What is computed again, by checkpointing or fused attention, is no work of the model."""
    one_rank.run(recorded_transformer, tmp_path)
    assert profile_of(tmp_path)["ranks"][0]["flops"] == TRANSFORMER
