"""What cannot be trained is rejected before training, with the key and a fix; documents are kept apart where asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from determined_ds.errors import Problem
from model_defs.causal_lm.config import check_fit, find_model, read_config
from model_defs.causal_lm.lora import LoraOptions, parse_lora, with_lora
from model_defs.causal_lm.model import build_model, check_masks, positions_in_documents
from tests.harness.ranks import Ranks
from tests.model_defs.causal_lm import tiny
from tests.package import refusal, refusals


def build(folder: Path, zero3: dict[str, Any] | None = None) -> Any:
    config = read_config(str(folder), None, vocab_size=256)
    return build_model(config, str(folder), seed=0, dtype=torch.float32, zero3=zero3)


# ------------------------------------------------------------------------------------- where it is


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    found = [
        refusal(lambda: find_model({"model": nowhere})),
        refusal(lambda: read_config(str(tmp_path), None, vocab_size=256)),
    ]
    assert [(each.key, each.value) for each in found] == [
        ("hyperparameters.model", nowhere),
        ("hyperparameters.model", str(tmp_path)),
    ]
    for both_or_none in ({}, {"model": "gpt2", "model_config": tiny.MODEL_CONFIG}):
        message = refusal(lambda given=both_or_none: find_model(given)).message
        assert message == "one of model and model_config must be given."


# -------------------------------------------------------------------------------- the configuration


@pytest.mark.parametrize(
    ("model_config", "below", "fix"),
    [
        ({"model_type": "lama"}, "", "llama"),
        ({"hidden_size": 32}, "", "model_type"),
        ({"model_type": "llama", "hidden_sise": 3}, ".hidden_sise", "hidden_size"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "", "sizes"),
        ({"model_type": "vit"}, "", "llama"),
    ],
)
def test_a_configuration_that_is_none(model_config: dict[str, Any], below: str, fix: str) -> None:
    found = refusal(lambda: read_config(None, model_config, vocab_size=256))
    assert found.key == f"hyperparameters.model_config{below}"
    assert fix in found.fix


def test_a_vocabulary_and_sequences_that_do_not_fit() -> None:
    config = read_config(None, {**tiny.MODEL_CONFIG, "vocab_size": 100}, vocab_size=256)
    found = refusal(lambda: check_fit(config, vocab_size=256, sequence_length=64, tokenizer="bytes"))
    assert "model_config.vocab_size: 256" in found.fix
    found = refusal(lambda: check_fit(config, vocab_size=100, sequence_length=65, tokenizer="bytes"))
    assert found.fix == "sequence_length: 64 or less"


# --------------------------------------------------------------------------------------- its weights


def other_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


def missing(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


DAMAGES = {
    other_shapes: ("mlp", "48"),
    missing: ("model.layers.1.mlp.up_proj.weight", "missing"),
    cut_short: ("",),
}


def refused_in_rank(folder: Path) -> list[Problem]:
    """Of a rank that loads the weights whole, and under ZeRO 3."""
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    zero3 = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    return [refusal(lambda how=how: build(folder, how)) for how in (None, zero3)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_rank_refuses_weights_that_do_not_load(damage: Any, two_ranks: Ranks, tmp_path: Path) -> None:
    damage(tiny.saved_model(tmp_path))
    for found in two_ranks.run(refused_in_rank, tmp_path):
        for problem in found:
            assert problem.key == "hyperparameters.model"
            assert all(word in problem.message for word in DAMAGES[damage])


# --------------------------------------------------------------------------------------------- LoRA


def test_the_options_of_lora() -> None:
    """A search has the targets beside it: a master draws two of one mapping in random order."""
    assert parse_lora({}) is None
    assert parse_lora({"lora": {"target_modules": None}}) == LoraOptions()
    assert parse_lora({"lora": {"target_modules": "q_proj"}}) == LoraOptions(target_modules=["q_proj"])
    assert parse_lora({"lora": {"r": 4}, "target_modules": ["q_proj"]}) == LoraOptions(
        r=4, target_modules=["q_proj"]
    )
    wrong = {"r": 0, "alpha": "x", "dropout": 1, "rank": 8, "target_modules": 3}
    found = refusals(lambda: parse_lora({"lora": wrong}))
    assert {problem.key for problem in found} == {f"hyperparameters.lora.{name}" for name in wrong}
    assert refusal(lambda: parse_lora({"lora": True})).key == "hyperparameters.lora"
    model = transformers.AutoModelForCausalLM.from_config(
        read_config(None, tiny.MODEL_CONFIG, vocab_size=256)
    )
    nowhere = LoraOptions(target_modules=["q_proj", "v_prog"])
    problem = refusal(lambda: with_lora(model, nowhere, seed=0))
    assert (problem.value, "v_proj" in problem.fix) == ("v_prog", True)
    twice = {"lora": {"target_modules": "all-linear"}, "target_modules": ["q_proj"]}
    for given in ({"target_modules": "all-linear"}, twice):
        assert refusal(lambda given=given: parse_lora(given)).key == "hyperparameters.target_modules"


# --------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "qwen3", "phi3", "gemma2"])
def test_isolated_documents_see_nothing_of_each_other(model_type: str) -> None:
    torch.manual_seed(0)
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    sizes = {**tiny.SIZES, "vocab_size": 64, "head_dim": 8, "pad_token_id": None, "eos_token_id": None}
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, bos_token_id=None)).eval()
    check_masks(model, isolated=True)
    tokens_BT = torch.randint(1, 64, (2, 12))
    tokens_BT[:, 5] = 0  # two documents in each row
    positions_BT = positions_in_documents(tokens_BT, 0)
    with torch.no_grad():
        packed = model(tokens_BT, position_ids=positions_BT, use_cache=False).logits
        alone = model(tokens_BT[:, 6:], use_cache=False).logits
        across = model(tokens_BT, use_cache=False).logits
    assert torch.allclose(packed[:, 6:], alone, atol=1e-5)
    assert torch.allclose(packed[:, :6], across[:, :6], atol=1e-5)
    assert not torch.allclose(across[:, 6:], alone, atol=1e-3)


def test_a_model_whose_masks_know_no_documents_is_refused() -> None:
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)
    model = transformers.BloomForCausalLM(config)
    found = refusal(lambda: check_masks(model, isolated=True))
    assert "attend_across_documents" in f"{found.key} {found.fix}"
