"""Weights of a Hugging Face checkpoint, into the whole GPT-2 or into any of its pipeline layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import Tensor, nn

from model_defs.common.huggingface import KEY, misfit, shortened, unloadable
from model_defs.common.sections import config_error
from model_defs.gpt2.model import parameters_by_huggingface_name


@torch.no_grad()
def load_pretrained(module: nn.Module, source: str) -> None:
    """Load a checkpoint's weights by their Hugging Face names; of safetensors, those the module lacks are not read.

    Nothing is changed unless everything fits.

    Args:
        module: A :class:`model_defs.gpt2.model.GPT2`, a pipeline layer, or a container of layers.
        source: A folder written by ``save_pretrained``, or a name on the Hugging Face hub such as ``gpt2``.

    Raises:
        ConfigError: The folder is missing, holds no weights, or its tensors are missing or of other shapes.
    """
    parameters = parameters_by_huggingface_name(module)
    tensors: dict[str, Tensor] = {}
    folder = Path(source).expanduser()
    try:
        files = sorted(folder.glob("*.safetensors"))
        if (index := folder / "model.safetensors.index.json").is_file():
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        for file in files:
            try:
                opened: Any = safetensors.safe_open(file, framework="pt")
            except Exception as error:
                raise OSError(f"{file.name}: {error}") from error
            with opened:
                for stored in opened.keys():  # noqa: SIM118 -- not a mapping
                    # GPT-2 as first published names its tensors without the prefix that is saved today.
                    has_prefix = stored.startswith(("transformer.", "lm_head."))
                    name = stored if has_prefix else f"transformer.{stored}"
                    if name in parameters:
                        tensors[name] = opened.get_tensor(stored)
        if not files:
            model, info = transformers.GPT2LMHeadModel.from_pretrained(source, output_loading_info=True)
            tensors = model.state_dict()
            for name in info["missing_keys"]:  # transformers has drawn them at random
                del tensors[name]
    except Exception as error:  # What is raised differs by what is missing, broken or out of reach.
        raise unloadable(source, error) from error
    wrong = [
        f"{name} is missing" if name not in tensors else misfit(name, tensors[name].shape, parameter.shape)
        for name, parameter in parameters.items()
        if name not in tensors or tensors[name].shape != parameter.shape
    ]
    if wrong:
        message = f"{len(wrong)} of {len(parameters)} tensors do not fit: {shortened(wrong)}."
        fix = "the model_size, data.tokenizer and sequence_length that the checkpoint was trained with"
        raise config_error(KEY, source, message, fix)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
