"""The shape of the model that a Hugging Face configuration describes, built on torch's meta device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.model_shape import ModelShape
from determined_ds.runtime.shapes.counted import quietly, shape_of_built
from determined_ds.runtime.shapes.live_bytes import first_sentence, try_to_measure

LONGEST_ASSUMED = 2048


def shape_of_huggingface(
    source: Path, *, sequence_length: int | None = None, precision: str = "bf16"
) -> ModelShape:
    """The shape of the model that a Hugging Face configuration describes.

    Args:
        source: A ``config.json``, or the folder that holds one.
        sequence_length: Tokens of a sample; what the model has room for, up to 2048, if None.
        precision: What it is trained in: ``bf16``, ``fp16`` or ``fp32``.

    Raises:
        ConfigError: there is no such file, it is no configuration, or transformers does not know the model.
    """
    file = source / "config.json" if source.is_dir() else source
    if not file.is_file():
        message = "has no config.json in it" if source.is_dir() else "no such file or folder"
        raise _huggingface(source, message, "give a config.json, or the folder that save_pretrained wrote")
    try:
        import transformers
    except ImportError:
        message, fix = "needs the package transformers", "pip install 'determined-ds[models]'"
        raise _huggingface(source, message, fix) from None
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _huggingface(
            source,
            first_sentence(error),
            "give a config.json of a model_type that the installed transformers has",
        ) from None
    text = config.get_text_config()
    room = getattr(text, "max_position_embeddings", None) or LONGEST_ASSUMED
    assumptions: tuple[str, ...] = ()
    if sequence_length is None:
        sequence_length = min(room, LONGEST_ASSUMED)
        assumptions = (f"samples of {sequence_length:,} tokens (--sequence-length)",)
    try:
        with torch.device("meta"), quietly():
            model = _huggingface_model(config)
    except Exception as error:
        raise _huggingface(
            source, f"cannot be built: {first_sentence(error)}", "say its size with --params"
        ) from error

    def loss(arguments: dict[str, Any], samples: int) -> Any:
        tokens = torch.zeros(samples, sequence_length, dtype=torch.long, device="meta")
        return model(input_ids=tokens, labels=tokens, **arguments).loss

    # A mask of its own keeps a model from looking at values for padding, which a meta tensor has none of; but not
    # every model takes one.
    mask = torch.ones(1, 1, sequence_length, sequence_length, dtype=torch.bool, device="meta")
    more: tuple[str, ...] = ()
    measured = None
    for arguments in ({"attention_mask": mask, "use_cache": False}, {}):
        if measured is None:
            with quietly():
                measured, more = try_to_measure(model, partial(loss, arguments), precision)
    return shape_of_built(
        model,
        text,
        sequence_length=sequence_length,
        activations=measured,
        assumptions=(*assumptions, *more),
    )


def _huggingface_model(config: Any) -> Any:
    import transformers

    names = [name for name in (config.architectures or ()) if hasattr(transformers, name)]
    if names:
        return getattr(transformers, names[0])._from_config(config)
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM.from_config(config)
    return transformers.AutoModel.from_config(config)


def _huggingface(source: Path, message: str, fix: str) -> ConfigError:
    return ConfigError(
        Problem(key="--hf-config", value=str(source), message=message, fix=fix, code="hf-config")
    )
