"""Text for language models: documents -> tokens -> sequences for training and for validation.

Everything is decided by the configuration and the files: the same on every rank, and again on every resume.
Documents are joined by a separator and cut into sequences of one length: nothing is padded.

Legend of shape suffixes: T tokens of a sequence, N tokens of the whole text.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from determined_ds import SequenceGroup
from determined_ds.errors import ConfigError, DataError, Problem
from model_defs.common.documents import Document, read_documents, standard_library_files
from model_defs.common.huggingface import first_line
from model_defs.common.sections import Section, section_problems
from model_defs.common.split import overlap_problems, split

BYTE_VOCAB_SIZE = 256
# Ends a document where tokens are bytes: the one byte that text does not contain.
BYTE_SEPARATOR = 0
TOKENIZER_BATCH = 1000
IGNORED = -100  # a target that is not predicted, in torch and transformers


class DataConfig(Section):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """File or folder of text; None: the standard library of the running Python."""
    tokenizer: str | None = Field(None, min_length=1)
    """Folder of a Hugging Face tokenizer, or its name on the hub; None or "bytes": bytes, a vocabulary of 256."""
    text_field: str = Field("text", min_length=1)
    """Field of JSON lines, column of parquet tables, that holds the text."""
    validation_fraction: float = Field(0.05, gt=0, lt=1)
    """About this part of the documents is for validation; of a single document, its tail."""
    validation_path: str | None = Field(None, min_length=1)
    """Text for validation; all of ``path`` is then for training."""
    max_validation_sequences: int = Field(512, ge=1)
    """Of more sequences than this, validation takes this many, evenly spread."""


class _Length(Section):
    sequence_length: int = Field(128, ge=1)


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
        tokenizer: Its folder or name; ``bytes``: tokens are bytes.
        description: One line for the log.
    """

    train: TokenSequences
    validation: TokenSequences
    vocab_size: int
    separator: int
    tokenizer: str
    description: str


def load_text(
    data: Mapping[str, Any] | None, sequence_length: int, *, default_tokenizer: str | None = None
) -> TextData:
    """Read, split and tokenize what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        sequence_length: T, tokens of a sequence, at least 1.
        default_tokenizer: Where the section names none; None: bytes.

    Raises:
        ConfigError: Unknown keys or invalid values in ``data``, all of them; a tokenizer without an eos token.
        DataError: What the section names cannot be read, or is too short.
    """
    problems = section_problems(DataConfig, data)
    problems += section_problems(_Length, {"sequence_length": sequence_length}, section="hyperparameters")
    if problems:
        raise ConfigError(problems)
    config = DataConfig(**(data or {}))
    name = config.tokenizer or default_tokenizer or "bytes"
    train, validation = _read(config)
    encoder = _Bytes() if name == "bytes" else _load_tokenizer(name)
    train_N = encoder.encode(train)
    if validation:
        validation_N = encoder.encode(validation)
    else:
        num_train = len(train_N) - round(len(train_N) * config.validation_fraction)
        train_N, validation_N = train_N[:num_train], train_N[num_train:]
    _check_lengths(config, len(train_N), len(validation_N), sequence_length)
    source = config.path or f"the standard library of Python {platform.python_version()}"
    return TextData(
        train=TokenSequences(train_N, sequence_length),
        validation=TokenSequences(validation_N, sequence_length, config.max_validation_sequences),
        vocab_size=encoder.vocab_size,
        separator=encoder.separator,
        tokenizer=name,
        description=(
            f"{source}, {len(train) + len(validation)} documents as {encoder.name}: "
            f"{len(train_N):,} tokens for training, {len(validation_N):,} for validation"
        ),
    )


def export_tokenizer(data: TextData, folder: Path) -> None:
    """Write the tokenizer's files for users of exported weights; bytes need none.

    Args:
        data: What the model was trained on.
        folder: Of the export.
    """
    if data.tokenizer != "bytes":
        _load_tokenizer(data.tokenizer).tokenizer.save_pretrained(folder)


def _read(config: DataConfig) -> tuple[list[Document], list[Document]]:
    """Documents for training and for validation; none for validation where a single document must be cut.

    Raises:
        DataError: Everything that is wrong with either path.
    """
    texts: dict[str, list[Document]] = {}
    problems = overlap_problems(config.path, config.validation_path)
    for key, path in (("data.path", config.path), ("data.validation_path", config.validation_path)):
        try:
            texts[key] = read_documents(path, key=key, text_field=config.text_field) if path else []
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(problems)
    documents = texts["data.path"] or standard_library_files()
    if not documents:
        message = "this Python has no standard library as source files."
        raise DataError(Problem(key="data.path", value=None, message=message, fix="data.path: a text file"))
    if config.validation_path is not None:
        return documents, texts["data.validation_path"]
    return split(documents, [document.name for document in documents], config.validation_fraction)


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
        message = f"neither a tokenizer's folder nor one that Hugging Face can load: {first_line(error)}"
        fix = "a folder written by save_pretrained, a name on the hub such as gpt2, or bytes"
        raise DataError(Problem(key="data.tokenizer", value=source, message=message, fix=fix)) from error
    if tokenizer.eos_token_id is None:
        message = "the tokenizer has no eos token, which separates documents."
        fix = 'tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"}), and save it again'
        raise ConfigError(Problem(key="data.tokenizer", value=source, message=message, fix=fix))
    return _Tokens(tokenizer, source)


def _check_lengths(config: DataConfig, num_train: int, num_validation: int, sequence_length: int) -> None:
    """Refuse text that has no full sequence for training, or none for validation."""
    counts = {"training": num_train, "validation": num_validation}
    if config.validation_path is None:
        parts = [("data.path", config.path, counts)]
    else:
        keys = (("data.path", config.path), ("data.validation_path", config.validation_path))
        parts = [(*key, {use: counts[use]}) for key, use in zip(keys, counts, strict=True)]
    needed = sequence_length + 1
    problems = [_too_short(*part, needed) for part in parts if min(part[2].values()) < needed]
    if problems:
        raise DataError(problems)


def _too_short(key: str, path: str | None, counts: Mapping[str, int], needed: int) -> Problem:
    """The problem of a text with these numbers of tokens."""
    there = " and ".join(f"{count} tokens for {use}" for use, count in counts.items())
    longest = min(counts.values()) - 1
    fixes = ["more text"]
    if longest >= 1:
        fixes.append(f"hyperparameters.sequence_length: {longest} or less")
    if len(counts) == 2 and sum(counts.values()) >= 2 * needed:
        fixes.append("another data.validation_fraction")
    message = f"too short: {there}, and one sequence of each needs {needed} (sequence_length + 1)."
    return Problem(key=key, value=path, message=message, fix=", or ".join(fixes))


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor, sequence: SequenceGroup | None = None) -> Tensor:
    """Mean cross entropy in nats a token, a float32 scalar whatever the logits' type.

    Args:
        logits_BTV: Floating point of any width.
        targets_BT: int64 token ids in [0, V); IGNORED where there is nothing to predict.
        sequence: The ranks whose slices of the sequences count together; None: they are whole.
    """
    logits, targets = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    if sequence is None or sequence.size == 1:
        return functional.cross_entropy(logits, targets, ignore_index=IGNORED)
    total = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return sequence.mean(total, (targets != IGNORED).sum())
