"""Text for GPT-2: documents -> tokens -> sequences for training and for validation.

Everything is decided by the configuration and the files: the same on every rank, and again on every resume.

Legend of shape suffixes: T tokens of a sequence, N tokens of the whole text.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from determined_ds.errors import ConfigError, DataError, Problem
from model_defs.gpt2.documents import (
    Document,
    read_documents,
    standard_library_description,
    standard_library_files,
)

BYTE_VOCAB_SIZE = 256
# Ends a document where tokens are bytes: the one byte that text does not contain.
BYTE_SEPARATOR = 0
TOKENIZER_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The ``data`` section of the experiment YAML."""

    path: str | None = None
    """File or folder of text; None: the standard library of the running Python."""
    tokenizer: str | None = None
    """Folder of a Hugging Face tokenizer, or its name on the hub; None or "bytes": bytes, a vocabulary of 256."""
    text_field: str = "text"
    """Field of JSON lines, column of parquet tables, that holds the text."""
    validation_fraction: float = 0.05
    """About this part of the documents is for validation; of one document alone, its tail."""
    validation_path: str | None = None
    """Text for validation; all of ``path`` is then for training."""
    max_validation_sequences: int = 512
    """Of more sequences than this, validation takes this many, evenly spread."""


class TokenSequences(Dataset[tuple[Tensor, Tensor]]):
    """Windows of T + 1 tokens, one after the other without overlap; a last one that is not full is dropped.

    Item ``i`` is ``(tokens_T, targets_T)``, int64, the targets one token ahead.

    Args:
        tokens_N: The text, of any integer type; it is kept as it is, so a compact one saves memory.
        sequence_length: T, at least 1.
        max_sequences: Where there are more windows, this many are taken, evenly spread.
    """

    def __init__(self, tokens_N: np.ndarray, sequence_length: int, max_sequences: int | None = None) -> None:
        self.tokens_N = tokens_N
        self.sequence_length = sequence_length
        self.num_windows = len(tokens_N) // (sequence_length + 1)
        self.num_sequences = min(
            self.num_windows, self.num_windows if max_sequences is None else max_sequences
        )

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -self.num_sequences <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        window = index % self.num_sequences * self.num_windows // self.num_sequences
        start = window * (self.sequence_length + 1)
        # The copy to int64 is what embedding and cross entropy take; the text itself stays compact.
        both = torch.from_numpy(self.tokens_N[start : start + self.sequence_length + 1].astype(np.int64))
        return both[:-1], both[1:]


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text, ready to train on.

    Args:
        train: Sequences for training.
        validation: Sequences for validation, none of whose tokens are in ``train``.
        vocab_size: V, what the model must be built for.
        separator: The token between documents.
        description: What this is, for people.
    """

    train: TokenSequences
    validation: TokenSequences
    vocab_size: int
    separator: int
    description: str


def load_text(data: Mapping[str, Any] | None, sequence_length: int) -> TextData:
    """Read, split and tokenize what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        sequence_length: T, tokens of a sequence, at least 1.

    Raises:
        ConfigError: Unknown keys or values of the wrong type in ``data``, all of them.
        DataError: What the section names cannot be read, or is too short.
    """
    config = parse_data_config(data, sequence_length)
    train, validation = _read(config)
    encoder = _Bytes() if config.tokenizer in (None, "bytes") else _load_tokenizer(config.tokenizer)
    train_N = encoder.encode(train)
    if validation:
        validation_N = encoder.encode(validation)
    else:
        # One document: its tail is for validation.
        num_train = len(train_N) - round(len(train_N) * config.validation_fraction)
        train_N, validation_N = train_N[:num_train], train_N[num_train:]
    _check_lengths(config, len(train_N), len(validation_N), sequence_length)
    source = standard_library_description() if config.path is None else config.path
    return TextData(
        train=TokenSequences(train_N, sequence_length),
        validation=TokenSequences(validation_N, sequence_length, config.max_validation_sequences),
        vocab_size=encoder.vocab_size,
        separator=encoder.separator,
        description=(
            f"{source}, {len(train) + len(validation)} documents as {encoder.name}: "
            f"{len(train_N):,} tokens for training, {len(validation_N):,} for validation"
        ),
    )


def parse_data_config(data: Mapping[str, Any] | None, sequence_length: int) -> DataConfig:
    """Check the section's keys and types, before any file is read.

    Raises:
        ConfigError: Everything that is wrong.
    """
    given = {} if data is None else data
    if not isinstance(given, Mapping):
        raise ConfigError(
            Problem(
                key="data", value=given, message="is a mapping of keys to values.", fix="data: {path: null}"
            )
        )
    known = {field.name: field.default for field in fields(DataConfig)}
    problems = [_unknown_key(name, given[name], known) for name in given if name not in known]
    for name, default in known.items():
        reason = _wrong_value(name, given[name]) if name in given else None
        if reason:
            shown = "null" if default is None else default
            problems.append(
                Problem(key=f"data.{name}", value=given[name], message=reason, fix=f"data.{name}: {shown}")
            )
    if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 1:
        problems.append(
            Problem(
                key="hyperparameters.sequence_length",
                value=sequence_length,
                message="is a whole number of tokens, at least 1.",
                fix="sequence_length: 128",
            )
        )
    if problems:
        raise ConfigError(problems)
    return DataConfig(**given)


def _unknown_key(name: Any, value: Any, known: Iterable[str]) -> Problem:
    nearest = difflib.get_close_matches(str(name), known, n=1)
    fix = f"did you mean data.{nearest[0]}?" if nearest else f"one of {', '.join(known)}"
    return Problem(key=f"data.{name}", value=value, message="no such key.", fix=fix)


def _wrong_value(name: str, value: Any) -> str | None:
    """Why ``value`` cannot be the value of the known key ``name``; None where it can."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match name:
        case "validation_fraction":
            return None if number and 0 < value < 1 else "is a number between 0 and 1, both excluded."
        case "max_validation_sequences":
            return (
                None if number and isinstance(value, int) and value >= 1 else "is a whole number, at least 1."
            )
        case "text_field":
            return None if isinstance(value, str) and value else "is the name of a field."
        case _:
            return None if value is None or (isinstance(value, str) and value) else "is a string or null."


