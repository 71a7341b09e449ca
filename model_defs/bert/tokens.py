"""The tokenizer: a checkpoint's own, or a small one that is trained on the texts at hand.

Legend of shape suffixes: T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from model_defs.common.huggingface import load_tokenizer
from model_defs.common.sections import config_error

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


def padding_tokenizer(source: str, *, key: str = "data.tokenizer") -> Any:
    """A Hugging Face tokenizer, of a folder or by its name on the hub, that can pad.

    Args:
        source: Folder or name.
        key: The configuration key that named it.

    Raises:
        DataError: It cannot be loaded.
        ConfigError: It cannot pad.
    """
    tokenizer = load_tokenizer(source, key=key)
    if tokenizer.pad_token_id is None:
        message = "the tokenizer has no pad token, which fills up short texts."
        add = f'tokenizer.add_special_tokens({{"pad_token": "{PAD}"}})'
        raise config_error(
            key, source, message, f"tokenizer.pad_token = tokenizer.eos_token, or {add}; save it again"
        )
    return tokenizer
