"""What cannot be trained is rejected before training, with the key and a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from determined_ds.errors import Problem
from model_defs.causal_lm.config import check_fit, read_config
from model_defs.causal_lm.lora import LoraOptions, lora_section, parse_lora, with_lora
from model_defs.causal_lm.model import build_model
from model_defs.causal_lm.source import Source, locate
from tests.harness.ranks import Ranks
from tests.model_defs.causal_lm import tiny
from tests.package import refusal, refusals


def build(folder: Path, zero3: dict[str, Any] | None = None) -> Any:
    source = Source(name=str(folder))
    config = read_config(source, None, vocab_size=256)
    return build_model(config, source, seed=0, dtype=torch.float32, zero3=zero3)


# ------------------------------------------------------------------------------------- where it is


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        found = refusal(lambda folder=folder: locate(str(folder)))
        assert (found.key, found.value) == ("hyperparameters.model", str(folder))


def test_a_name_while_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: None)
    assert "hf download some-owner/some-model" in refusal(lambda: locate("some-owner/some-model")).fix
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: "there/config.json")
    assert locate("some-owner/some-model").local_files_only


# -------------------------------------------------------------------------------- the configuration


@pytest.mark.parametrize(
    ("model_config", "below", "fix"),
    [
        ({"model_type": "lama"}, ".model_type", "llama"),
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
    vocabulary, length = refusals(
        lambda: check_fit(config, vocab_size=256, sequence_length=65, tokenizer="bytes")
    )
    assert "model_config.vocab_size: 256" in vocabulary.fix
    assert length.fix == "sequence_length: 64 or less"


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


def none(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


DAMAGES = {
    other_shapes: ("mlp", "48"),
    missing: ("model.layers.1.mlp.up_proj.weight", "missing"),
    cut_short: ("",),
    none: ("model.safetensors",),
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


def test_targets_that_match_nothing_and_the_nearest_that_exist() -> None:
    config = read_config(None, tiny.MODEL_CONFIG, vocab_size=256)
    model = transformers.AutoModelForCausalLM.from_config(config)
    options = LoraOptions(target_modules=["q_proj", "v_prog"])
    found = refusal(lambda: with_lora(model, options, seed=0))
    assert (found.value, "v_proj" in found.fix) == ("v_prog", True)


def test_the_options_of_lora() -> None:
    assert parse_lora(None) is None
    assert parse_lora({"target_modules": None}) == LoraOptions()
    assert parse_lora({"target_modules": "q_proj"}) == LoraOptions(target_modules=["q_proj"])
    wrong = {"r": 0, "alpha": "x", "dropout": 1, "rank": 8, "target_modules": 3}
    found = refusals(lambda: parse_lora(wrong))
    assert {problem.key for problem in found} == {f"hyperparameters.lora.{name}" for name in wrong}
    assert refusal(lambda: parse_lora(True)).fix == "lora: {r: 8, alpha: 16}"


def test_the_targets_of_lora_may_stand_beside_it() -> None:
    """So a search has them at the top level: a master draws two of one mapping in random order."""
    beside = {"lora": {"r": 4}, "target_modules": ["q_proj"]}
    assert lora_section(beside) == {"r": 4, "target_modules": ["q_proj"]}
    assert lora_section({"lora": {"r": 4}}) == {"r": 4}
    assert lora_section({}) is None
    twice = {"lora": {"target_modules": "all-linear"}, "target_modules": ["q_proj"]}
    for wrong in ({"target_modules": "all-linear"}, twice):
        found = refusal(lambda wrong=wrong: lora_section(wrong))
        assert found.key.endswith("target_modules")
