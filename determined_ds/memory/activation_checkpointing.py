"""Whether activations are checkpointed: computed again in the backward pass, instead of kept.

A hyperparameter asks a model for it. In a pipeline DeepSpeed does it, as the trial's
``activation_checkpoint_interval`` says, or the JSON's ``pipeline.activation_checkpoint_interval`` where that is
above 0. The JSON's section ``activation_checkpointing`` turns nothing on: it has the options of DeepSpeed's own
functions, for a model that calls them.

Source: deepspeed 0.19.8 ``PipelineEngine.__init__`` in runtime/pipe/engine.py; runtime/activation_checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.documents.document import get_path
from determined_ds.memory.model_shape import ModelShape

# What models call it: switches, and a number of layers.
SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
INTERVAL = "activation_checkpoint_interval"
OFF = ("", "none", "off", "no", "false")


def is_checkpointed(
    hyperparameters: Mapping[str, Any], resolved: ResolvedConfig, shape: ModelShape | None = None
) -> bool:
    """Whether a training checkpoints activations, by whichever of the ways.

    Args:
        hyperparameters: All of the trial.
        resolved: Its configuration.
        shape: Its model, as far as it is known; of a ``PipelineTrial`` it has the interval.
    """
    if is_asked_of_model(hyperparameters) or (shape is not None and shape.checkpoint_interval):
        return True
    interval = get_path(resolved.ds_config, ("pipeline", INTERVAL))
    return resolved.topology.pipe_parallel_size > 1 and isinstance(interval, int) and interval > 0


def is_asked_of_model(hyperparameters: Mapping[str, Any]) -> bool:
    """Whether a hyperparameter asks for it."""
    values = [hyperparameters.get(name) for name in (*SWITCHES, INTERVAL)]
    return any(value.lower() not in OFF if isinstance(value, str) else bool(value) for value in values)
