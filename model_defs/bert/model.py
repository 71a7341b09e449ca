"""BERT by a named size or from a checkpoint: ``transformers.BertForSequenceClassification``, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import transformers
from pydantic import Field
from torch import nn

from model_defs.common.classifier import ClassifierOptions, base_config, build_classifier, size
from model_defs.common.sections import config_error

# As published: google/bert_uncased_L-2_H-128_A-2, google-bert/bert-base-uncased, google-bert/bert-large-uncased.
MODEL_SIZES = {"tiny": size(128, 2, 2), "base": size(768, 12, 12), "large": size(1024, 24, 16)}
PUBLISHED_VOCAB_SIZE = 30522
# New where a checkpoint was trained on something else than this classification.
HEAD = ("classifier.", "bert.pooler.")


class Options(ClassifierOptions):
    """The hyperparameters that this model reads."""

    model_size: Literal["tiny", "base", "large"] | None = "tiny"
    """One of :data:`MODEL_SIZES`; None takes the size of ``pretrained``."""
    sequence_length: int = Field(128, ge=3)
    """Tokens that a text is cut or padded to; the first and the last are not of the text."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Of embeddings, residual paths, attention and the head alike."""


def bert_config(
    options: Options,
    classes: Sequence[str],
    *,
    vocab_size: int,
    pad_token_id: int = 0,
    only_sizes: bool = False,
) -> transformers.BertConfig:
    """The configuration of the model; see also :func:`model_defs.common.classifier.base_config`.

    Args:
        options: What to build.
        classes: Names of the classes of the data, by label.
        vocab_size: Tokens of the tokenizer. The larger published sizes keep room for the 30522 of theirs.
        pad_token_id: Of the tokenizer.
        only_sizes: Read no checkpoint where ``model_size`` says enough.

    Raises:
        ConfigError: More classes than ``num_labels``, longer sequences than there are positions, more tokens than the
            checkpoint has, or a checkpoint that does not fit.
    """
    sizes = MODEL_SIZES[options.model_size] if options.model_size else None
    config = base_config(options, classes, model_type="bert", sizes=sizes, only_sizes=only_sizes)
    if options.pretrained is None or (only_sizes and sizes):
        room = 0 if options.model_size == "tiny" else PUBLISHED_VOCAB_SIZE
        config |= {"vocab_size": max(vocab_size, room), "pad_token_id": pad_token_id}
    config |= {
        "classifier_dropout": options.dropout,
        "problem_type": "single_label_classification",
        "use_cache": False,  # of a decoder; under gradient checkpointing it would cause a warning
    }
    made = transformers.BertConfig.from_dict(config)
    if options.sequence_length > (most := made.max_position_embeddings):
        key, message = "hyperparameters.sequence_length", f"the model has {most} positions."
        raise config_error(key, options.sequence_length, message, f"sequence_length: {most}")
    if vocab_size > made.vocab_size:
        message = f"has embeddings for {made.vocab_size} tokens, and the tokenizer has {vocab_size}."
        fix = "data.tokenizer: null, which takes the checkpoint's own"
        raise config_error("hyperparameters.pretrained", options.pretrained, message, fix)
    return made


def build_bert(options: Options, config: transformers.BertConfig, seed: int) -> nn.Module:
    """The model; see :func:`model_defs.common.classifier.build_classifier`."""
    kind = transformers.BertForSequenceClassification
    return build_classifier(kind, options, config, head=HEAD, seed=seed)
