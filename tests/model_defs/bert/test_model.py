"""BERT of every published size, from a checkpoint or from nothing; and what cannot be built says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from determined_ds.errors import ConfigError, Problem
from model_defs.bert.model import Options, bert_config, build_bert
from model_defs.common.classifier import parse_options
from model_defs.common.parameters import decay_groups

CLASSES = ["code", "prose"]
TINY = Options(dropout=0.0)


def built(options: Options = TINY, seed: int = 3, vocab_size: int = 300) -> Any:
    return build_bert(options, bert_config(options, CLASSES, vocab_size=vocab_size), seed)


def tokens() -> torch.Tensor:
    return torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(1))


def problem_of(function: Any, *args: Any, **kwargs: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    (problem,) = caught.value.problems
    assert problem.fix
    return problem


@pytest.mark.parametrize(
    ("model_size", "published"), [("tiny", 4_386_178), ("base", 109_483_778), ("large", 335_143_938)]
)
def test_published_sizes(model_size: str, published: int) -> None:
    """With the published vocabulary, which the larger ones keep room for; two classes."""
    vocab_size = 30522 if model_size == "tiny" else 300
    with torch.device("meta"):
        model = built(Options(model_size=model_size), vocab_size=vocab_size)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_the_seed_alone_decides_the_weights() -> None:
    first = built()
    torch.rand(7)
    again = built()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_biases_and_norms_do_not_decay() -> None:
    model = built()
    decayed, kept = decay_groups(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {id(each) for group in (decayed, kept) for each in group["params"]} == names.keys()
    assert all(names[id(each)].endswith("bias") or "LayerNorm" in names[id(each)] for each in kept["params"])
    assert not any("bias" in names[id(each)] or "LayerNorm" in names[id(each)] for each in decayed["params"])
    assert kept["weight_decay"] == 0.0


def test_activation_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = built(TINY.model_copy(update={"activation_checkpointing": checkpointing}))
        model(tokens()).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_of_a_language_model_gets_a_pooler_and_a_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**bert_config(TINY, CLASSES, vocab_size=300).to_diff_dict())
    trained = transformers.BertForMaskedLM(config)
    trained.save_pretrained(tmp_path)
    model = built(Options(pretrained=str(tmp_path)))
    body = trained.bert.state_dict()
    assert all(torch.equal(model.bert.state_dict()[name], tensor) for name, tensor in body.items())


def test_what_the_checkpoint_has_no_room_for(tmp_path: Path) -> None:
    built().save_pretrained(tmp_path)
    options = Options(model_size=None, pretrained=str(tmp_path))
    problem = problem_of(bert_config, options, CLASSES, vocab_size=301)
    assert problem.message == "has embeddings for 300 tokens, and the tokenizer has 301."
    problem = problem_of(
        bert_config, options.model_copy(update={"sequence_length": 513}), CLASSES, vocab_size=300
    )
    assert problem.key == "hyperparameters.sequence_length"
    assert problem.fix == "sequence_length: 512"
    problem = problem_of(
        bert_config, options.model_copy(update={"num_labels": 2}), [*CLASSES, "verse"], vocab_size=300
    )
    assert problem.key == "hyperparameters.num_labels"
    problem = problem_of(
        bert_config, options.model_copy(update={"model_size": "large"}), CLASSES, vocab_size=300
    )
    assert "hidden_size 128" in problem.message


def test_everything_wrong_with_the_hyperparameters_comes_at_once() -> None:
    wrong = {"model_size": "larg", "sequence_length": 2, "dropout": -0.1}
    with pytest.raises(ConfigError) as caught:
        parse_options(Options, {**wrong, "global_batch_size": 8})
    assert {problem.key for problem in caught.value.problems} == {f"hyperparameters.{name}" for name in wrong}
