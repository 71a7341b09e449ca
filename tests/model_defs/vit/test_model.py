"""ViT from a checkpoint or from nothing; and what cannot be built names its hyperparameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from determined_ds.errors import Problem
from model_defs.vit.model import Options, build_vit, vit_config
from tests.package import refusal

CLASSES = ["bread", "cake", "tea"]
TINY = Options()


def built(options: Options = TINY, classes: list[str] = CLASSES, seed: int = 3) -> Any:
    return build_vit(options, vit_config(options, classes), seed)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of other classes."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    built(classes=["one", "two"], seed=8).save_pretrained(folder)
    return folder


def test_labels_have_the_names_of_the_classes() -> None:
    config = vit_config(Options(num_labels=4), CLASSES)
    assert config.id2label == {0: "bread", 1: "cake", 2: "tea", 3: "LABEL_3"}
    assert config.num_labels == 4
    assert refusal(lambda: vit_config(Options(num_labels=2), CLASSES)).key == "hyperparameters.num_labels"


def test_a_checkpoint_of_other_classes_gets_a_new_head(checkpoint: Path) -> None:
    options = Options(pretrained=str(checkpoint))
    model, again = built(options, seed=1), built(options, seed=1)
    trained = transformers.ViTForImageClassification.from_pretrained(checkpoint).state_dict()
    for name, parameter in model.state_dict().items():
        if name.startswith("classifier."):
            assert parameter.shape[0] == 3
        else:
            assert torch.equal(parameter, trained[name]), name
    assert torch.equal(model.classifier.weight, again.classifier.weight)


# --- what cannot be ---


def refused(source: Path, options: Options = TINY) -> Problem:
    found = refusal(lambda: built(options.model_copy(update={"pretrained": str(source)})))
    assert (found.key, found.value) == ("hyperparameters.pretrained", str(source))
    return found


def test_a_checkpoint_that_is_not_there_or_of_another_model_or_size(tmp_path: Path, checkpoint: Path) -> None:
    refused(tmp_path / "nowhere")
    assert "config.json" in refused(tmp_path).message
    transformers.BertConfig().save_pretrained(tmp_path)
    assert "'bert'" in refused(tmp_path).message
    message = refused(checkpoint, Options(model_size="base")).message
    assert "'hidden_size': 64" in message
    assert "'hidden_size': 768" in message


NORM, BIAS = "vit.layernorm.weight", "vit.encoder.layer.2.intermediate.dense.bias"  # as published


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
    assert said in refused(tmp_path).message
