"""``partition_method: measured``: the layers of a pipeline, shared out by their times.

The way of a partition::

    the checkpoint that training continues from, if it has one for these layers
    else rank 0 measures its layers, and all ranks get the times
    -> the cut with the shortest step -> partition.json in the run directory, and in each checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.runtime.utils import partition_balanced

from determined_ds.errors import ConfigError, Problem
from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.partition import (
    MEASURED,
    Bounds,
    LayerTime,
    Partition,
    fastest,
    in_words,
    read_partition,
)
from determined_ds.trial.layer_times import measured_layers, names_of


def measured_partition(
    trial: Any, specs: Sequence[Any], pipe: Pipeline, loss: Callable[[Any, Any], Any]
) -> Partition:
    """The partition of a trial's layers by their times; a collective.

    Args:
        trial: A ``PipelineTrial`` with a context of this library.
        specs: What its ``build_layers`` returned.
        pipe: The schedule.
        loss: Of outputs and targets.

    Raises:
        ConfigError: the context is Determined's own, or several ranks share a layer.
    """
    context = trial.context
    _check(trial)
    names = names_of(specs)
    stored = read_partition(context.stored_partition() or "")
    if stored is not None and stored.is_of(names, pipe):
        found = stored
    else:
        layers = None if stored is None else stored.times(names)
        if layers is None:
            is_chief = context.distributed.rank == 0
            layers = context.distributed.broadcast(measured_layers(trial, specs, loss) if is_chief else None)
        found = Partition(
            pipe=pipe,
            layers=layers,
            bounds=fastest(layers, pipe),
            by_parameters=by_parameters(layers, pipe.parts),
        )
    context.keep_partition(found.text())
    if context.distributed.rank == 0:
        print(f"partition   {in_words(found)}", flush=True)
    return found


def by_parameters(layers: Sequence[LayerTime], parts: int) -> Bounds:
    """Where DeepSpeed would cut by the numbers of parameters."""
    return tuple(int(bound) for bound in partition_balanced([each.parameters for each in layers], parts))


def _check(trial: Any) -> None:
    if not hasattr(trial.context, "keep_partition"):
        message = (
            "layers are measured, and their times kept in checkpoints, under this library's context only"
        )
        fix = "open the context by determined_ds.open_context and train by determined_ds.Trainer"
    elif trial.resolved.topology.model_parallel_size > 1:
        message = (
            "one rank measures a layer, and with model_parallel_size above 1 several compute it together"
        )
        fix = "use parameters, uniform or type:REGEX"
    else:
        return
    key = f"{type(trial).__name__}.partition_method"
    raise ConfigError(Problem(key=key, value=MEASURED, message=message, fix=fix, code="partition-measured"))
