"""A tokenizer of a few words, as a model's folder holds it."""

from __future__ import annotations

from pathlib import Path

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

WORDS = ["<unk>", "<eos>", "one", "two", "three", "four"]


def save_tokenizer(folder: Path, words: list[str] = WORDS, **special_tokens: str) -> str:
    """Write one that knows these words, numbered in their order; its folder."""
    known = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=known, unk_token="<unk>", **special_tokens
    )
    tokenizer.save_pretrained(folder)
    return str(folder)
