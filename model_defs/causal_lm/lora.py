"""LoRA: small matrices beside frozen ones are trained, by way of ``peft``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field
from torch import nn
from transformers.pytorch_utils import Conv1D

from determined_ds.documents.document import one_of
from model_defs.common.huggingface import first_line
from model_defs.common.parameters import seed_of
from model_defs.common.sections import Section, config_error, parse_section

KEY = "hyperparameters.lora"
ALL_LINEAR = "all-linear"
ADAPTER_FOLDER = "adapter"


def _targets(given: list[str] | str | None) -> list[str] | str:
    """A list of names, or :data:`ALL_LINEAR`."""
    if given == []:
        raise ValueError("no names")
    return given if isinstance(given, list) or given == ALL_LINEAR else [given] if given else ALL_LINEAR


class LoraOptions(Section):
    """The ``lora`` section of the hyperparameters, in ``peft``'s words."""

    r: int = Field(8, ge=1)
    """Rank of the update of each matrix."""
    alpha: float = Field(16, gt=0)
    """The update counts alpha / r times."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of an input of the update to be dropped."""
    target_modules: Annotated[list[str] | str | None, AfterValidator(_targets)] = ALL_LINEAR
    """Modules that get one, a name or a list of names; all-linear: every matrix but the head."""


def parse_lora(hparams: Mapping[str, Any]) -> LoraOptions | None:
    """The hyperparameter ``lora``, with the ``target_modules`` beside it; None where there is no LoRA.

    A master draws two hyperparameters of one mapping in random order, so a search has ``target_modules`` beside
    ``lora`` and not in it.

    Raises:
        ConfigError: Everything that is wrong.
    """
    given, targets = hparams.get("lora"), hparams.get("target_modules")
    if targets is not None:
        if not isinstance(given, Mapping) or given.get("target_modules") not in (None, targets):
            message = "needs a section lora, without other target_modules in it."
            raise config_error("hyperparameters.target_modules", targets, message, "lora: {r: 8, alpha: 16}")
        given = {**given, "target_modules": targets}
    return None if given is None or given is False else parse_section(LoraOptions, given, section=KEY)


def with_lora(model: Any, options: LoraOptions, *, seed: int) -> Any:
    """A model with adapters, which alone are trained; they begin as no change, the same on every rank.

    Args:
        model: A ``transformers.PreTrainedModel``, whole or partitioned.
        options: What is adapted, and how.
        seed: Of the adapters' draw.

    Returns:
        A ``peft.PeftModel``.

    Raises:
        ConfigError: A target is not in the model, or of a kind that peft cannot adapt.
    """
    import peft

    if isinstance(options.target_modules, list):
        kinds = (nn.Linear, nn.Embedding, Conv1D)
        names = [f".{name}" for name, module in model.named_modules() if isinstance(module, kinds)]
        for target in options.target_modules:
            if not any(name.endswith(f".{target}") for name in names):
                known = sorted({name.rpartition(".")[2] for name in names})
                message = f"no matrix of {type(model).__name__} has this name."
                raise config_error(f"{KEY}.target_modules", target, message, one_of(known, target))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.r,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft multiplies by it
        lora_dropout=options.dropout,
        target_modules=options.target_modules,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers'
        # peft draws on the CPU, and then moves what it drew
        torch.random.default_generator.manual_seed(seed_of(seed, "lora"))
        try:
            # In the type of the weights beside them, as the engine wants all of them; it keeps an fp32 copy.
            return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        except (ValueError, TypeError) as error:
            key, fix = f"{KEY}.target_modules", f"target_modules: {ALL_LINEAR}"
            raise config_error(key, options.target_modules, first_line(error), fix) from error


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapters as ``PeftModel.from_pretrained(base, folder)`` reads them; a collective.

    Args:
        model: A ``peft.PeftModel``; under ZeRO 3 its adapters are gathered, which are small.
        folder: Made by rank 0.
    """
    import deepspeed.comm as dist
    from deepspeed import zero

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with zero.GatheredParameters(list(trained.values())):
        if not dist.is_initialized() or dist.get_rank() == 0:
            tensors = {name: parameter.detach().cpu().clone() for name, parameter in trained.items()}
            # The vocabulary's weights are not trained; peft would ask the hub whether they are.
            model.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
