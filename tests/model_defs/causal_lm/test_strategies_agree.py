"""ZeRO changes how a model, or a LoRA of one, is trained and built, and nothing of what is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.ranks import Ranks
from tests.model_defs.causal_lm import tiny

# Relative. fp32 sums in another order differ by about 1e-6 of a loss.
TOLERANCE = 1e-4
LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model to start from."""
    return tiny.saved_model(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("kind", ["at random", "loaded", "lora"])
def test_losses_agree(kind: str, two_ranks: Ranks, data: dict[str, Any], base: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {} if kind == "at random" else {"model": str(base)}
    if kind == "lora":
        more["lora"] = LORA
    curves = {}
    for stage in range(4):
        # One of them computes blocks again going backward, which changes nothing either.
        hparams = tiny.hyperparameters(stage, **more, activation_checkpointing=stage == 3)
        two_ranks.run(tiny.train, tmp_path / str(stage), hparams, data)
        curves[stage] = tiny.curve(tmp_path / str(stage))
    assert len(curves[0]) == 17
    assert curves[0][-1] < curves[0][0]
    for stage in (1, 2, 3):
        assert curves[stage] == pytest.approx(curves[0], rel=TOLERANCE), f"ZeRO {stage}"


# ------------------------------------------------------------------------------------------ partitions


def parameters_as_built(folder: str | None) -> dict[str, Any]:
    """In each rank: how a model is held before there is an engine."""
    import deepspeed

    from model_defs.causal_lm import config, model

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found = config.read_config(folder, tiny.MODEL_CONFIG, vocab_size=256)
    ds_config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    built = model.build_model(found, folder, seed=1, dtype=torch.float32, zero3=ds_config)
    return {name: (p.numel(), p.ds_tensor.numel()) for name, p in built.named_parameters()}


@pytest.mark.parametrize("loaded", [False, True])
def test_under_zero_3_no_rank_holds_the_model(loaded: bool, two_ranks: Ranks, base: Path) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(base).num_parameters()
    for held in two_ranks.run(parameters_as_built, str(base) if loaded else None):
        assert {numel for numel, _ in held.values()} == {0}, "each is a placeholder"
        assert sum(share for _, share in held.values()) == pytest.approx(whole / 2, rel=0.01)
