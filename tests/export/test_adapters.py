"""Adapters of every kind of LoRA merge to the bits that peft's own merge gives, one module at a time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from determined_ds.export.adapters import adapter_of, merged
from determined_ds.export.outgoing import of_tensor
from tests.model_defs.causal_lm import tiny

KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "rank of its own": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}},
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # by peft, of names of transformers'


def adapted(more: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model whose adapters change it."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.SIZES, vocab_size=64)).to(dtype)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **more})
    found = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_peft_merges(kind: str, dtype: torch.dtype) -> None:
    model = adapted(KINDS[kind], dtype)
    weights = {f"model.{name}": of_tensor(tensor.clone()) for name, tensor in model.state_dict().items()}
    found = merged(copy.deepcopy(model).to("meta"), "model.", weights, weights, weights)
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].whole(), tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapters_names_are_those_that_peft_writes(kind: str, tmp_path: Path) -> None:
    import safetensors.torch

    model = adapted(KINDS[kind], torch.float32)
    weights = {name: of_tensor(tensor) for name, tensor in model.state_dict().items()}
    found = adapter_of(copy.deepcopy(model).to("meta"), "", weights)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    expected = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].whole(), tensor) for name, tensor in expected.items())
