"""Texts and labels for BERT: rows -> classes, tokens, samples for training and for validation.

Everything is decided by the configuration and the files: the same on every rank, and again on every resume.

Legend of shape suffixes: T tokens of a sequence, N tokens of all texts, S samples.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from pydantic import Field
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.utils.data import Dataset

from model_defs.bert.library import Row, prose_and_code
from model_defs.common.files import TABLES, check_apart, files_of, read_table, split
from model_defs.common.huggingface import load_tokenizer
from model_defs.common.sections import Section, config_error, data_error, parse_section

BATCH = 1000
INTEGER = re.compile(r"\s*[+-]?\d+\s*")
PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class DataConfig(Section):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """CSV, TSV, JSON lines or parquet, a file or a folder; None: prose against code, out of the standard library."""
    validation_path: str | None = Field(None, min_length=1)
    """Rows for validation; all of ``path`` is then for training."""
    validation_fraction: float = Field(0.15, gt=0, lt=1)
    """About this part of the texts (of the standard library's modules) is for validation."""
    split_seed: int = Field(0, ge=0)
    """Of that split; apart from the experiment's, so that experiments can be compared."""
    text_column: str = Field("text", min_length=1)
    """Column or field of the text."""
    label_column: str = Field("label", min_length=1)
    """Column or field of the label: the name of a class, or its number from 0."""
    labels: list[str] | None = Field(None, min_length=2)
    """Names of the classes in the order of their numbers; None: the names in the rows, in alphabetical order."""
    tokenizer: str | None = Field(None, min_length=1)
    """Folder or hub name; None: that of ``hyperparameters.pretrained``, or else one trained on the training texts."""
    vocab_size: int = Field(4096, ge=256 + len(SPECIAL_TOKENS))
    """Tokens, at most, of a tokenizer that is trained here."""


class TokenizedTexts(Dataset[tuple[Tensor, Tensor, int]]):
    """``(tokens_T, mask_T, label)`` of each text, cut or padded to T; the mask is 0 where it is padded.

    Args:
        rows: Texts.
        labels_S: Their labels.
        tokenizer: Of Hugging Face, with a pad token.
        sequence_length: T.
    """

    def __init__(
        self, rows: Sequence[Row], labels_S: Sequence[int], tokenizer: Any, sequence_length: int
    ) -> None:
        self.labels_S = labels_S
        self.sequence_length = sequence_length
        self.pad_token_id = int(tokenizer.pad_token_id)
        parts: list[np.ndarray] = []
        for start in range(0, len(rows), BATCH):
            texts = [row.text for row in rows[start : start + BATCH]]
            cut = tokenizer(texts, truncation=True, max_length=sequence_length, verbose=False)["input_ids"]
            parts += [np.array(ids, dtype=np.int32) for ids in cut]
        # One array, not one object a text: workers share it, whatever they count of it.
        self.tokens_N = np.concatenate(parts)
        self.ends_S = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return len(self.labels_S)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        start = int(self.ends_S[index - 1]) if index else 0
        own = self.tokens_N[start : int(self.ends_S[index])]
        tokens_T = torch.full((self.sequence_length,), self.pad_token_id)
        tokens_T[: len(own)] = torch.from_numpy(own)
        return tokens_T, (torch.arange(self.sequence_length) < len(own)).long(), self.labels_S[index]


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Texts, ready to train on.

    Args:
        train: For training.
        validation: For validation.
        classes: Names of the classes, by label.
        tokenizer: Which made their tokens.
        description: One line for the log.
    """

    train: TokenizedTexts
    validation: TokenizedTexts
    classes: list[str]
    tokenizer: Any
    description: str


def load_texts(
    data: Mapping[str, Any] | None, sequence_length: int, *, pretrained: str | None = None
) -> TextData:
    """Read, split and tokenize what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        sequence_length: T.
        pretrained: Checkpoint whose tokenizer is taken where the section names none.

    Raises:
        ConfigError: Unknown keys or values of the wrong type in ``data``, all of them; a tokenizer that cannot pad.
        DataError: What the section names cannot be read, a split is empty, or a label is invalid.
    """
    config = parse_section(DataConfig, data)
    train, validation = read_rows(config)
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
            raise config_error(key, source, message, fix)
    sides = [
        TokenizedTexts(rows, _labels_of(rows, classes), tokenizer, sequence_length)
        for rows in (train, validation)
    ]
    named = config.path or f"prose and code of the standard library of Python {platform.python_version()}"
    return TextData(
        train=sides[0],
        validation=sides[1],
        classes=classes,
        tokenizer=tokenizer,
        description=(
            f"{named}, classes {', '.join(classes)}: {len(train):,} texts for training, "
            f"{len(validation):,} for validation, {len(tokenizer):,} tokens"
        ),
    )


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


def read_rows(config: DataConfig) -> tuple[list[Row], list[Row]]:
    """Rows for training and for validation.

    Raises:
        DataError: Either path cannot be read, or holds no two texts.
    """
    check_apart(config.path, config.validation_path)
    columns = {"data.text_column": config.text_column, "data.label_column": config.label_column}

    def table(key: str, path: str) -> list[Row]:
        """All rows of a file, or of a folder's files in the order of their names; an empty text is a text."""
        rows: list[Row] = []
        for name, file in files_of(path, key=key):
            if file.suffix.lower() in TABLES:
                columns_of_file = zip(*read_table(file, columns, key=key), strict=True)
                rows += [Row(f"{name}:{row}", *both) for row, both in enumerate(columns_of_file, 1)]
        for row in rows:
            if isinstance(row.label, bool) or not isinstance(row.label, str | int) or row.label == "":
                message = f"{row.name}: {config.label_column!r} is {row.label!r}, neither a name nor a whole number."
                fix = "label every row by the name of a class, or by its number from 0"
                raise data_error(key, path, message, fix)
        if not rows:
            fix = f"a file, or a folder of files: {', '.join(sorted(TABLES))}"
            raise data_error(key, path, "there is no row in it.", fix)
        return rows

    rows = table("data.path", config.path) if config.path else prose_and_code()
    if config.validation_path is not None:
        return rows, table("data.validation_path", config.validation_path)
    # A module is on one side with all its texts, and so is a text that occurs twice.
    names = [row.name if config.path is None else row.text for row in rows]
    train, validation = split(rows, names, config.validation_fraction, seed=config.split_seed)
    if not validation:
        message = f"all {len(rows)} texts are the same, so that none is for validation."
        raise data_error("data.path", config.path, message, "more texts, or a data.validation_path")
    return train, validation


def _classes_of(rows: Sequence[Row], config: DataConfig) -> list[str]:
    """Names of the classes, by number: those that the section lists, or those of the training rows."""
    classes = config.labels or sorted({str(row.label) for row in rows})
    message, fix = "", "data.label_column: the column of classes; or data.labels, which lists them"
    if config.labels is None and all(INTEGER.fullmatch(name) for name in classes):
        highest = max(map(int, classes))
        if highest >= max(2, len(rows)):
            message = (
                f"has labels up to {highest} in {len(rows)} rows: are they the numbers of classes, from 0?"
            )
        classes = [str(number) for number in range(min(highest, len(rows)) + 1)]
    if len(set(classes)) < max(2, len(classes)):
        message = f"the classes for training are {', '.join(classes)}: two or more are needed, each once."
    if message:
        raise data_error("data.path", config.path, message, fix)
    return classes


def _labels_of(rows: Sequence[Row], classes: Sequence[str]) -> list[int]:
    """The number of each row's class."""
    numbers = {name: number for number, name in enumerate(classes)}
    texts = [str(row.label) for row in rows]
    by_number = all(map(INTEGER.fullmatch, texts)) and not all(text in numbers for text in texts)
    labels = [int(text) if by_number else numbers.get(text, -1) for text in texts]
    for row, label in zip(rows, labels, strict=True):
        if not 0 <= label < len(classes):
            message = f"{row.name}: is the label of no class; the classes are {', '.join(classes[:10])}."
            fix = "correct the row; or name every class in data.labels"
            raise data_error("data.labels", row.label, message, fix)
    return labels
