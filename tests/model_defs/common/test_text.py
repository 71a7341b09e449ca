"""Text becomes sequences: all of it, the same everywhere, and nothing of validation in training."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_defs.common.text import TokenSequences, load_text
from tests.model_defs.words import WORDS, save_tokenizer
from tests.package import refusal


@pytest.fixture
def corpus(tmp_path):
    """Forty files of ten lines; each line names its file."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"file {number:02}\n" * 10)
    return folder


def text_of(sequences: TokenSequences) -> bytes:
    return sequences.tokens_N.tobytes()


# --- windows ---


@given(num_tokens=st.integers(0, 200), sequence_length=st.integers(1, 30))
def test_windows_cover_the_text_but_for_a_last_one_that_is_not_full(num_tokens, sequence_length):
    sequences = TokenSequences(np.arange(num_tokens, dtype=np.uint8), sequence_length)
    seen = []
    for tokens_T, targets_T in sequences:
        assert tokens_T.dtype == targets_T.dtype == torch.int64
        assert len(tokens_T) == sequence_length
        assert torch.equal(tokens_T[1:], targets_T[:-1])
        seen += [*tokens_T.tolist(), targets_T[-1].item()]
    assert seen == list(range(len(seen)))
    assert 0 <= num_tokens - len(seen) <= sequence_length


# --- the default: bytes of the standard library ---


def test_by_default_the_standard_library_as_bytes():
    data, again = load_text({}, 128), load_text(None, 128)
    assert (data.vocab_size, data.train.tokens_N.dtype, len(data.validation)) == (256, np.uint8, 512)
    assert len(data.train) > 10_000
    assert text_of(again.train) == text_of(data.train)
    assert text_of(again.validation) == text_of(data.validation)


# --- training and validation ---


def test_no_file_is_on_both_sides_and_every_file_on_one(corpus):
    data = load_text({"path": str(corpus), "validation_fraction": 0.25}, 4)
    sides = [
        set(text_of(side).replace(b"\0", b"").split(b"\n")) - {b""} for side in (data.train, data.validation)
    ]
    train, validation = sides
    assert not train & validation
    assert len(train | validation) == 40
    assert 4 <= len(validation) <= 18


def test_a_validation_path_leaves_all_of_the_path_to_training(corpus, tmp_path):
    file = tmp_path / "held_out.md"
    file.write_text("held out " * 10)
    data = load_text({"path": str(corpus), "validation_path": str(file)}, 4)
    assert text_of(data.validation) == file.read_bytes()
    assert text_of(data.train) == b"\0".join(each.read_bytes() for each in sorted(corpus.iterdir()))


# --- tokenizers ---


def test_a_tokenizers_documents_are_joined_by_its_eos_token(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one two", "three", "six four")))
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("four three two one")
    folder = save_tokenizer(tmp_path / "tokenizer", eos_token="<eos>")
    config = {"path": str(file), "validation_path": str(held_out), "tokenizer": folder}
    data = load_text(config, 3)
    assert data.vocab_size == len(WORDS)
    assert data.train.tokens_N.tolist() == [2, 3, 1, 4, 1, 0, 5]
    assert data.validation.tokens_N.tolist() == [5, 4, 3, 2]
    assert data.train.tokens_N.dtype == np.uint8


# --- what cannot be ---


def test_text_too_short_says_what_there_is_and_what_would_do(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("x" * 100)
    problem = refusal(lambda: load_text({"path": str(file), "validation_fraction": 0.1}, 16))
    assert "90 tokens for training and 10 tokens for validation" in problem.message
    assert "sequence_length" in problem.fix
    assert len(load_text({"path": str(file), "validation_fraction": 0.1}, 9).validation) == 1
