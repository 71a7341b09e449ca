"""ViT of every published size, from a checkpoint or from nothing; and what cannot be built says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from determined_ds.errors import ConfigError, Problem
from model_defs.common.classifier import parse_options
from model_defs.common.parameters import decay_groups
from model_defs.vit.model import NO_DECAY, Options, build_vit, vit_config

CLASSES = ["bread", "cake", "tea"]
TINY = Options()


def built(options: Options = TINY, classes: list[str] = CLASSES, seed: int = 3) -> Any:
    return build_vit(options, vit_config(options, classes), seed)


def pixels(size: int = 16) -> torch.Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of other classes."""
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    built(classes=["one", "two"], seed=8).save_pretrained(folder)
    return folder


def problems_of(function: Any, *args: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        function(*args)
    assert all(problem.fix for problem in caught.value.problems)
    return caught.value.problems


# --- sizes ---


@pytest.mark.parametrize(
    ("model_size", "num_labels", "published"),
    [("small", 1000, 22_050_664), ("base", 1000, 86_567_656), ("large", 1000, 304_326_632)],
)
def test_published_sizes(model_size: str, num_labels: int, published: int) -> None:
    options = Options(model_size=model_size, num_labels=num_labels)
    with torch.device("meta"):
        model = built(options)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_huge_is_the_published_one_with_a_head_for_its_pooler() -> None:
    with torch.device("meta"):
        model = built(Options(model_size="huge"))
    body, pooler, head = 632_404_480 - 1280 * 1281, 1280 * 1281, 1281 * len(CLASSES)
    assert sum(parameter.numel() for parameter in model.parameters()) == body + head
    assert body + pooler == 632_404_480


def test_labels_have_the_names_of_the_classes() -> None:
    config = vit_config(Options(num_labels=4), CLASSES)
    assert config.id2label == {0: "bread", 1: "cake", 2: "tea", 3: "LABEL_3"}
    assert config.num_labels == 4


def test_the_seed_alone_decides_the_weights() -> None:
    first = built()
    torch.rand(7)
    state = torch.random.get_rng_state()
    again, other = built(), built(seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.classifier.weight, other.classifier.weight)


def test_activation_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = built(TINY.model_copy(update={"activation_checkpointing": checkpointing}))
        model(pixels()).logits.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_what_decays() -> None:
    model = built()
    decayed, kept = decay_groups(model, NO_DECAY)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert kept["weight_decay"] == 0.0
    assert "weight_decay" not in decayed
    assert {id(each) for group in (decayed, kept) for each in group["params"]} == names.keys()
    assert all(names[id(each)].endswith(".weight") for each in decayed["params"])
    spared = {names[id(each)].rpartition(".")[2] for each in kept["params"]}
    assert spared == {"weight", "bias", "cls_token", "position_embeddings"}
    assert {each.ndim for each in kept["params"] if names[id(each)].endswith("weight")} == {1}


# --- checkpoints ---


def test_a_checkpoint_of_the_same_classes_computes_the_same(tmp_path: Path) -> None:
    trained = built().eval()
    trained.save_pretrained(tmp_path)
    model = built(Options(model_size=None, pretrained=str(tmp_path)), seed=99).eval()
    assert torch.equal(model(pixels()).logits, trained(pixels()).logits)


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


def test_only_sizes_need_no_checkpoint() -> None:
    options = Options(model_size="base", pretrained="nobody/nothing")
    assert vit_config(options, CLASSES, only_sizes=True).hidden_size == 768


# --- what cannot be ---


def test_everything_wrong_with_the_hyperparameters_comes_at_once() -> None:
    wrong = {
        "model_size": "hugh",
        "pretrained": 3,
        "num_labels": 1,
        "dropout": 1.0,
        "activation_checkpointing": 1,
    }
    problems = problems_of(parse_options, Options, {**wrong, "learning_rate": "ours it is not"})
    assert [problem.key for problem in problems] == [f"hyperparameters.{name}" for name in wrong]
    assert "model_size: huge" in problems[0].fix
    (problem,) = problems_of(parse_options, Options, {"model_size": None})
    assert "both it and pretrained are null" in problem.message


def test_more_classes_than_labels() -> None:
    (problem,) = problems_of(vit_config, Options(num_labels=2), CLASSES)
    assert problem.key == "hyperparameters.num_labels"
    assert "num_labels: 3" in problem.fix


def refused(source: Path, options: Options = TINY) -> Problem:
    (problem,) = problems_of(lambda: built(options.model_copy(update={"pretrained": str(source)})))
    assert (problem.key, problem.value) == ("hyperparameters.pretrained", str(source))
    return problem


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").message == "no such folder."
    assert "no config.json" in refused(tmp_path).message


def test_a_checkpoint_of_another_architecture_or_size(tmp_path: Path, checkpoint: Path) -> None:
    transformers.BertConfig().save_pretrained(tmp_path)
    assert "'bert', not of 'vit'" in refused(tmp_path).message
    message = refused(checkpoint, Options(model_size="base")).message
    assert "hidden_size 64, num_hidden_layers 4" in message
    assert "hidden_size 768, num_hidden_layers 12" in message


def copied(checkpoint: Path, folder: Path, change: Any) -> Path:
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_weights_of_another_shape(checkpoint: Path, tmp_path: Path) -> None:
    name = "vit.layernorm.weight"
    message = refused(
        copied(checkpoint, tmp_path, lambda tensors: tensors.update({name: torch.ones(5)}))
    ).message
    assert message == f"1 tensors do not fit: {name} has the shape (5,), and (64,) in the model."


def test_weights_that_are_missing_are_not_drawn_at_random(checkpoint: Path, tmp_path: Path) -> None:
    name = "vit.encoder.layer.2.intermediate.dense.bias"  # as published, and as it is saved
    assert (
        "vit.layers.2.mlp.fc1.bias is missing"
        in refused(copied(checkpoint, tmp_path, lambda tensors: tensors.pop(name))).message
    )


def test_weights_that_are_cut_short(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:-100])
    assert "cannot load it" in refused(tmp_path).message


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"})[:-3])
    assert "cannot load it" in refused(tmp_path).message
