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

KEY = "data.tokenizer"
PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def trained_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A tokenizer of byte pairs, the same for the same texts, on every rank and on every start.

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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        there = Path(source).expanduser().is_dir()
        fix = "a folder written by the tokenizer's save_pretrained, or a name on the hub if it can be reached"
        raise DataError(
            Problem(
                key=key,
                value=source,
                message=f"{'the folder holds no tokenizer' if there else 'no tokenizer'} that can be loaded: {reason}",
                fix=fix if key == KEY else f"{fix}, as {KEY}",
                code="tokenizer",
            )
        ) from error
    if len(tokenizer) <= len(
        set(tokenizer.all_special_ids)
    ):  # transformers makes an empty one of a bare config.json
        message = "there is no vocabulary in it, only special tokens."
        fix = f"save the tokenizer there, too; or name another as {KEY}"
        raise DataError(Problem(key=key, value=source, message=message, fix=fix, code="tokenizer"))
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            Problem(
                key=key,
                value=source,
                message="the tokenizer has no pad token, to make short texts as long as the others with.",
                fix="tokenizer.pad_token = tokenizer.eos_token, or tokenizer.add_special_tokens"
                f'({{"pad_token": "{PAD}"}}); and save it again',
                code="tokenizer-pad",
            )
        )
    return tokenizer
