"""Models that DeepSpeed divides among ranks as it makes their engine: by layers (AutoTP) or by experts (AutoEP)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from determined_ds.errors import ConfigError, Problem
from determined_ds.trial import expert_parallel, tensor_parallel


def arguments(optimizer: Any, parameters: Any, ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer`` and ``model_parameters`` for ``deepspeed.initialize``.

    Raises:
        ConfigError: the experts' states cannot be kept apart in an optimizer of the trial's own.
    """
    if optimizer is not None and (ds_config.get(expert_parallel.KEY) or {}).get("enabled"):
        message = "with expert parallel, DeepSpeed takes the experts out of groups that it makes itself"
        fix = "return None, and name an optimizer in the DeepSpeed JSON"
        key, name = "build_optimizer", type(optimizer).__name__
        raise ConfigError(Problem(key=key, value=name, message=message, fix=fix, code=expert_parallel.KEY))
    named = expert_parallel.named_groups(parameters, ds_config)
    return {"optimizer": optimizer, "model_parameters": named}


@contextlib.contextmanager
def carried_out(model: torch.nn.Module, ds_config: Mapping[str, Any]) -> Iterator[Any]:
    """Around ``deepspeed.initialize``; a collective.

    Yields:
        The ``mpu`` for it; None without tensor parallel.

    Raises:
        ConfigError: DeepSpeed cannot divide the model.
    """
    with (
        expert_parallel.carried_out(model, ds_config),
        tensor_parallel.carried_out(model, ds_config) as mpu,
    ):
        yield mpu


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """The id of each parameter -> its name; of a divided one, the name that it had in the whole model."""
    return {id(parameter): _name(parameter, name) for name, parameter in model.named_parameters()}


def _name(parameter: Any, name: str) -> str:
    place = getattr(parameter, expert_parallel.PLACE, None)
    return name if place is None else str(place.name)


def afterwards(found: list[set[int]], names: Mapping[int, str], model: torch.nn.Module) -> list[set[int]]:
    """Sets of ids of parameters that go by the same names now: what is divided may be other objects.

    Args:
        found: Of the parameters before.
        names: From :func:`names_of`, before.
        model: Divided.
    """
    now: dict[str, set[int]] = {}
    for each, name in names_of(model).items():
        now.setdefault(name, set()).add(each)
    return [set().union(*(now.get(names.get(each, ""), {each}) for each in group)) for group in found]
