"""The sizes and the configuration of BERT; the model is ``transformers.BertForSequenceClassification``, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import transformers
from pydantic import Field

from model_defs.common.classifier import ClassifierOptions, classifier_config, size
from model_defs.common.sections import config_error

# As published: google/bert_uncased_L-2_H-128_A-2, google-bert/bert-base-uncased, google-bert/bert-large-uncased.
MODEL_SIZES = {"tiny": size(128, 2, 2), "base": size(768, 12, 12), "large": size(1024, 24, 16)}
PUBLISHED_VOCAB_SIZE = 30522
# New where a checkpoint was trained on something else than this classification.
HEAD = ("classifier.", "bert.pooler.")


class Options(ClassifierOptions):
    """The hyperparameters that this model reads."""

    model_size: Literal["tiny", "base", "large"] = "tiny"
    """One of :data:`MODEL_SIZES`; of no effect where ``pretrained`` is given, which has its own."""
    sequence_length: int = Field(128, ge=3)
    """Tokens that a text is cut or padded to; the first and the last are not of the text."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Of embeddings, residual paths, attention and the head alike."""


def bert_config(
    options: Options, classes: Sequence[str], *, vocab_size: int, pad_token_id: int = 0
) -> transformers.BertConfig:
    """The configuration of the model; see also :func:`model_defs.common.classifier.classifier_config`.

    Args:
        options: What to build.
        classes: Names of the classes of the data, by label.
        vocab_size: Tokens of the tokenizer. The larger published sizes keep room for the 30522 of theirs.
        pad_token_id: Of the tokenizer.

    Raises:
        ConfigError: Longer sequences than there are positions, more tokens than the checkpoint has, or a checkpoint
            that does not fit.
    """
    room = 0 if options.model_size == "tiny" else PUBLISHED_VOCAB_SIZE
    config: transformers.BertConfig = classifier_config(
        transformers.BertConfig,
        options,
        classes,
        **MODEL_SIZES[options.model_size],
        vocab_size=max(vocab_size, room),
        pad_token_id=pad_token_id,
    )
    config.classifier_dropout = options.dropout
    config.problem_type = "single_label_classification"
    config.use_cache = False  # of a decoder; under gradient checkpointing it would cause a warning
    if options.sequence_length > (most := config.max_position_embeddings):
        key, message = "hyperparameters.sequence_length", f"the model has {most} positions."
        raise config_error(key, options.sequence_length, message, f"sequence_length: {most}")
    if vocab_size > config.vocab_size:
        message = f"has embeddings for {config.vocab_size} tokens, and the tokenizer has {vocab_size}."
        fix = "data.tokenizer: null, which takes the checkpoint's own"
        raise config_error("hyperparameters.pretrained", options.pretrained, message, fix)
    return config
