"""Text for a causal language model: documents, packed, in the tokens of the model's own tokenizer.

Documents go one after the other, the end-of-text token after each, and are cut into sequences of
``sequence_length``: nothing is padded, so a tokenizer needs no pad token and every sequence counts the same.
Files, splits and their checks are those of GPT-2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_defs.causal_lm.source import Source
from model_defs.gpt2.data import TextData, load_text, parse_data_config


def load_packed_text(
    data: Mapping[str, Any] | None, sequence_length: int, source: Source | None
) -> tuple[TextData, str | None]:
    """Read, split, tokenize and pack what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`model_defs.gpt2.data.DataConfig`. ``tokenizer``: a folder or a name on the hub;
            ``bytes``; None takes that of the model, and bytes for a model that begins at random.
        sequence_length: T.
        source: Where the model is, or None.

    Returns:
        The text, and the name of its tokenizer; None: bytes.

    Raises:
        ConfigError: The section has unknown keys or wrong values, or the tokenizer has no end-of-text token.
        DataError: What it names cannot be read, is not UTF-8, or is too short for either split.
    """
    tokenizer = parse_data_config(data, sequence_length).tokenizer
    if tokenizer is None and source is not None:
        tokenizer = source.name
    return load_text({**(data or {}), "tokenizer": tokenizer}, sequence_length), tokenizer