def _read(config: DataConfig) -> tuple[list[Document], list[Document]]:
    """Documents for training and for validation; none for validation where a single document must be cut.

    Raises:
        DataError: Everything that is wrong with either path.
    """
    texts: list[list[Document]] = []
    problems = _overlap(config.path, config.validation_path)
    for key, path in (("data.path", config.path), ("data.validation_path", config.validation_path)):
        if path is None:
            continue
        try:
            texts.append(read_documents(path, key=key, text_field=config.text_field))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(problems)
    if config.path is None:
        library = standard_library_files()
        if not library:
            message = "this Python's standard library is not there as source files."
            raise DataError(
                Problem(key="data.path", value=None, message=message, fix="data.path: a text file")
            )
        texts.insert(0, library)
    if config.validation_path is not None:
        return texts[0], texts[1]
    return split_documents(texts[0], config.validation_fraction)


def _overlap(path: str | None, validation_path: str | None) -> list[Problem]:
    """The problem of a path within the other, which would train on what it validates."""
    if path is None or validation_path is None:
        return []
    train, validation = (Path(each).expanduser().resolve() for each in (path, validation_path))
    if train != validation and train not in validation.parents and validation not in train.parents:
        return []
    return [
        Problem(
            key="data.validation_path",
            value=validation_path,
            message=f"overlaps data.path = {path!r}: text for validation would be trained on.",
            fix="keep the two apart; or data.validation_path: null, which splits data.path itself",
        )
    ]


