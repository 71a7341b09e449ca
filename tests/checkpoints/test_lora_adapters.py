"""An export of any kind of LoRA is what peft itself writes, and with ``--merge-lora`` what peft merges, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers

from tests.checkpoints.command import succeeded
from tests.checkpoints.making import made
from tests.model_defs.causal_lm import tiny

KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "rank of its own": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}},
}
SIZES = {**tiny.SIZES, "vocab_size": 64}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
TRIAL = """
import peft, torch, transformers
from determined_ds import DataParallelTrial

class Adapted(DataParallelTrial):
    def build_model(self):
        hparams = self.context.get_hparams()
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hparams["sizes"]))
        model = model.to(getattr(torch, hparams["dtype"]))
        return peft.get_peft_model(model, peft.LoraConfig(**hparams["lora"]), autocast_adapter_dtype=False)

    loss = build_training_data_loader = build_validation_data_loader = None  # an export calls none of them
"""
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # by peft, of names of transformers'


def adapted(lora: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model whose adapters change it."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype)
    found = peft.get_peft_model(model, peft.LoraConfig(**lora), autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return found


def exported(model: Any, lora: dict[str, Any], dtype: torch.dtype, folder: Path, *options: str) -> Any:
    """The tensors of an export of a checkpoint that holds the model."""
    (folder / "code").mkdir()
    (folder / "code/adapted_trial.py").write_text(TRIAL)
    hparams = {"global_batch_size": 8, "deepspeed_config": {}, "sizes": SIZES, "lora": lora}
    hparams["dtype"] = str(dtype).removeprefix("torch.")
    loaded = {"trial_cls_spec": "adapted_trial:Adapted", "hparams": hparams, "experiment_config": {}}
    tensors = {
        name: {"weight": (TYPES[dtype], tensor.float().numpy())}
        for name, tensor in model.state_dict().items()
    }
    path = made(folder / "uuid", tensors, ranks=2, files={"load_data.json": json.dumps(loaded)})
    where = ["--context-dir", str(folder / "code"), "--output", str(folder / "out")]
    succeeded("export", path, "--to", "huggingface", *where, *options)
    (file,) = (folder / "out").glob("*.safetensors")
    return safetensors.torch.load_file(file)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_peft_merges(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    lora = {**LORA, **KINDS[kind]}
    model = adapted(lora, dtype)
    found = exported(model, lora, dtype, tmp_path, "--merge-lora")
    assert same(found, model.merge_and_unload().state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_what_peft_writes(kind: str, tmp_path: Path) -> None:
    lora = {**LORA, **KINDS[kind]}
    model = adapted(lora, torch.float32)
    found = exported(model, lora, torch.float32, tmp_path)
    model.save_pretrained(tmp_path / "by_peft", save_embedding_layers=False)
    assert same(found, safetensors.torch.load_file(tmp_path / "by_peft/adapter_model.safetensors"))
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "out"))
    assert (config.peft_type, config.r) == ("LORA", 4)
