"""The configuration of the model: that of its checkpoint, or written out in the hyperparameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from determined_ds import SequenceGroup
from determined_ds.errors import ConfigError, Problem
from determined_ds.trial.ulysses import windowed
from model_defs.causal_lm.source import KEY as MODEL_KEY
from model_defs.causal_lm.source import Source, locate, model_error
from model_defs.common.huggingface import first_line

CONFIG_KEY = "hyperparameters.model_config"
SMALL = "model_config: {model_type: llama, hidden_size: 128, num_hidden_layers: 4, ...}"


def find_model(hparams: Mapping[str, Any]) -> Source | None:
    """Where the weights are; None for random weights, by ``model_config``.

    Raises:
        ConfigError: Both or neither are given, or there is nothing at ``model``.
    """
    model, model_config = hparams.get("model"), hparams.get("model_config")
    if model is not None and model_config is not None:
        message, fix = "a model that is loaded has its own configuration.", "leave out model_config, or model"
        raise model_error(CONFIG_KEY, model_config, message, fix)
    if model is None and model_config is None:
        fix = f"model: a folder or a name on the hub; or, from random weights, {SMALL}"
        raise ConfigError(Problem(key=MODEL_KEY, message="neither model nor model_config is given.", fix=fix))
    return None if model is None else locate(model)


def read_config(source: Source | None, model_config: Any, *, vocab_size: int) -> Any:
    """The configuration of the model.

    Args:
        source: Where the weights are, or None.
        model_config: Keys of the configuration class, and ``model_type``, which names it; where ``source`` is None.
        vocab_size: V, for a ``model_config`` that does not say.

    Returns:
        A ``transformers.PreTrainedConfig`` of a causal language model.

    Raises:
        ConfigError: It cannot be read, has unknown keys, or is not of a causal language model.
    """
    config = _written(model_config, vocab_size) if source is None else _loaded(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        key, value = (CONFIG_KEY, config.model_type) if source is None else (MODEL_KEY, source.name)
        message = f"transformers has no causal language model of the type {config.model_type!r}."
        fix = "a model that AutoModelForCausalLM loads, such as llama, mistral, qwen3 or gpt2"
        raise model_error(key, value, message, fix)
    return config


def _loaded(source: Source) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(source.name, **source.options)
    except Exception as error:  # What it raises differs by what is wrong with the file.
        message = f"its configuration cannot be read: {first_line(error)}"
        fix = "save it again with save_pretrained; or install a newer transformers for a newer model_type"
        raise model_error(MODEL_KEY, source.name, message, fix) from error


def _written(given: Any, vocab_size: int) -> Any:
    if not isinstance(given, Mapping) or "model_type" not in given:
        raise model_error(CONFIG_KEY, given, "must be a mapping with a model_type.", SMALL)
    keys = dict(given)
    model_type = keys.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        types = sorted(kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING)
        fix = nearest(model_type, types)
        raise model_error(f"{CONFIG_KEY}.model_type", model_type, "no such type of model.", fix)
    kind = CONFIG_MAPPING[model_type]
    known = {*kind().to_dict(), *kind.attribute_map, "vocab_size"}
    wrong = [key for key in keys if key not in known]
    if wrong:
        raise ConfigError(
            Problem(
                key=f"{CONFIG_KEY}.{key}",
                value=keys[key],
                message=f"{kind.__name__} has no such key.",
                fix=nearest(key, known),
            )
            for key in wrong
        )
    try:
        return kind(**{"vocab_size": vocab_size, **_own_special_tokens(kind, keys), **keys})
    except Exception as error:
        message = f"{kind.__name__} rejects it: {first_line(error)}"
        fix = "sizes that go together, as in a published model's config.json"
        raise model_error(CONFIG_KEY, dict(given), message, fix) from error


def _own_special_tokens(kind: Any, keys: Mapping[str, Any]) -> dict[str, None]:
    """No special tokens but those given: a class's defaults belong to another vocabulary."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {} if "vocab_size" in keys else {name: None for name in names if hasattr(kind(), name)}


def check_fit(config: Any, *, vocab_size: int, sequence_length: int, tokenizer: str) -> None:
    """Check that the model's vocabulary has the text's tokens, and its positions the sequences.

    Args:
        config: The model's configuration.
        vocab_size: Tokens that the tokenizer knows.
        sequence_length: T.
        tokenizer: Name of the tokenizer.

    Raises:
        ConfigError: Everything that does not fit.
    """
    text = config.get_text_config()
    problems = []
    if vocab_size > text.vocab_size:
        message = f"has {vocab_size} tokens, and the model's vocabulary {text.vocab_size}."
        fix = (
            "the tokenizer that the model was trained with (data.tokenizer: null takes the model's own), "
            f"or model_config.vocab_size: {vocab_size} for a model with random weights"
        )
        problems.append(Problem(key="data.tokenizer", value=tokenizer, message=message, fix=fix))
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and sequence_length > positions > 0:
        key, fix = "hyperparameters.sequence_length", f"sequence_length: {positions} or less"
        message = f"must be at most {positions}, the positions that the model has."
        problems.append(Problem(key=key, value=sequence_length, message=message, fix=fix))
    if problems:
        raise ConfigError(problems)


def check_sliced(config: Any, sequence: SequenceGroup, sequence_length: int, *, isolated: bool) -> None:
    """Check that ranks may share the model's sequences.

    Args:
        config: The model's configuration.
        sequence: The ranks that share them.
        sequence_length: T.
        isolated: Whether tokens are to attend within their documents.

    Raises:
        ConfigError: Its heads cannot be shared out, or it attends to less than all tokens before.
    """
    text = config.get_text_config()
    sequence.check_heads(text.num_attention_heads, getattr(text, "num_key_value_heads", None))
    window = getattr(text, "sliding_window", None)
    is_windowed = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    if isinstance(window, int) and is_windowed and window < sequence_length:
        raise windowed(window, sequence_length)
    if isolated:
        message = "ranks that share a sequence attend to all tokens before, and are given no mask."
        fix = "attend_across_documents: true, or sequence_parallel_size: 1"
        raise model_error("hyperparameters.attend_across_documents", False, message, fix)


def nearest(word: Any, known: Iterable[str]) -> str:
    """A fix that names the known words that are like ``word``."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"one of {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
