"""How the model is cut: into blocks that are computed again together, and into pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from determined_ds.pipe.orders import Pipeline
from model_defs.common.sections import Section, config_error, parse_section


class _Checkpointing(Section):
    activation_checkpointing: bool | None = None
    activation_checkpoint_interval: int | None = Field(None, ge=0)


def checkpoint_interval(hparams: Mapping[str, Any]) -> int:
    """Blocks of which only the input is kept, to be computed again together in the backward pass; 0: none.

    Args:
        hparams: ``activation_checkpoint_interval``, or ``activation_checkpointing: true`` for an interval of 1.

    Raises:
        ConfigError: A value is invalid, or they contradict each other.
    """
    given = parse_section(_Checkpointing, hparams, section="hyperparameters", closed=False)
    switch, interval = given.activation_checkpointing, given.activation_checkpoint_interval
    if interval is None:
        return int(switch or False)
    if switch not in (None, bool(interval)):
        message = f"contradicts activation_checkpointing: {str(switch).lower()}."
        fix = "leave out activation_checkpointing: the interval is enough"
        raise config_error("hyperparameters.activation_checkpoint_interval", interval, message, fix)
    return interval


def check_partition(method: Any, layer_names: Sequence[str], pipe: Pipeline) -> None:
    """Check that DeepSpeed can divide the layers by this method, with at least one counted layer a part.

    Args:
        method: ``type:REGEX`` of class names, ``parameters``, ``uniform`` or ``measured``.
        layer_names: Class names of the layers, in order.
        pipe: The schedule; its ranks hold one part or several.

    Raises:
        ConfigError: It is another method, no layer matches it, or there are more parts than matching layers.

    Source: ``PipelineModule._partition_layers`` in deepspeed 0.19.8.
    """
    if method in ("parameters", "uniform", "measured"):
        return
    kinds = ", ".join(dict.fromkeys(layer_names))
    pattern = method.removeprefix("type:") if isinstance(method, str) and method.startswith("type:") else ""
    try:
        matching = [name for name in layer_names if pattern and re.search(pattern, name, re.IGNORECASE)]
    except re.error as error:
        matching, kinds = [], f"{kinds} (not a regular expression: {error})"
    if not matching:
        message = f"must be parameters, uniform, measured, or type: and the class of a layer, one of {kinds}."
        raise config_error(
            "hyperparameters.partition_method", method, message, "partition_method: type:Block"
        )
    if (pipe.parts if pipe.chunks > 1 else pipe.ranks) > len(matching):
        key, value = ("pipe_chunks", pipe.chunks) if pipe.chunks > 1 else ("pipe_parallel_size", pipe.ranks)
        message = f"{pipe.ranks} ranks x {pipe.chunks} chunks are {pipe.parts} parts, and {method} matches"
        message += f" {len(matching)} layers: each part must have one."
        fix = "fewer ranks or chunks, or a model_size of more blocks"
        if pipe.parts <= len(layer_names):
            fix = f"partition_method: uniform, which counts all {len(layer_names)} layers; {fix}"
        raise config_error(f"hyperparameters.{key}", value, message, fix)
