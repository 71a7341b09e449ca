"""LoRA: small matrices beside frozen ones are trained, by way of ``peft``."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from determined_ds.errors import ConfigError, Problem
from model_defs.causal_lm.config import first_line, nearest

KEY = "hyperparameters.lora"
ALL_LINEAR = "all-linear"
ADAPTER_FOLDER = "adapter"


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The ``lora`` section of the hyperparameters, in ``peft``'s words."""

    r: int = 8
    """Rank of the update of each matrix."""
    alpha: float = 16
    """The update counts alpha / r times."""
    dropout: float = 0.0
    """Probability in [0, 1) of an input of the update to be dropped."""
    target_modules: tuple[str, ...] | str = ALL_LINEAR
    """Names of the modules that get one, such as q_proj and v_proj; all-linear: every one but the head."""


def lora_section(hparams: Mapping[str, Any]) -> Any:
    """The hyperparameter ``lora``, with the targets that stand beside it.

    A master draws two hyperparameters of one mapping in no certain order, so a search has ``target_modules`` beside
    ``lora`` and not in it.

    Raises:
        ConfigError: ``target_modules`` stands beside no section, or beside one with other targets.
    """
    given, targets = hparams.get("lora"), hparams.get("target_modules")
    if targets is None:
        return given
    key = "hyperparameters.target_modules"
    if not isinstance(given, Mapping):
        message, fix = "there is no lora section that it could be of.", "lora: {r: 8, alpha: 16}"
        raise ConfigError(Problem(key=key, value=targets, message=message, fix=fix))
    if given.get("target_modules") not in (None, targets):
        message = f"differs from lora.target_modules = {given['target_modules']}."
        raise ConfigError(Problem(key=key, value=targets, message=message, fix="keep one of them"))
    return {**given, "target_modules": targets}


def parse_lora(given: Any) -> LoraOptions | None:
    """The section's keys and types, checked; None where there is no LoRA.

    Raises:
        ConfigError: Everything that is wrong.
    """
    if given is None or given is False:
        return None
    if not isinstance(given, Mapping):
        message, fix = "is a mapping of r, alpha, dropout and target_modules.", "lora: {r: 8, alpha: 16}"
        raise ConfigError(Problem(key=KEY, value=given, message=message, fix=fix))
    names = [field.name for field in fields(LoraOptions)]
    problems = [
        Problem(key=f"{KEY}.{name}", value=given[name], message="no such key.", fix=nearest(name, names))
        for name in given
        if name not in names
    ]
    options = dict(given)
    targets = options.get("target_modules", ALL_LINEAR)
    if targets is None or targets == ALL_LINEAR:
        options["target_modules"] = ALL_LINEAR
    elif isinstance(targets, str):
        options["target_modules"] = (targets,)
    elif isinstance(targets, list | tuple) and targets and all(isinstance(each, str) for each in targets):
        options["target_modules"] = tuple(targets)
    else:
        problems.append(_problem("target_modules", targets, "is a list of names.", "[q_proj, v_proj]"))
    for name, right, message, fix in (
        ("r", lambda r: isinstance(r, int) and r >= 1, "is a whole number, at least 1.", "8"),
        ("alpha", lambda alpha: alpha > 0, "is a number above 0.", "16"),
        ("dropout", lambda dropout: 0 <= dropout < 1, "is a probability in [0, 1).", "0.05"),
    ):
        value = options.get(name, 0.5 if name == "dropout" else 1)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and right(value)):
            problems.append(_problem(name, value, message, fix))
    if problems:
        raise ConfigError(problems)
    return LoraOptions(**options)


def _problem(name: str, value: Any, message: str, fix: str) -> Problem:
    return Problem(key=f"{KEY}.{name}", value=value, message=message, fix=f"{name}: {fix}")


def with_lora(model: Any, options: LoraOptions, *, seed: int) -> Any:
    """A model with adapters, which alone are trained; they begin as no change, the same on every rank.

    Args:
        model: A ``transformers.PreTrainedModel``, whole or partitioned.
        options: What is adapted, and how.
        seed: Of the adapters' draw.

    Returns:
        A ``peft.PeftModel``.

    Raises:
        ConfigError: A target is no part of the model, or of no kind that can be adapted.
    """
    import peft

    if isinstance(options.target_modules, tuple):
        _check_targets(model, options.target_modules)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.r,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft multiplies by it
        lora_dropout=options.dropout,
        target_modules=list(options.target_modules)
        if isinstance(options.target_modules, tuple)
        else options.target_modules,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name of before
        own = int.from_bytes(hashlib.sha256(f"{seed}/lora".encode()).digest()[:7], "little")
        torch.random.default_generator.manual_seed(own)  # peft draws on the CPU, and then moves what it drew
        try:
            # In the type of the weights beside them, as the engine wants all of them; it keeps an fp32 copy.
            return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        except (ValueError, TypeError) as error:
            targets = options.target_modules
            fix = f"target_modules: {ALL_LINEAR}"
            raise ConfigError(
                Problem(key=f"{KEY}.target_modules", value=targets, message=first_line(error), fix=fix)
            ) from error


def _check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, nn.Embedding, Conv1D)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    known = {name.rpartition(".")[2] for name in names}
    missing = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if missing:
        raise ConfigError(
            Problem(
                key=f"{KEY}.target_modules",
                value=target,
                message=f"no matrix of {type(model).__name__} has this name.",
                fix=nearest(target, known),
            )
            for target in missing
        )


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapters as ``PeftModel.from_pretrained(base, folder)`` reads them; a collective.

    Args:
        model: A ``peft.PeftModel``; under ZeRO 3 its adapters are gathered, which are small.
        folder: To be made, by rank 0.
    """
    import deepspeed.comm as dist
    from deepspeed import zero

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with zero.GatheredParameters(list(trained.values())):
        if not dist.is_initialized() or dist.get_rank() == 0:
            tensors = {name: parameter.detach().cpu().clone() for name, parameter in trained.items()}
            # What belongs to the vocabulary is not trained; peft would ask the hub whether it is.
            model.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
