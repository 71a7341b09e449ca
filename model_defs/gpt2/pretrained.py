"""Weights of a Hugging Face checkpoint, into the whole GPT-2 or into any of its pipeline layers.

Of a folder of safetensors a rank reads just the tensors that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import Tensor, nn

from determined_ds.errors import ConfigError, Problem
from model_defs.common.huggingface import first_line, is_path, misfit, pretrained_error, shortened
from model_defs.gpt2.model import MODEL_SIZES, parameters_by_huggingface_name

INDEX_NAME = "model.safetensors.index.json"


@torch.no_grad()
def load_pretrained(module: nn.Module, source: str | Path) -> None:
    """Load a checkpoint's weights by their Hugging Face names; those the module lacks are not read.

    Nothing is changed unless everything fits.

    Args:
        module: A :class:`model_defs.gpt2.model.GPT2`, a pipeline layer, or a container of layers.
        source: A folder written by ``save_pretrained``, or a name on the Hugging Face hub such as ``gpt2``.

    Raises:
        ConfigError: The folder is missing, holds no weights, or its tensors are missing or of other shapes.
    """
    parameters = parameters_by_huggingface_name(module)
    tensors = _read_checkpoint(str(source), parameters)
    wrong = [
        f"{name} is missing" if name not in tensors else misfit(name, tensors[name].shape, parameter.shape)
        for name, parameter in parameters.items()
        if name not in tensors or tensors[name].shape != parameter.shape
    ]
    if wrong:
        message = f"{len(wrong)} of {len(parameters)} tensors do not fit: {shortened(wrong)}."
        raise pretrained_error(source, message, _fix_of_misfit(Path(source)))
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _read_checkpoint(source: str, wanted: Collection[str]) -> dict[str, Tensor]:
    """Canonical name -> tensor, of the wanted names that the checkpoint has."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        files = _safetensors_files(folder)
        if files:
            return _read_safetensors(source, files, wanted)
        if not any(folder.glob("*.bin")):
            message = "the folder holds no weights (neither *.safetensors nor *.bin)."
            fix = "a folder written by save_pretrained, with config.json and model.safetensors in it"
            raise pretrained_error(source, message, fix)
        source = str(folder)
    elif is_path(source):
        fix = "a folder that every slot can read, or a name on the Hugging Face hub such as gpt2"
        raise pretrained_error(source, "no such folder.", fix)
    return _read_with_transformers(source)


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            message = f"{INDEX_NAME} is not an index: {error!r}."
            raise pretrained_error(folder, message, "save the checkpoint again") from error
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _read_safetensors(source: str, files: list[Path], wanted: Collection[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                stored_names = opened.keys()
                for stored in stored_names:
                    name = _canonical(stored)
                    if name in wanted:
                        tensors[name] = opened.get_tensor(stored)
        except (OSError, safetensors.SafetensorError) as error:
            fix = "save or copy the checkpoint again: one of its files is missing or cut short"
            problems += pretrained_error(source, f"{file.name} cannot be read: {error}.", fix).problems
    if problems:
        raise ConfigError(problems)
    return tensors


def _read_with_transformers(source: str) -> dict[str, Tensor]:
    try:
        model, info = transformers.GPT2LMHeadModel.from_pretrained(source, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        message = f"neither a folder here nor a GPT-2 that Hugging Face can load: {first_line(error)}"
        fix = "a folder written by save_pretrained, or a name on the hub such as gpt2, if it can be reached"
        raise pretrained_error(source, message, fix) from error
    # What the checkpoint lacks, transformers has drawn at random.
    missing = set(info["missing_keys"])
    return {name: tensor for name, tensor in model.state_dict().items() if name not in missing}


def _canonical(stored: str) -> str:
    """GPT-2 as first published names its tensors without the ``transformer.`` that is saved today."""
    return stored if stored.startswith(("transformer.", "lm_head.")) else f"transformer.{stored}"


def _fix_of_misfit(folder: Path) -> str:
    """The hyperparameters of a model that the checkpoint fits, from its configuration."""
    try:
        config: dict[str, Any] = json.loads((folder.expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        return "the model_size, data.tokenizer and sequence_length that the checkpoint was trained with"
    depth_and_width = {key: config.get(key) for key in ("n_layer", "n_embd", "n_head")}
    sizes = [name for name, size in MODEL_SIZES.items() if size == depth_and_width]
    model_size = f"model_size: {sizes[0]}" if sizes else f"a model_size with {depth_and_width}"
    return (
        f"{model_size}, a data.tokenizer of {config.get('vocab_size')} tokens and "
        f"room for {config.get('n_positions')} positions, as the checkpoint has"
    )
