"""The tokenizer: a checkpoint's own, or a small one that is trained on the texts at hand.

Legend of shape suffixes: T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from determined_ds.errors import ConfigError, DataError, Problem
from model_defs.common.huggingface import first_line

KEY = "data.tokenizer"
PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


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


def load_tokenizer(source: str, *, key: str = KEY) -> Any:
    """A Hugging Face tokenizer, of a folder or by its name on the hub.

    Args:
        source: Folder or name.
        key: The configuration key that named it.

    Raises:
        DataError: It cannot be loaded.
        ConfigError: It cannot pad.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except Exception as error:  # What it raises differs by the file that is missing or broken.
        what = "the folder holds no tokenizer" if Path(source).expanduser().is_dir() else "no tokenizer"
        fix = "a folder written by the tokenizer's save_pretrained, or a name on the hub if it can be reached"
        message = f"{what} that can be loaded: {first_line(error)}"
        raise DataError(_problem(key, source, message, fix if key == KEY else f"{fix}, as {KEY}")) from error
    # transformers makes an empty tokenizer of a bare config.json.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        message = "there is no vocabulary in it, only special tokens."
        fix = f"save the tokenizer there, too; or name another as {KEY}"
        raise DataError(_problem(key, source, message, fix))
    if tokenizer.pad_token_id is None:
        message = "the tokenizer has no pad token, which fills up short texts."
        add = f'tokenizer.add_special_tokens({{"pad_token": "{PAD}"}})'
        fix = f"tokenizer.pad_token = tokenizer.eos_token, or {add}; and save it again"
        raise ConfigError(_problem(key, source, message, fix))
    return tokenizer


def _problem(key: str, source: str, message: str, fix: str) -> Problem:
    return Problem(key=key, value=source, message=message, fix=fix, code="tokenizer")
