"""What the memory model expects of the engines that a run has made, for a comparison with what its ranks then take."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from determined_ds.checkpoints.engine_slices import name_of_whole, whole_shape
from determined_ds.documents.files import write_whole
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import memory_of_stages, memory_per_rank
from determined_ds.train.local_core import LocalTrainContext
from determined_ds.train.shapes.counting import shape_of_built
from determined_ds.trial.expert_parallel import expert_degree_of
from determined_ds.trial.tensor_parallel import degree_of


def record_estimate(trial: Any, context: Any) -> None:
    """Write ``memory.json`` of the run directory; a collective. Not on a cluster, which has none.

    The engines are counted as they are, in a moment; activations go by the sizes of a transformer where its
    configuration states them, since measuring them, as ``det-ds check --memory`` does, takes seconds.

    Args:
        trial: Its ``tokens_per_sample``, where it has one, is the length of a sequence.
        context: Its context, with one engine or several.
    """
    if not isinstance(context._core.train, LocalTrainContext):
        return
    tokens = getattr(trial, "tokens_per_sample", lambda: None)()
    own = [
        (getattr(engine, "stage_id", 0), _own_shape(engine, int(tokens or 0))) for engine in context.models
    ]
    ranks = context.distributed.allgather(own)
    if context.distributed.rank == 0:
        with contextlib.suppress(Exception):  # it is for people to look at, and ends no training
            _write(context, [_whole(parts) for parts in zip(*ranks, strict=True)])


def _own_shape(engine: Any, sequence_length: int) -> ModelShape:
    """Of what this rank has of a model: all of it, or its pipeline stage."""
    module = engine.module
    config = getattr(getattr(module, "module", module), "config", None)
    shape = shape_of_built(module, config, sequence_length=sequence_length)
    if degree_of(engine) == 1 and not expert_degree_of(engine):
        return shape
    # Several may be parts of one parameter.
    wholes = {name_of_whole(each, name): each for name, each in module.named_parameters()}
    counts = {name: math.prod(whole_shape(each)) for name, each in wholes.items()}
    return replace(
        shape,
        num_parameters=sum(counts.values()),
        num_trainable_parameters=sum(counts[name] for name, each in wholes.items() if each.requires_grad),
        num_expert_parameters=sum(count for name, count in counts.items() if ".experts." in name),
    )


def _whole(parts: Sequence[tuple[int, ModelShape]]) -> ModelShape:
    """The shape of a model whose stages are on several ranks."""
    stages = dict(parts)
    first = stages[min(stages)]
    if len(stages) == 1:
        return first
    counts = tuple(stages[stage].num_parameters for stage in sorted(stages))
    return ModelShape(
        num_parameters=sum(counts),
        num_trainable_parameters=sum(each.trainable for each in stages.values()),
        stage_parameters=counts,
        largest_layer_parameters=max(each.largest_layer_parameters for each in stages.values()),
    )


def _write(context: Any, shapes: list[ModelShape]) -> None:
    strategy = context.resolved.strategy
    found = [memory_per_rank(shape, strategy) for shape in shapes]
    content = {
        "total_bytes": sum(each.total_bytes for each in found),
        "model_states_bytes": sum(each.model_states_bytes for each in found),
        "host_bytes": sum(each.host_bytes for each in found),
        "has_activations": all(shape.knows_activations for shape in shapes),
        "engines": [
            {
                "parameters": shape.num_parameters,
                **asdict(each),
                "stages": [asdict(stage) for stage in memory_of_stages(shape, strategy)],
            }
            for shape, each in zip(shapes, found, strict=True)
        ],
    }
    write_whole(context._run_dir.memory, json.dumps(content, indent=2) + "\n")
