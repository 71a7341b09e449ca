"""BERT from a checkpoint or from nothing; and what cannot be built names its hyperparameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model_defs.bert.model import Options, bert_config, build_bert
from tests.package import refusal

CLASSES = ["code", "prose"]
TINY = Options(dropout=0.0)


def built(options: Options = TINY, seed: int = 3, vocab_size: int = 300) -> Any:
    return build_bert(options, bert_config(options, CLASSES, vocab_size=vocab_size), seed)


def test_a_checkpoint_of_a_language_model_gets_a_pooler_and_a_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**bert_config(TINY, CLASSES, vocab_size=300).to_diff_dict())
    trained = transformers.BertForMaskedLM(config)
    trained.save_pretrained(tmp_path)
    model = built(Options(pretrained=str(tmp_path)))
    body = trained.bert.state_dict()
    assert all(torch.equal(model.bert.state_dict()[name], tensor) for name, tensor in body.items())


@pytest.mark.parametrize(
    ("changes", "classes", "vocab_size", "key"),
    [
        ({}, CLASSES, 301, "pretrained"),
        ({"sequence_length": 513}, CLASSES, 300, "sequence_length"),
        ({"num_labels": 2}, [*CLASSES, "verse"], 300, "num_labels"),
        ({"model_size": "large"}, CLASSES, 300, "pretrained"),
    ],
)
def test_what_the_checkpoint_has_no_room_for(
    changes: dict[str, Any], classes: list[str], vocab_size: int, key: str, tmp_path: Path
) -> None:
    built().save_pretrained(tmp_path)
    options = Options(model_size=None, pretrained=str(tmp_path)).model_copy(update=changes)
    found = refusal(lambda: bert_config(options, classes, vocab_size=vocab_size))
    assert found.key == f"hyperparameters.{key}"