def split_documents(
    documents: Sequence[Document], validation_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Documents for training and for validation, by a hash of each one's name.

    A document stays on its side when others are added. Of two or more documents, each side gets at least one;
    of a single one, validation gets none.
    """
    if len(documents) < 2:
        return list(documents), []
    places = [_place(document.name) for document in documents]
    # The threshold moves only where one of the sides would be empty.
    lowest, highest = min(places), max(places)
    threshold = min(max(validation_fraction, np.nextafter(lowest, 2.0)), highest)
    train = [document for document, place in zip(documents, places, strict=True) if place >= threshold]
    validation = [document for document, place in zip(documents, places, strict=True) if place < threshold]
    return train, validation


def _place(name: str) -> float:
    """A number in [0, 1) that the name decides, uniform over names."""
    digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


class _Bytes:
    """Bytes as tokens."""

    name = "bytes"
    vocab_size = BYTE_VOCAB_SIZE
    separator = BYTE_SEPARATOR

    def encode(self, documents: Sequence[Document]) -> np.ndarray:
        """tokens_N, the documents joined by a zero byte."""
        joined = bytes([BYTE_SEPARATOR]).join(document.content for document in documents)
        return np.frombuffer(joined, dtype=np.uint8)


class _Tokens:
    """Tokens of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer = tokenizer
        self.name = f"tokens of {name}"
        self.vocab_size = len(tokenizer)
        self.separator = int(tokenizer.eos_token_id)

    def encode(self, documents: Sequence[Document]) -> np.ndarray:
        """tokens_N of the smallest type that holds the vocabulary, the documents joined by the eos token."""
        dtype = np.min_scalar_type(self.vocab_size - 1)
        separator = np.array([self.separator], dtype=dtype)
        parts: list[np.ndarray] = []
        for start in range(0, len(documents), TOKENIZER_BATCH):
            batch = documents[start : start + TOKENIZER_BATCH]
            # Text from disk is UTF-8 already; a few old files of the standard library are not.
            texts = [document.content.decode("utf-8", errors="replace") for document in batch]
            # The tokenizer's own limit does not matter here: the text is cut into sequences afterwards.
            for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                parts += [np.array(ids, dtype=dtype), separator]
        return np.concatenate(parts[:-1])


def _load_tokenizer(source: str) -> _Tokens:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # What it raises differs by the file that is missing or broken.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            Problem(
                key="data.tokenizer",
                value=source,
                message=f"neither a tokenizer's folder here nor one that Hugging Face can load: {reason}",
                fix="a folder written by save_pretrained, a name on the hub such as gpt2, or bytes",
            )
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            Problem(
                key="data.tokenizer",
                value=source,
                message="the tokenizer has no eos token, which is what separates documents.",
                fix='tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"}), and save it again',
            )
        )
    return _Tokens(tokenizer, source)


def _check_lengths(config: DataConfig, num_train: int, num_validation: int, sequence_length: int) -> None:
    needed = sequence_length + 1
    problems: list[Problem] = []
    if config.validation_path is None:
        if min(num_train, num_validation) < needed:
            problems.append(_too_short("data.path", config.path, num_train, num_validation, needed))
    else:
        if num_train < needed:
            problems.append(_too_short("data.path", config.path, num_train, None, needed))
        if num_validation < needed:
            key = "data.validation_path"
            problems.append(_too_short(key, config.validation_path, None, num_validation, needed))
    if problems:
        raise DataError(problems)


def _too_short(
    key: str, path: str | None, num_train: int | None, num_validation: int | None, needed: int
) -> Problem:
    """The problem of a text with these numbers of tokens; None for a part that it does not have."""
    there = [(num_train, "training"), (num_validation, "validation")]
    counts = " and ".join(f"{count} tokens for {use}" for count, use in there if count is not None)
    longest = min(count for count, _ in there if count is not None) - 1
    fixes = ["more text"]
    if longest >= 1:
        fixes.append(f"hyperparameters.sequence_length: {longest} or less")
    if num_train is not None and num_validation is not None and num_train + num_validation >= 2 * needed:
        fixes.append("another data.validation_fraction")
    return Problem(
        key=key,
        value=path,
        message=f"too short: {counts}, and one sequence of each needs {needed} (sequence_length + 1).",
        fix=", or ".join(fixes),
    )
