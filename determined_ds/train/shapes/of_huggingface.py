"""The shape of the model that a Hugging Face configuration describes, built on torch's meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.model import ModelShape
from determined_ds.train.shapes.counting import first_sentence, quietly, shape_of_built, try_to_measure

LONGEST_ASSUMED = 2048
Refuse = Callable[[str, str], ConfigError]  # of a message and its fix, with the place of the configuration


def shape_of_huggingface(
    source: Path, *, sequence_length: int | None = None, precision: str = "bf16"
) -> ModelShape:
    """The shape of the model that a Hugging Face configuration describes.

    Args:
        source: A ``config.json``, or the folder that holds one.
        sequence_length: Tokens of a sample; the model's maximum, up to 2048, if None.
        precision: What it is trained in: ``bf16``, ``fp16`` or ``fp32``.

    Raises:
        ConfigError: the file is missing or not a configuration, or transformers does not know the model.
    """
    refuse = partial(_refused, source)
    config = read_config(source, refuse)
    assumptions: tuple[str, ...] = ()
    if sequence_length is None:
        room = getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST_ASSUMED
        sequence_length = min(room, LONGEST_ASSUMED)
        assumptions = (f"samples of {sequence_length:,} tokens (--sequence-length)",)
    return shape_of_config(
        config, sequence_length=sequence_length, precision=precision, assumptions=assumptions, refuse=refuse
    )


def shape_of_config(
    config: Any, *, sequence_length: int, precision: str, assumptions: tuple[str, ...], refuse: Refuse
) -> ModelShape:
    """The shape of a configuration's model; its activations are measured.

    Args:
        config: Of transformers.
        sequence_length: Tokens of a sample; 0 where they are not known, and then neither are the activations.
        precision: As for :func:`shape_of_huggingface`.
        assumptions: What was assumed, in words.
        refuse: Makes the error of a model that cannot be built.

    Raises:
        ConfigError: it cannot be built.
    """
    try:
        with torch.device("meta"), quietly():
            model = _model_of(config)
    except Exception as error:
        raise refuse(f"cannot be built: {first_sentence(error)}", "say its size with --parameters") from error

    def loss(arguments: dict[str, Any], samples: int) -> Any:
        tokens = torch.zeros(samples, sequence_length, dtype=torch.long, device="meta")
        return model(input_ids=tokens, labels=tokens, **arguments).loss

    # An explicit mask keeps a model from looking for padding in values, which a meta tensor lacks; but not every model
    # takes one.
    mask = torch.ones(1, 1, sequence_length, sequence_length, dtype=torch.bool, device="meta")
    more: tuple[str, ...] = ()
    measured = None
    for arguments in ({"attention_mask": mask, "use_cache": False}, {}) if sequence_length else ():
        if measured is None:
            with quietly():
                measured, more = try_to_measure(model, partial(loss, arguments), precision)
    known = {"activations": measured, "assumptions": (*assumptions, *more)}
    return shape_of_built(model, config.get_text_config(), sequence_length=sequence_length, **known)


def read_config(source: Path | Mapping[str, Any], refuse: Refuse) -> Any:
    """A configuration of transformers; nothing is loaded from the hub.

    Args:
        source: A ``config.json``, the folder that holds one, or the same as a mapping with a ``model_type``.
        refuse: Makes the error.

    Raises:
        ConfigError: it is not there, or transformers does not know it.
    """
    file = source / "config.json" if isinstance(source, Path) and source.is_dir() else source
    if isinstance(file, Path) and not file.is_file():
        message = "has no config.json in it" if file != source else "no such file or folder"
        raise refuse(message, "give a config.json, or the folder that save_pretrained wrote")
    try:
        import transformers
    except ImportError:
        raise refuse("needs the package transformers", "pip install 'determined-ds[models]'") from None
    transformers.logging.set_verbosity_error()
    try:
        if isinstance(file, Path):
            return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
        return transformers.AutoConfig.for_model(**file)
    except Exception as error:  # transformers checks a configuration with errors of huggingface_hub, too
        by_hub = type(error).__module__.startswith("huggingface_hub") and error.__cause__
        fix = "give a config.json of a model_type that the installed transformers has"
        raise refuse(first_sentence(by_hub or error), fix) from None


def _model_of(config: Any) -> Any:
    import transformers

    names = [name for name in (config.architectures or ()) if hasattr(transformers, name)]
    if names:
        return getattr(transformers, names[0])._from_config(config)
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM.from_config(config)
    return transformers.AutoModel.from_config(config)


def _refused(source: Path, message: str, fix: str) -> ConfigError:
    problem = Problem(key="--hf-config", value=str(source), message=message, fix=fix, code="hf-config")
    return ConfigError(problem)
