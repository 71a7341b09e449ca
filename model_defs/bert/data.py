"""Texts and labels for BERT: rows -> classes, tokens, samples for training and for validation.

Everything is decided by the configuration and the files: the same on every rank, and again on every resume.

Legend of shape suffixes: S samples, T tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from pydantic import Field
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import TensorDataset

from model_defs.bert.library import prose_and_code
from model_defs.common.files import check_apart, split
from model_defs.common.huggingface import load_tokenizer
from model_defs.common.rows import Row, read_rows
from model_defs.common.sections import Section, data_error, parse_section

BATCH = 1000  # texts that are tokenized at once
PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class DataConfig(Section, extra="forbid"):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """CSV, JSON lines or parquet, a file or a folder; None: prose against code, out of the standard library."""
    validation_path: str | None = Field(None, min_length=1)
    """Rows for validation; all of ``path`` is then for training."""
    validation_fraction: float = Field(0.15, gt=0, lt=1)
    """About this part of the texts (of the standard library's modules) is for validation."""
    text_column: str = Field("text", min_length=1)
    """Column or field of the text."""
    label_column: str = Field("label", min_length=1)
    """Column or field of the label: names of classes, or their numbers from 0."""
    tokenizer: str | None = Field(None, min_length=1)
    """Folder or hub name; None: that of ``hyperparameters.pretrained``, or else one trained on the training texts."""
    vocab_size: int = Field(4096, ge=256 + len(SPECIAL_TOKENS))
    """Tokens, at most, of a tokenizer that is trained here."""


class TextData(NamedTuple):
    """Texts, ready to train on, with the names of the classes by label, and the tokenizer.

    A sample is ``(tokens_T, mask_T, label)``, cut or padded to T; the mask is false where it is padded.
    """

    train: TensorDataset
    validation: TensorDataset
    classes: list[str]
    tokenizer: Any


def load_texts(
    data: Mapping[str, Any] | None, sequence_length: int, *, pretrained: str | None = None
) -> TextData:
    """Read, split and tokenize what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        sequence_length: T.
        pretrained: Checkpoint whose tokenizer is taken where the section names none.

    Raises:
        ConfigError: Unknown keys or values of the wrong type in ``data``, all of them.
        DataError: What the section names cannot be read, a split is empty, a label is invalid, a tokenizer cannot pad.
    """
    config = parse_section(DataConfig, data, section="data")
    train, validation = read_sides(config)
    classes = _classes_of(train, config)
    if config.tokenizer is None and pretrained is None:
        tokenizer = trained_tokenizer((row.text for row in train), config.vocab_size)
    else:
        key = "data.tokenizer" if config.tokenizer else "hyperparameters.pretrained"
        source = str(config.tokenizer or pretrained)
        tokenizer = load_tokenizer(source, key=key)
        if tokenizer.pad_token_id is None:
            message = "the tokenizer has no pad token, which fills up short texts."
            fix = f'tokenizer.add_special_tokens({{"pad_token": "{PAD}"}}), and save it again'
            raise data_error(key, source, message, fix)
    numbers = {name: number for number, name in enumerate(classes)}
    sides = []
    for key, rows in (("path", train), ("validation_path" if config.validation_path else "path", validation)):
        for row in rows:
            if str(row.label) not in numbers:
                known = ", ".join(classes[:10])
                message = f"{row.name}: {row.label!r} is the label of no class; they are {known}."
                fix = "a label that training rows have, in every row"
                raise data_error(f"data.{key}", getattr(config, key), message, fix)
        how = {"truncation": True, "padding": "max_length", "max_length": sequence_length}
        parts = [
            tokenizer([row.text for row in rows[start : start + BATCH]], **how, return_tensors="np")
            for start in range(0, len(rows), BATCH)
        ]
        tokens_ST = np.concatenate([part["input_ids"].astype(np.int32) for part in parts])
        mask_ST = np.concatenate([part["attention_mask"].astype(bool) for part in parts])
        labels_S = torch.tensor([numbers[str(row.label)] for row in rows])
        sides.append(TensorDataset(torch.from_numpy(tokens_ST), torch.from_numpy(mask_ST), labels_S))
    return TextData(sides[0], sides[1], classes, tokenizer)


def trained_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A tokenizer of byte pairs, the same for the same texts, on every rank and in every process.

    Not WordPiece, which BERT was published with: its trainer in tokenizers 0.23 numbers the tokens in the order of a
    hash table, another one in every process.

    Args:
        texts: For training.
        vocab_size: Tokens at most; at least 256 bytes and 5 special ones.
    """
    pairs = tokenizers.Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pairs.train_from_iterator(texts, trainer)
    pairs.post_processor = processors.TemplateProcessing(
        single=f"{CLASS} $A {SEPARATOR}",
        special_tokens=[(token, pairs.token_to_id(token)) for token in (CLASS, SEPARATOR)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=CLASS,
        sep_token=SEPARATOR,
        mask_token=MASK,
    )


def read_sides(config: DataConfig) -> tuple[list[Row], list[Row]]:
    """Rows for training and for validation.

    Raises:
        DataError: A path cannot be read, or holds no two texts.
    """
    check_apart(config.path, config.validation_path)
    columns = {"text": config.text_column, "label": config.label_column}
    rows = read_rows(config.path, **columns) if config.path else prose_and_code()
    if config.validation_path is not None:
        return rows, read_rows(config.validation_path, key="data.validation_path", **columns)
    # A module is on one side with all its texts, and so is a text that occurs twice.
    by = "text" if config.path else "name"
    train, validation = split(rows, config.validation_fraction, by=lambda row: str(getattr(row, by)))
    if not validation:
        message = f"all {len(rows)} texts are the same, so that none is for validation."
        raise data_error("data.path", config.path, message, "more texts, or a data.validation_path")
    return train, validation


def _classes_of(rows: Sequence[Row], config: DataConfig) -> list[str]:
    """Names of the classes, by number: those in the training rows by the alphabet, or all numbers up to the highest."""
    found = sorted({str(row.label) for row in rows})
    if all(name.isdecimal() for name in found):
        # Numbers of classes are few; as many as there are rows are something else, such as an index.
        highest = max(map(int, found))
        found = [str(number) for number in range(highest + 1)] if highest < max(2, len(rows)) else []
    if len(found) < 2:
        message = (
            "the labels of its training rows are not two or more classes, by names or by numbers from 0."
        )
        raise data_error("data.path", config.path, message, f"data.label_column: not {config.label_column}")
    return found
