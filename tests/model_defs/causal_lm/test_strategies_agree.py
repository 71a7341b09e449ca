"""ZeRO changes how a model, or a LoRA of one, is trained and built, and nothing of what is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

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


class OtherGenerator(TorchDispatchMode):
    """What is drawn into a tensor of 16 bits is drawn by a device with a generator of its own, as a GPU has one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("normal_", "uniform_") and result.dtype == torch.bfloat16:
            result.add_(1)
        return result


def weights_to_start_from(run_dir: Path, stage: int, data: dict[str, Any]) -> dict[str, str]:
    """In each rank: the weights of an engine that has trained nothing, by a digest of each."""
    import hashlib

    import deepspeed

    from determined_ds import open_context
    from model_defs.causal_lm.trial import CausalLMTrial

    hparams = tiny.hyperparameters(stage)
    hparams["overwrite_deepspeed_args"]["bf16"] = {"enabled": True}
    with (
        open_context(hparams=hparams, exp_conf={"data": data}, run_dir=run_dir, accelerator="cpu") as context,
        OtherGenerator(),
    ):
        engine = CausalLMTrial(context).engine
        found = {}
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                assert parameter.dtype == torch.bfloat16
                values = parameter.data.float().flatten()
                found[name] = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        return found


def test_every_stage_starts_from_the_same_weights(
    two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    """To the last bit. Under ZeRO 3 they are made on the device and in the engine's precision, and drawn elsewhere."""
    found = [two_ranks.run(weights_to_start_from, tmp_path / str(stage), stage, data) for stage in (0, 2, 3)]
    assert len(found[0][0]) > 10
    for of_ranks in found:
        assert of_ranks == [found[0][0], found[0][0]]
