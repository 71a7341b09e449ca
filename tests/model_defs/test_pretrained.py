"""Every model starts from a Hugging Face checkpoint, or says what is wrong with it: nothing is drawn in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from model_defs.causal_lm.config import check_fit, check_sliced, read_config
from model_defs.causal_lm.model import check_masks
from model_defs.common.classifier import build_classifier, classifier_config
from model_defs.gpt2 import model as gpt2
from model_defs.gpt2.pretrained import load_pretrained
from model_defs.vit import model as vit
from tests.model_defs import tiny
from tests.package import refusal

CLASSES = ["bread", "cake", "tea"]


def built_vit(source: Path | None, classes: list[str] = CLASSES, seed: int = 3) -> Any:
    options = vit.Options(pretrained=source and str(source))
    config = classifier_config(transformers.ViTConfig, options, classes, **vit.MODEL_SIZES["tiny"])
    kind = transformers.ViTForImageClassification
    return build_classifier(kind, options, config, head=vit.HEAD, seed=seed)


def loaded_gpt2(source: Path) -> Any:
    """Into the whole model, and into its layers."""
    config = gpt2.gpt2_config(gpt2.Options(sequence_length=16), num_tokens=61)
    layers = nn.ModuleList(spec.build() for spec in gpt2.pipeline_layers(config)[:-1])
    for model in (gpt2.GPT2(config), layers):
        load_pretrained(model, str(source))
        yield model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: a ViT of other classes, a GPT-2 in shards."""
    torch.manual_seed(5)
    folders = {name: tmp_path_factory.mktemp(name) for name in ("vit", "gpt2")}
    built_vit(None, ["one", "two"], seed=8).save_pretrained(folders["vit"])
    of_gpt2 = gpt2.gpt2_config(gpt2.Options(sequence_length=16), num_tokens=61)
    transformers.GPT2LMHeadModel(of_gpt2).save_pretrained(folders["gpt2"], max_shard_size="500KB")
    return folders


def test_a_checkpoint_of_another_task_keeps_its_body_and_gets_a_new_head(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    model, again = built_vit(saved["vit"], seed=1), built_vit(saved["vit"], seed=1)
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert torch.equal(model.classifier.weight, again.classifier.weight)
    model.save_pretrained(tmp_path)
    trained = load_file(saved["vit"] / "model.safetensors")
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        is_head = name.startswith("classifier.")
        assert tensor.shape[0] == 3 if is_head else torch.equal(tensor, trained[name]), name


def test_gpt2_in_shards_and_by_its_first_names(saved: dict[str, Path], tmp_path: Path) -> None:
    """As it was first published: no prefix, and the causal mask among the tensors."""
    trained = transformers.GPT2LMHeadModel.from_pretrained(saved["gpt2"])
    trained.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    first = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    first["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    save_file(first, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for source in (saved["gpt2"], tmp_path):
        for model in loaded_gpt2(source):
            for name, parameter in gpt2.parameters_by_huggingface_name(model).items():
                assert torch.equal(parameter, trained.state_dict()[name]), name


@pytest.mark.parametrize(
    ("kind", "name", "wrong", "said"),
    [
        ("vit", "vit.encoder.layer.2.intermediate.dense.bias", None, "vit.layers.2.mlp.fc1.bias is missing"),
        ("gpt2", "transformer.ln_f.bias", torch.ones(5), "has the shape (5,), and (128,)"),
    ],
)
def test_weights_of_another_shape_or_missing_are_named(
    kind: str, name: str, wrong: Any, said: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((saved[kind] / "config.json").read_text())
    tensors: dict[str, Any] = {}
    for file in saved[kind].glob("*.safetensors"):
        tensors |= load_file(file)
    del tensors[name]
    more = {} if wrong is None else {name: wrong}
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = refusal(lambda: built_vit(tmp_path) if kind == "vit" else list(loaded_gpt2(tmp_path)))
    assert said in found.message


def test_what_would_train_otherwise_is_refused() -> None:
    config = read_config(None, {**tiny.MODEL_CONFIG, "vocab_size": 100}, vocab_size=256)
    found = refusal(lambda: check_fit(config, vocab_size=256, sequence_length=64))
    assert "model_config.vocab_size: 256" in found.fix
    windowed = transformers.MistralConfig(sliding_window=31)
    assert refusal(lambda: check_sliced(windowed, 32)).key == "hyperparameters.sequence_length"
    with torch.device("meta"):
        own_masks = transformers.BloomForCausalLM(transformers.BloomConfig())
    assert refusal(lambda: check_masks(own_masks)).key == "hyperparameters.sequence_parallel_size"
