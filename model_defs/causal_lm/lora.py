"""LoRA: small matrices beside frozen ones are trained, by way of ``peft``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from transformers.pytorch_utils import Conv1D

from determined_ds.documents.document import one_of
from model_defs.common.parameters import seed_of
from model_defs.common.sections import Section, config_error, parse_section

KEY = "hyperparameters.lora"


class LoraOptions(Section, extra="forbid"):
    """The ``lora`` section of the hyperparameters, in ``peft``'s words."""

    r: int = Field(8, ge=1)
    """Rank of the update of each matrix."""
    alpha: float = Field(16, gt=0)
    """The update counts alpha / r times."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of an input of the update to be dropped."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get one; all-linear: every matrix but the head."""


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
        ConfigError: A target is not in the model.
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
        # In the type of the weights beside them, as the engine wants all of them; it keeps an fp32 copy.
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
