"""A strategy changes how a step is computed, and nothing of what is computed; what it saves is Hugging Face's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from determined_ds import load_model_from_checkpoint_path
from tests.model_defs.causal_lm import tiny
from tests.ranks import ROOT, Ranks

# Relative. fp32 sums in another order differ by about 1e-6 of a loss.
TOLERANCE = 1e-4
LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    return {"path": tiny.text_file(folder), "tokenizer": "bytes", "validation_fraction": 0.15}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        curves[stage] = [
            *tiny.metrics(tmp_path / str(stage), "training", "loss"),
            *tiny.metrics(tmp_path / str(stage), "validation", "validation_loss"),
        ]
    assert len(curves[0]) == 9
    assert curves[0][-1] < curves[0][0]
    for stage in (1, 2, 3):
        assert curves[stage] == pytest.approx(curves[0], rel=TOLERANCE), f"ZeRO {stage}"


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_trained_loads_in_plain_huggingface(
    stage: int, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    two_ranks.run(tiny.train, tmp_path / "run", tiny.hyperparameters(stage), data, 2)
    model: Any = load_model_from_checkpoint_path(tiny.checkpoint(tmp_path / "run"), context_dir=ROOT)
    model.save_pretrained(tmp_path / "saved")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens_BT = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(plain(tokens_BT).logits, model(tokens_BT).logits)
    assert plain.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_load_in_plain_peft(
    stage: int, two_ranks: Ranks, data: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    import peft

    hparams = tiny.hyperparameters(stage, model=str(base), lora=LORA)
    two_ranks.run(tiny.train, tmp_path / "run", hparams, data, 3)
    checkpoint = tiny.checkpoint(tmp_path / "run")
    model: Any = load_model_from_checkpoint_path(checkpoint, context_dir=ROOT)
    untouched = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokens_BT = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        before = untouched(tokens_BT).logits
        adapted = peft.PeftModel.from_pretrained(untouched, str(checkpoint / "adapter"))
        trained = model(tokens_BT).logits
        assert torch.allclose(adapted(tokens_BT).logits, trained, atol=1e-5)
        assert not torch.allclose(before, trained, atol=1e-3)
        merged = model.merge_and_unload()
        assert type(merged).__name__ == "LlamaForCausalLM"
        assert torch.allclose(merged(tokens_BT).logits, trained, atol=1e-5)


@pytest.mark.parametrize("lora", [None, {**LORA, "dropout": 0.1}], ids=["whole", "lora"])
def test_a_run_goes_on_as_if_it_had_never_stopped(
    lora: Any, two_ranks: Ranks, data: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    hparams = tiny.hyperparameters(3, model=str(base), lora=lora)
    for run, num_batches in (("straight", 5), ("stopped", 3)):
        two_ranks.run(tiny.train, tmp_path / run, hparams, data, num_batches)
    uuid = tiny.checkpoint(tmp_path / "stopped").name
    two_ranks.run(tiny.train, tmp_path / "stopped", hparams, data, 5, uuid)
    losses = tiny.metrics(tmp_path / "stopped", "training", "loss")
    assert losses == tiny.metrics(tmp_path / "straight", "training", "loss")


# ------------------------------------------------------------------------------------------ partitions


def parameters_as_built(folder: str | None) -> dict[str, Any]:
    """In each rank: how a model is held before there is an engine."""
    from determined_ds.config.accelerator import Accelerator
    from determined_ds.runtime.group.distributed import join_process_group
    from model_defs.causal_lm import config, model
    from model_defs.causal_lm.source import Source

    join_process_group(Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False))
    source = None if folder is None else Source(name=folder)
    found = config.read_config(source, tiny.MODEL_CONFIG, vocab_size=256)
    ds_config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    built = model.build_model(found, source, seed=1, dtype=torch.float32, zero3=ds_config)
    return {name: (p.numel(), p.ds_tensor.numel()) for name, p in built.named_parameters()}


@pytest.mark.parametrize("loaded", [False, True])
def test_under_zero_3_no_rank_holds_the_model(loaded: bool, two_ranks: Ranks, base: Path) -> None:
    whole = tiny.num_parameters()
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


def test_weights_are_drawn_on_the_host_and_put_back_where_they_were() -> None:
    """As on a GPU, whose own generator would draw others; here by a precision that the draw would follow."""
    from model_defs.causal_lm.model import on_the_host

    weight, bias = (torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (64, 8))
    places = [parameter.data_ptr() for parameter in (weight, bias)]
    drawn = torch.nn.init.normal_(torch.empty(64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), on_the_host([weight, bias, weight]):
        assert (weight.device.type, weight.dtype) == ("cpu", torch.float32)
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    assert torch.equal(weight, drawn.bfloat16())
    assert torch.equal(bias, torch.ones(8, dtype=torch.bfloat16))
    assert places == [parameter.data_ptr() for parameter in (weight, bias)]
