"""Weights of a Hugging Face checkpoint, into the whole GPT-2 or into any of its pipeline layers."""

from __future__ import annotations

import torch
import transformers
from torch import nn

from model_defs.common.huggingface import KEY, misfits, quiet, unloadable
from model_defs.common.sections import config_error
from model_defs.gpt2.model import parameters_by_huggingface_name


@torch.no_grad()
def load_pretrained(module: nn.Module, source: str) -> None:
    """Load a checkpoint's weights by their Hugging Face names; nothing is changed unless everything fits.

    Args:
        module: A :class:`model_defs.gpt2.model.GPT2`, a pipeline layer, or a container of layers.
        source: A folder written by ``save_pretrained``, or a name on the Hugging Face hub such as ``gpt2``.

    Raises:
        ConfigError: The checkpoint cannot be loaded, or its tensors are missing or of other shapes.
    """
    try:
        with quiet():
            model, info = transformers.GPT2LMHeadModel.from_pretrained(
                source,
                ignore_mismatched_sizes=True,  # they are refused below
                output_loading_info=True,
                dtype=torch.float32,
            )
    except Exception as error:  # What is raised differs by what is missing, broken or out of reach.
        raise unloadable(source, error) from error
    parameters, tensors = parameters_by_huggingface_name(module), model.state_dict()
    info["mismatched_keys"] |= {
        (name, tensors[name].shape, parameter.shape)
        for name, parameter in parameters.items()
        if tensors[name].shape != parameter.shape
    }
    if wrong := misfits(info):
        fix = "the model_size, data.tokenizer and sequence_length that the checkpoint was trained with"
        raise config_error(KEY, source, f"its weights do not fit: {wrong}.", fix)
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
