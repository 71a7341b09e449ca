"""BERT and ViT from a checkpoint; and what cannot be built names its hyperparameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model_defs.bert import model as bert
from model_defs.vit.model import Options, build_vit, vit_config
from tests.package import refusal

CLASSES = ["bread", "cake", "tea"]
NORM, BIAS = "vit.layernorm.weight", "vit.encoder.layer.2.intermediate.dense.bias"  # as published


def built(options: Options = Options(), classes: list[str] = CLASSES, seed: int = 3) -> Any:  # noqa: B008
    return build_vit(options, vit_config(options, classes), seed)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained ViT of other classes."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    built(classes=["one", "two"], seed=8).save_pretrained(folder)
    return folder


def test_labels_have_the_names_of_the_classes() -> None:
    config = vit_config(Options(num_labels=4), CLASSES)
    assert config.id2label == {0: "bread", 1: "cake", 2: "tea", 3: "LABEL_3"}


def test_a_checkpoint_of_other_classes_gets_a_new_head(checkpoint: Path, tmp_path: Path) -> None:
    options = Options(pretrained=str(checkpoint))
    model, again = built(options, seed=1), built(options, seed=1)
    model.save_pretrained(tmp_path)
    trained = load_file(checkpoint / "model.safetensors")
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        is_head = name.startswith("classifier.")
        assert tensor.shape[0] == 3 if is_head else torch.equal(tensor, trained[name]), name
    assert torch.equal(model.classifier.weight, again.classifier.weight)


def test_a_checkpoint_of_a_language_model_gets_a_pooler_and_a_head(tmp_path: Path) -> None:
    options = bert.Options(dropout=0.0)
    config = transformers.BertConfig(**bert.bert_config(options, CLASSES, vocab_size=300).to_diff_dict())
    trained = transformers.BertForMaskedLM(config)
    trained.save_pretrained(tmp_path)
    from_it = bert.Options(pretrained=str(tmp_path))
    model: Any = bert.build_bert(from_it, bert.bert_config(from_it, CLASSES, vocab_size=300), 3)
    body = trained.bert.state_dict()
    assert all(torch.equal(model.bert.state_dict()[name], tensor) for name, tensor in body.items())


# --- what cannot be ---


@pytest.mark.parametrize(
    ("changes", "classes", "vocab_size", "key"),
    [
        ({}, CLASSES, 301, "pretrained"),
        ({"sequence_length": 513}, CLASSES, 300, "sequence_length"),
        ({"num_labels": 2}, CLASSES, 300, "num_labels"),
        ({"model_size": "large"}, CLASSES, 300, "pretrained"),
    ],
)
def test_what_the_checkpoint_has_no_room_for(
    changes: dict[str, Any], classes: list[str], vocab_size: int, key: str, tmp_path: Path
) -> None:
    small = bert.Options()
    model: Any = bert.build_bert(small, bert.bert_config(small, CLASSES, vocab_size=300), 3)
    model.save_pretrained(tmp_path)
    options = bert.Options(model_size=None, pretrained=str(tmp_path)).model_copy(update=changes)
    found = refusal(lambda: bert.bert_config(options, classes, vocab_size=vocab_size))
    assert found.key == f"hyperparameters.{key}"


def refused(source: Path, options: Options = Options()) -> str:  # noqa: B008
    found = refusal(lambda: built(options.model_copy(update={"pretrained": str(source)})))
    assert (found.key, found.value) == ("hyperparameters.pretrained", str(source))
    return found.message


def test_a_checkpoint_that_is_not_there_or_of_another_model_or_size(tmp_path: Path, checkpoint: Path) -> None:
    refused(tmp_path / "nowhere")
    assert "config.json" in refused(tmp_path)
    transformers.BertConfig().save_pretrained(tmp_path)
    assert "'bert'" in refused(tmp_path)
    assert "'hidden_size': 768" in refused(checkpoint, Options(model_size="base"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.update({NORM: torch.ones(5)}), f"{NORM} has the shape (5,), and (64,)"),
        # It is not drawn at random.
        (lambda tensors: tensors.pop(BIAS), "vit.layers.2.mlp.fc1.bias is missing"),
    ],
)
def test_weights_of_another_shape_or_missing_are_named(
    change: Any, said: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert said in refused(tmp_path)
