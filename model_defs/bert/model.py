"""BERT by a named size or from a checkpoint: ``transformers.BertForSequenceClassification``, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from determined_ds.errors import ConfigError, Problem
from model_defs.vit.model import checkpoint_layers
from model_defs.vit.pretrained import load_pretrained, pretrained_config
from model_defs.vit.sections import flag, number, one_of, parse_section, text, whole


def _size(width: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


# As published: google/bert_uncased_L-2_H-128_A-2, google-bert/bert-base-uncased, google-bert/bert-large-uncased.
MODEL_SIZES: dict[str, dict[str, int]] = {
    "tiny": _size(128, 2, 2),
    "base": _size(768, 12, 12),
    "large": _size(1024, 24, 16),
}
PUBLISHED_VOCAB_SIZE = 30522
# What is new where a checkpoint was trained on something else than this classification.
HEAD = ("classifier.", "bert.pooler.")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The hyperparameters that are this model's."""

    model_size: str | None = "tiny"
    """One of :data:`MODEL_SIZES`; None takes the size of ``pretrained``."""
    pretrained: str | None = None
    """Folder or hub name of a BERT checkpoint to start from; None: random weights, drawn by the seed."""
    num_labels: int | None = None
    """Outputs of the head; None: the classes of the data."""
    sequence_length: int = 128
    """Tokens that a text is cut or padded to."""
    dropout: float = 0.1
    """Probability in [0, 1), of embeddings, residual paths, attention and the head alike."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed."""


RULES = {
    "model_size": one_of(MODEL_SIZES, optional=True),
    "pretrained": text(),
    "num_labels": whole(2, optional=True),
    "sequence_length": whole(3),  # a token between the first and the last, which are not of the text
    "dropout": number(0, 1, "a number from 0 to below 1", low_included=True),
    "activation_checkpointing": flag(),
}


def parse_options(hparams: dict[str, Any]) -> Options:
    """This model's hyperparameters out of all of them.

    Raises:
        ConfigError: Everything that is wrong with them.
    """
    options = parse_section(Options, hparams, RULES, section="hyperparameters", closed=False)
    if options.model_size is None and options.pretrained is None:
        message, fix = (
            "is null, and so is pretrained: nothing says how large the model is.",
            "model_size: tiny",
        )
        raise ConfigError(Problem(key="hyperparameters.model_size", value=None, message=message, fix=fix))
    return options


def bert_config(
    options: Options,
    classes: Sequence[str],
    *,
    vocab_size: int,
    pad_token_id: int = 0,
    from_size: bool = False,
) -> transformers.BertConfig:
    """The configuration of the model, its labels named.

    Args:
        options: What to build.
        classes: Names of the classes of the data, by label.
        vocab_size: Tokens of the tokenizer. The larger published sizes keep room for the 30522 of theirs.
        pad_token_id: Of the tokenizer.
        from_size: Take the named size even where there is a checkpoint: only the sizes are asked for.

    Raises:
        ConfigError: More classes than ``num_labels``, longer sequences than there are positions, more tokens than the
            checkpoint has, or a checkpoint that does not do.
    """
    num_labels = options.num_labels or len(classes)
    sizes = MODEL_SIZES[options.model_size] if options.model_size is not None else None
    config: dict[str, Any] = dict(sizes or {})
    if options.pretrained is not None and not (from_size and sizes):
        config = pretrained_config(options.pretrained, model_type="bert", sizes=sizes)
    else:
        room = 0 if options.model_size == "tiny" else PUBLISHED_VOCAB_SIZE
        config |= {"vocab_size": max(vocab_size, room), "pad_token_id": pad_token_id}
    names = {label: f"LABEL_{label}" for label in range(num_labels)} | dict(enumerate(classes))
    config |= {
        "id2label": names,
        "label2id": {name: label for label, name in names.items()},
        "hidden_dropout_prob": options.dropout,
        "attention_probs_dropout_prob": options.dropout,
        "classifier_dropout": options.dropout,
        "problem_type": "single_label_classification",
        "use_cache": False,  # of a decoder; it would be warned of under gradient checkpointing
    }
    config.pop("num_labels", None)  # the names say it
    made = transformers.BertConfig.from_dict(config)
    problems = _misfits(options, made, len(classes), vocab_size)
    if problems:
        raise ConfigError(problems)
    return made


def _misfits(options: Options, config: Any, num_classes: int, vocab_size: int) -> list[Problem]:
    problems: list[Problem] = []
    if options.num_labels is not None and options.num_labels < num_classes:
        message = (
            f"the data has {num_classes} classes, and labels from {options.num_labels} on would lie outside."
        )
        fix = f"num_labels: {num_classes}; or null, which takes what the data has"
        problems.append(_problem("num_labels", options.num_labels, message, fix))
    most = config.max_position_embeddings
    if options.sequence_length > most:
        message = f"the model has positions for {most} tokens."
        problems.append(
            _problem("sequence_length", options.sequence_length, message, f"sequence_length: {most}")
        )
    if vocab_size > config.vocab_size:
        message = f"has embeddings for {config.vocab_size} tokens, and the tokenizer has {vocab_size}."
        fix = "data.tokenizer: null, which takes the checkpoint's own"
        problems.append(_problem("pretrained", options.pretrained, message, fix))
    return problems


def _problem(name: str, value: Any, message: str, fix: str) -> Problem:
    return Problem(key=f"hyperparameters.{name}", value=value, message=message, fix=fix)


def build_bert(options: Options, config: transformers.BertConfig, seed: int) -> nn.Module:
    """The model on the current device, the same for the same seed whatever was drawn before.

    Raises:
        ConfigError: The checkpoint's weights cannot be read, or do not fit.
    """
    on_meta = torch.empty(0).is_meta
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        kind = transformers.BertForSequenceClassification
        if options.pretrained is not None and not on_meta:
            model = load_pretrained(kind, options.pretrained, config, head=HEAD)
        else:
            model = kind(config)
    if options.activation_checkpointing:
        checkpoint_layers(model)
    return model.train()
