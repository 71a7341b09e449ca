"""What cannot be trained is rejected before training, with a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from determined_ds.errors import ConfigError, Problem
from model_defs.causal_lm.config import check_fit, find_model, read_config
from model_defs.causal_lm.lora import LoraOptions, lora_section, parse_lora, with_lora
from model_defs.causal_lm.model import build_model
from model_defs.causal_lm.source import Source, locate
from tests.model_defs.causal_lm import tiny
from tests.ranks import Ranks


def refusal(function: Any, *args: Any, **kwargs: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    (problem,) = caught.value.problems
    assert problem.fix
    return problem


def build(folder: Path, zero3: dict[str, Any] | None = None) -> Any:
    source = Source(name=str(folder))
    config = read_config(source, None, vocab_size=256)
    return build_model(config, source, seed=0, dtype=torch.float32, zero3=zero3)


# ------------------------------------------------------------------------------------- where it is


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such folder" in refusal(locate, str(tmp_path / "nowhere")).message


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    assert "no config.json" in refusal(locate, str(tmp_path)).message


def test_a_name_while_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: None)
    problem = refusal(locate, "some-owner/some-model")
    assert "the Hugging Face hub cannot be reached (ConnectionError)" in problem.message
    assert "hf download some-owner/some-model" in problem.fix
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: "there/config.json")
    assert locate("some-owner/some-model").local_files_only


def test_neither_or_both_ways_to_say_the_model() -> None:
    assert "neither model nor model_config is given" in refusal(find_model, {}).message
    both = {"model": "x", "model_config": tiny.MODEL_CONFIG}
    assert "leave out model_config" in refusal(find_model, both).fix


# -------------------------------------------------------------------------------- the configuration


@pytest.mark.parametrize(
    ("model_config", "key", "fix"),
    [
        ({"model_type": "lama"}, "hyperparameters.model_config.model_type", "llama"),
        ({"hidden_size": 32}, "hyperparameters.model_config", "model_type"),
        (
            {"model_type": "llama", "hidden_sise": 3},
            "hyperparameters.model_config.hidden_sise",
            "hidden_size",
        ),
        (
            {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4},
            "hyperparameters.model_config",
            "sizes",
        ),
        ({"model_type": "vit"}, "hyperparameters.model_config", "llama"),
    ],
)
def test_a_configuration_that_is_none(model_config: dict[str, Any], key: str, fix: str) -> None:
    problem = refusal(read_config, None, model_config, vocab_size=256)
    assert problem.key == key
    assert fix in problem.fix


def test_a_model_that_is_no_language_model(tmp_path: Path) -> None:
    transformers.ViTConfig().save_pretrained(tmp_path)
    problem = refusal(read_config, Source(name=str(tmp_path)), None, vocab_size=256)
    assert "no causal language model of the type 'vit'" in problem.message


def test_a_vocabulary_and_sequences_that_do_not_fit() -> None:
    config = read_config(None, {**tiny.MODEL_CONFIG, "vocab_size": 100}, vocab_size=256)
    with pytest.raises(ConfigError) as caught:
        check_fit(config, vocab_size=256, sequence_length=65, tokenizer="bytes")
    vocabulary, length = caught.value.problems
    assert vocabulary.message == "has 256 tokens, and the model's vocabulary 100."
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


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_do_not_load(damage: Any, tmp_path: Path) -> None:
    damage(tiny.saved_model(tmp_path))
    problem = refusal(build, tmp_path)
    assert problem.key == "hyperparameters.model"
    assert all(word in problem.message for word in DAMAGES[damage])


def refused_in_rank(folder: Path) -> str:
    from determined_ds.config.accelerator import Accelerator
    from determined_ds.runtime.group.distributed import join_process_group

    join_process_group(Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False))
    return str(refusal(build, folder, {"train_batch_size": 2, "zero_optimization": {"stage": 3}}))


@pytest.mark.parametrize("damage", DAMAGES)
def test_under_zero_3_every_rank_refuses_them(damage: Any, two_ranks: Ranks, tmp_path: Path) -> None:
    damage(tiny.saved_model(tmp_path))
    messages = two_ranks.run(refused_in_rank, tmp_path)
    for message in messages:
        assert all(word in message for word in DAMAGES[damage])


# --------------------------------------------------------------------------------------------- LoRA


def test_targets_that_match_nothing_and_the_nearest_that_exist() -> None:
    config = read_config(None, tiny.MODEL_CONFIG, vocab_size=256)
    model = transformers.AutoModelForCausalLM.from_config(config)
    problem = refusal(with_lora, model, LoraOptions(target_modules=["q_proj", "v_prog"]), seed=0)
    assert problem.value == "v_prog"
    assert problem.message == "no matrix of LlamaForCausalLM has this name."
    assert "v_proj" in problem.fix
    assert "gate_proj" in refusal(with_lora, model, LoraOptions(target_modules=["zzz"]), seed=0).fix


def test_the_options_of_lora() -> None:
    assert parse_lora(None) is None
    assert parse_lora({"target_modules": None}) == LoraOptions()
    assert parse_lora({"target_modules": "q_proj"}) == LoraOptions(target_modules=["q_proj"])
    with pytest.raises(ConfigError) as caught:
        parse_lora({"r": 0, "alpha": "x", "dropout": 1, "rank": 8, "target_modules": 3})
    assert sorted(problem.key for problem in caught.value.problems) == [
        f"hyperparameters.lora.{name}" for name in ("alpha", "dropout", "r", "rank", "target_modules")
    ]
    assert refusal(parse_lora, True).fix == "lora: {r: 8, alpha: 16}"


def test_the_targets_of_lora_may_stand_beside_it() -> None:
    """So a search has them at the top level: a master draws two of one mapping in random order."""
    beside = {"lora": {"r": 4}, "target_modules": ["q_proj"]}
    assert lora_section(beside) == {"r": 4, "target_modules": ["q_proj"]}
    assert lora_section({"lora": {"r": 4}}) == {"r": 4}
    assert lora_section({}) is None
    alone = refusal(lora_section, {"target_modules": "all-linear"})
    assert (alone.key, alone.fix) == ("hyperparameters.target_modules", "lora: {r: 8, alpha: 16}")
    twice = {"lora": {"target_modules": "all-linear"}, "target_modules": ["q_proj"]}
    assert "differs from lora.target_modules = all-linear" in refusal(lora_section, twice).message


# ----------------------------------------------------------------------------- through the real entry
