"""Text for language models: documents -> tokens -> sequences for training and for validation.

Everything is decided by the configuration and the files: the same on every rank, and again on every resume.
Documents are joined by a separator and cut into sequences of one length: nothing is padded.

Legend of shape suffixes: B batch, T tokens of a sequence, V vocabulary, N tokens of the whole text.
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
from model_defs.common.files import Document, check_apart, read_documents, split, standard_library_files
from model_defs.common.sections import Section, config_error, data_error, parse_section

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
        self.num_sequences = min(self.num_windows, max_sequences or self.num_windows)

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

    def export_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files for users of exported weights; bytes need none."""
        if self.tokenizer != "bytes":
            _load_tokenizer(self.tokenizer).save_pretrained(folder)


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
    config = parse_section(DataConfig, data)
    check_apart(config.path, config.validation_path)
    field = config.text_field
    documents = read_documents(config.path, text_field=field) if config.path else standard_library_files()
    if config.validation_path is None:
        train, validation = split(documents, [each.name for each in documents], config.validation_fraction)
    else:
        train, key = documents, "data.validation_path"
        validation = read_documents(config.validation_path, key=key, text_field=field)
    name = config.tokenizer or default_tokenizer or "bytes"
    tokenizer = None if name == "bytes" else _load_tokenizer(name)
    train_N = _encoded(tokenizer, train)
    if validation:
        validation_N = _encoded(tokenizer, validation)
    else:
        num_train = len(train_N) - round(len(train_N) * config.validation_fraction)
        train_N, validation_N = train_N[:num_train], train_N[num_train:]
    for key, tokens_N in (("data.path", train_N), ("data.validation_path", validation_N)):
        if len(tokens_N) <= sequence_length:
            there = f"{len(train_N)} tokens for training and {len(validation_N)} tokens for validation"
            message = f"too short: {there}, and one sequence of each needs {sequence_length + 1}."
            fix = "more text, another data.validation_fraction, or a shorter hyperparameters.sequence_length"
            raise data_error(key, getattr(config, key.partition(".")[2]), message, fix)
    source = config.path or f"the standard library of Python {platform.python_version()}"
    return TextData(
        train=TokenSequences(train_N, sequence_length),
        validation=TokenSequences(validation_N, sequence_length, config.max_validation_sequences),
        vocab_size=BYTE_VOCAB_SIZE if tokenizer is None else len(tokenizer),
        separator=BYTE_SEPARATOR if tokenizer is None else int(tokenizer.eos_token_id),
        tokenizer=name,
        description=(
            f"{source}, {len(train) + len(validation)} documents as "
            f"{'bytes' if tokenizer is None else f'tokens of {name}'}: "
            f"{len(train_N):,} tokens for training, {len(validation_N):,} for validation"
        ),
    )


def _encoded(tokenizer: Any, documents: Sequence[Document]) -> np.ndarray:
    """tokens_N of the smallest type that holds the vocabulary, the documents joined by a separator; None: bytes."""
    if tokenizer is None:
        joined = bytes([BYTE_SEPARATOR]).join(document.content for document in documents)
        return np.frombuffer(joined, dtype=np.uint8)
    dtype = np.min_scalar_type(len(tokenizer) - 1)
    separator = np.array([tokenizer.eos_token_id], dtype=dtype)
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), TOKENIZER_BATCH):
        # Text from disk is UTF-8 already; a few old files of the standard library are not.
        batch = documents[start : start + TOKENIZER_BATCH]
        texts = [document.content.decode("utf-8", errors="replace") for document in batch]
        # The tokenizer's own limit does not matter here: the text is cut into sequences afterwards.
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
            parts += [np.array(ids, dtype=dtype), separator]
    return np.concatenate(parts[:-1])


def _load_tokenizer(source: str) -> Any:
    from model_defs.common.huggingface import load_tokenizer

    tokenizer = load_tokenizer(source)
    if tokenizer.eos_token_id is None:
        message = "the tokenizer has no eos token, which separates documents."
        fix = 'tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"}), and save it again'
        raise config_error("data.tokenizer", source, message, fix)
    return tokenizer


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
