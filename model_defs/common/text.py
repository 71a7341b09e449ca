"""Text for language models: rows -> tokens -> sequences for training and for validation.

Everything is decided by the configuration and the files: the same on every rank, and again on every resume.
Texts are joined by a separator and cut into sequences of one length: nothing is padded.

Legend of shape suffixes: B batch, T tokens of a sequence, V vocabulary, N tokens of the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from determined_ds import SequenceGroup
from model_defs.common.files import check_apart, split
from model_defs.common.huggingface import load_tokenizer
from model_defs.common.rows import Row, read_rows, standard_library
from model_defs.common.sections import Section, data_error, parse_section

BYTE_VOCAB_SIZE = 256
# Ends a text where tokens are bytes: the one byte that text does not contain.
BYTE_SEPARATOR = 0
TOKENIZER_BATCH = 1000


class DataConfig(Section, extra="forbid"):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """Text files or tables, a file or a folder; None: the standard library of the running Python."""
    tokenizer: str | None = Field(None, min_length=1)
    """Folder of a Hugging Face tokenizer, or its name on the hub; None or "bytes": bytes, a vocabulary of 256."""
    text_column: str = Field("text", min_length=1)
    """Column of a table, or field of JSON lines, that holds the text."""
    validation_fraction: float = Field(0.05, gt=0, lt=1)
    """About this part of the texts is for validation; of a single text, its tail."""
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
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        start = index * self.num_windows // self.num_sequences * (self.sequence_length + 1)
        # The copy to int64 is what embedding and cross entropy take; the text itself stays compact.
        both = torch.from_numpy(self.tokens_N[start : start + self.sequence_length + 1].astype(np.int64))
        return both[:-1], both[1:]


class TextData(NamedTuple):
    """Text, ready to train on; no token of ``validation`` is in ``train``."""

    train: TokenSequences
    validation: TokenSequences
    vocab_size: int
    """V, what the model must be built for."""
    tokenizer: Any
    """Of Hugging Face; None: tokens are bytes."""

    def export_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files for users of exported weights; bytes need none."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def load_text(
    data: Mapping[str, Any] | None, sequence_length: int, *, default_tokenizer: str | None = None
) -> TextData:
    """Read, split and tokenize what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        sequence_length: T, tokens of a sequence, at least 1.
        default_tokenizer: Where the section names none; None: bytes.

    Raises:
        ConfigError: Unknown keys or invalid values in ``data``, all of them.
        DataError: What the section names cannot be read, or is too short.
    """
    config = parse_section(DataConfig, data, section="data")
    check_apart(config.path, config.validation_path)
    rows = read_rows(config.path, text=config.text_column) if config.path else standard_library()
    if config.validation_path is None:
        train, validation = split(rows, config.validation_fraction, by=lambda row: row.name)
    else:
        train, key = rows, "data.validation_path"
        validation = read_rows(config.validation_path, key=key, text=config.text_column)
    name = config.tokenizer or default_tokenizer or "bytes"
    tokenizer = None if name == "bytes" else load_tokenizer(name)
    if tokenizer is not None and tokenizer.eos_token_id is None:
        message = "the tokenizer has no eos token, which separates texts."
        fix = 'tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"}), and save it again'
        raise data_error("data.tokenizer", name, message, fix)
    train_N = _encoded(tokenizer, train)
    if validation:
        validation_N = _encoded(tokenizer, validation)
    else:
        num_train = len(train_N) - round(len(train_N) * config.validation_fraction)
        train_N, validation_N = train_N[:num_train], train_N[num_train:]
    for path, tokens_N in (("path", train_N), ("validation_path", validation_N)):
        if len(tokens_N) <= sequence_length:
            there = f"{len(train_N)} tokens for training and {len(validation_N)} tokens for validation"
            message = f"too short: {there}, and one sequence of each needs {sequence_length + 1}."
            fix = "more text, another data.validation_fraction, or a shorter hyperparameters.sequence_length"
            raise data_error(f"data.{path}", getattr(config, path), message, fix)
    return TextData(
        train=TokenSequences(train_N, sequence_length),
        validation=TokenSequences(validation_N, sequence_length, config.max_validation_sequences),
        vocab_size=BYTE_VOCAB_SIZE if tokenizer is None else len(tokenizer),
        tokenizer=tokenizer,
    )


def _encoded(tokenizer: Any, rows: Sequence[Row]) -> np.ndarray:
    """tokens_N of the smallest type that holds the vocabulary, the texts joined by a separator; None: bytes."""
    texts = [row.text for row in rows if row.text]
    if tokenizer is None:
        joined = bytes([BYTE_SEPARATOR]).join(text.encode() for text in texts)
        return np.frombuffer(joined, dtype=np.uint8)
    dtype = np.min_scalar_type(len(tokenizer) - 1)
    separator = np.array([tokenizer.eos_token_id], dtype=dtype)
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), TOKENIZER_BATCH):
        batch = texts[start : start + TOKENIZER_BATCH]
        # The tokenizer's own limit does not matter here: the text is cut into sequences afterwards.
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            parts += [np.array(ids, dtype=dtype), separator]
    return np.concatenate(parts[:-1])


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor, sequence: SequenceGroup | None = None) -> Tensor:
    """Mean cross entropy in nats a token, a float32 scalar whatever the logits' type.

    Args:
        logits_BTV: Floating point of any width.
        targets_BT: int64 token ids in [0, V).
        sequence: The ranks whose slices of the sequences count together; None: they are whole.
    """
    logits, targets = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    if sequence is None or sequence.size == 1:
        return functional.cross_entropy(logits, targets)
    return sequence.mean(functional.cross_entropy(logits, targets, reduction="sum"), targets.numel())
