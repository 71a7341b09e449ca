"""The configuration of the model: that of its checkpoint, or written out in the hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from determined_ds.documents.document import one_of
from model_defs.common.huggingface import first_line, unloadable
from model_defs.common.sections import config_error

MODEL_KEY, CONFIG_KEY = "hyperparameters.model", "hyperparameters.model_config"
SMALL = "model_config: {model_type: llama, hidden_size: 128, num_hidden_layers: 4, ...}"
SIZES = "sizes that go together, as in a published model's config.json"


def find_model(hparams: Mapping[str, Any]) -> str | None:
    """Where the weights are, a folder or a name on the hub; None for random weights, by ``model_config``.

    Raises:
        ConfigError: Both or neither are given, or ``model`` is a path at which there is no folder.
    """
    model, model_config = hparams.get("model"), hparams.get("model_config")
    if (model is None) == (model_config is None):
        fix = f"model: a folder or a name on the hub; or, from random weights, {SMALL}"
        raise config_error(MODEL_KEY, model, "one of model and model_config must be given.", fix)
    if model is None:
        return None
    folder = Path(str(model)).expanduser()
    if not isinstance(model, str) or (model.startswith(("/", ".", "~")) and not folder.is_dir()):
        fix = "a folder that every slot can read, or a name on the hub such as Qwen/Qwen3-0.6B"
        raise config_error(MODEL_KEY, model, "is neither a folder here nor a name on the hub.", fix)
    return str(folder) if folder.is_dir() else model


def read_config(source: str | None, model_config: Any, *, vocab_size: int) -> Any:
    """The configuration of the model.

    Args:
        source: Where the weights are, or None.
        model_config: Keys of the configuration class, and ``model_type``, which names it; where ``source`` is None.
        vocab_size: V, for a ``model_config`` that does not say.

    Returns:
        A ``transformers.PreTrainedConfig`` of a causal language model.

    Raises:
        ConfigError: It cannot be read, has an unknown key, or is not of a causal language model.
    """
    if source is not None:
        key, value = MODEL_KEY, source
        try:
            config = transformers.AutoConfig.from_pretrained(source)
        except Exception as error:  # What it raises differs by what is wrong with the file.
            raise unloadable(source, error, MODEL_KEY) from error
    elif not isinstance(model_config, Mapping) or model_config.get("model_type") not in CONFIG_MAPPING:
        message = "must be a mapping with a model_type that transformers has."
        raise config_error(CONFIG_KEY, model_config, message, SMALL)
    else:
        key, value, kind = CONFIG_KEY, model_config["model_type"], CONFIG_MAPPING[model_config["model_type"]]
        keys = {name: given for name, given in model_config.items() if name != "model_type"}
        default = kind()
        known = {*default.to_dict(), *kind.attribute_map, "vocab_size"}
        for name in keys.keys() - known:  # transformers would keep it, and read it nowhere
            fix = one_of(sorted(known), name)
            raise config_error(f"{CONFIG_KEY}.{name}", keys[name], f"{kind.__name__} has no such key.", fix)
        if "vocab_size" not in keys:  # a class's own special tokens belong to another vocabulary
            special = ("bos_token_id", "eos_token_id", "pad_token_id")
            own = {name: None for name in special if hasattr(default, name)}
            keys = {"vocab_size": vocab_size, **own, **keys}
        try:
            config = kind(**keys)
        except Exception as error:
            message = f"{kind.__name__} rejects it: {first_line(error)}"
            raise config_error(CONFIG_KEY, dict(model_config), message, SIZES) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        message = f"transformers has no causal language model of the type {config.model_type!r}."
        fix = "a model that AutoModelForCausalLM loads, such as llama, mistral, qwen3 or gpt2"
        raise config_error(key, value, message, fix)
    return config


def check_fit(config: Any, *, vocab_size: int, sequence_length: int) -> None:
    """Check that the model's vocabulary has the tokenizer's tokens, and its positions the sequences."""
    text = config.get_text_config()
    if vocab_size > text.vocab_size:
        message = f"has {vocab_size} tokens, and the model's vocabulary {text.vocab_size}."
        fix = f"data.tokenizer: null, which takes the model's own; or model_config.vocab_size: {vocab_size}"
        raise config_error("data.tokenizer", None, message, fix)
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and sequence_length > positions > 0:
        key, message = "hyperparameters.sequence_length", f"the model has {positions} positions."
        raise config_error(key, sequence_length, message, f"sequence_length: {positions} or less")


def check_sliced(config: Any, sequence_length: int) -> None:
    """Check that each token attends to all before it, as where ranks share sequences."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    is_windowed = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    if isinstance(window, int) and is_windowed and window < sequence_length:
        key, message = (
            "hyperparameters.sequence_length",
            f"the model attends to the last {window} tokens alone,",
        )
        message += " and ranks that share sequences to all."
        raise config_error(key, sequence_length, message, f"sequence_length: {window} or less")
