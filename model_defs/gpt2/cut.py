"""How the work is cut: the blocks that are computed again together, and the layers of a pipeline's stages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from determined_ds.errors import ConfigError, Problem

KEY = "hyperparameters.activation_checkpoint_interval"


def checkpoint_interval(hparams: Mapping[str, Any]) -> int:
    """Blocks of which only the input is kept, to be computed again together in the backward pass; 0: none.

    Args:
        hparams: ``activation_checkpoint_interval``, or ``activation_checkpointing: true`` for an interval of 1.

    Raises:
        ConfigError: Neither is what it can be, or they contradict each other.
    """
    problems = []
    switch, interval = hparams.get("activation_checkpointing"), hparams.get("activation_checkpoint_interval")
    if switch is not None and not isinstance(switch, bool):
        key = "hyperparameters.activation_checkpointing"
        fix = "activation_checkpointing: true"
        problems.append(Problem(key=key, value=switch, message="is true or false.", fix=fix))
    elif interval is None:
        return int(switch or False)
    if isinstance(interval, bool) or not isinstance(interval, int | None) or (interval or 0) < 0:
        message, fix = "is a whole number of blocks, 0 for none.", "activation_checkpoint_interval: 1"
        problems.append(Problem(key=KEY, value=interval, message=message, fix=fix))
    elif isinstance(switch, bool) and switch != bool(interval):
        message = f"contradicts activation_checkpointing: {str(switch).lower()}."
        fix = "leave out activation_checkpointing: the interval says it all"
        problems.append(Problem(key=KEY, value=interval, message=message, fix=fix))
    if problems:
        raise ConfigError(problems)
    return int(interval or 0)


def check_partition(method: Any, layer_names: Sequence[str], num_stages: int) -> None:
    """That DeepSpeed can share the layers out by this method, and every stage gets of what it counts.

    Args:
        method: ``type:REGEX`` of class names, ``parameters`` or ``uniform``.
        layer_names: Class names of the layers, in order.
        num_stages: ``pipe_parallel_size``.

    Raises:
        ConfigError: It is none of these, no layer matches it, or there are more stages than layers that do.

    Source: ``PipelineModule._partition_layers`` in deepspeed 0.19.8.
    """
    if method in ("parameters", "uniform"):
        return
    key = "hyperparameters.partition_method"
    kinds = ", ".join(dict.fromkeys(layer_names))
    pattern = method.removeprefix("type:") if isinstance(method, str) and method.startswith("type:") else ""
    try:
        matching = [name for name in layer_names if pattern and re.search(pattern, name, re.IGNORECASE)]
    except re.error as error:
        matching, kinds = [], f"{kinds} (it is no regular expression: {error})"
    if not matching:
        raise ConfigError(
            Problem(
                key=key,
                value=method,
                message=f"is none of parameters, uniform, and type: of a layer's class; these are {kinds}.",
                fix="partition_method: type:Block",
            )
        )
    if num_stages > len(matching):
        raise ConfigError(
            Problem(
                key="hyperparameters.pipe_parallel_size",
                value=num_stages,
                message=f"{method} matches {len(matching)} layers, less than there are stages.",
                fix=f"pipe_parallel_size: {len(matching)} or less, or a model_size of more blocks",
            )
        )
