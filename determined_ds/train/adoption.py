"""The configuration of an engine that a trial made by itself: sizes, layout and all the rest are read from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from determined_ds.config.fill import leaf_paths
from determined_ds.config.layout import BATCH_KEYS, Accelerator, Topology
from determined_ds.config.params import AUTO, PARALLEL_SIZES, SHORTHANDS, SIZES, by_real_names
from determined_ds.config.resolve import ResolvedConfig, reconcile
from determined_ds.documents.document import Document, dotted
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem, shown
from determined_ds.pipe.orders import ONE_F_ONE_B
from determined_ds.pipe.partition import MEASURED
from determined_ds.trial.pipeline_engine import PlannedEngine

# Hyperparameters of the library that no engine knows; all others it has settled already.
KEPT = ("torch_compile", "sdpa_kernel", "fit", "trial_seed")
MADE = "the engine that the trial wraps"


def made_with(engine: Any) -> Document:
    """The DeepSpeed JSON that an engine was made with, its batch sizes completed."""
    sizes = {key: int(getattr(engine._config, key)) for key in BATCH_KEYS}
    return Document(name=MADE, data={**as_plain(engine._config._param_dict), **sizes})


def layout_of(engine: Any) -> Topology:
    """How an engine divides the ranks; those that share neither stage nor replica share layers."""
    pipe = int(engine.grid.get_pipe_parallel_world_size()) if isinstance(engine, PipelineEngine) else 1
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sequence = int(engine.sequence_parallel_size)
    # With DeepSpeed's unit of sequence parallelism, the engine knows no replicas.
    replicas = int(engine.dp_world_size or ranks // sequence)
    return Topology(
        pipe_parallel_size=pipe,
        model_parallel_size=max(1, ranks // (pipe * replicas * sequence)),
        sequence_parallel_size=sequence,
        data_parallel_world_size=replicas,
    )


def adopted(
    engine: Any,
    hyperparameters: Document,
    before: ResolvedConfig | None,
    *,
    accelerator: Accelerator,
    machines: int,
) -> ResolvedConfig:
    """What was decided by making an engine; ``before`` is what was decided without it, None where that was left open.

    Raises:
        ConfigError: hyperparameters state other sizes than the engine's, or what only a PipelineTrial carries out.
    """
    ds, layout = made_with(engine), layout_of(engine)
    hyperparameters = by_real_names(hyperparameters)[0]
    given = hyperparameters.data
    made = {name: getattr(layout, name) for name in SIZES if name != "global_batch_size"}
    made |= {name: ds.get(path) for name, path in SHORTHANDS.items()}
    made |= {"global_batch_size": ds.data["train_batch_size"], "zero_stage": made["zero_stage"] or 0}
    fix = "leave it out, or initialize the engine with context.overwrite(...)"
    problems = [
        hyperparameters.problem((name,), f"{MADE} has {shown(value)}", fix, "engine-config")
        for name, value in made.items()
        if given.get(name) not in (None, AUTO, value)
    ]
    if before is not None and given.get("deepspeed_config") is not None and layout == before.topology:
        for key, name in BATCH_KEYS.items():
            if ds.data[key] != (stated := getattr(before.batch, name)):
                message = f"{MADE} has {ds.data[key]}"
                problems.append(
                    Problem(key=key, value=stated, message=message, fix=fix, code="engine-config")
                )
    if not (
        isinstance(engine, PipelineEngine) and engine.num_stages == 1
    ):  # then there is nothing to order or divide
        is_within = (
            isinstance(engine, PipelineEngine) and engine.grid.topology().get_axis_names()[0] == "data"
        )
        is_divided = getattr(engine.module, "bounds", None) is not None
        unread = {
            "pipe_schedule": given.get("pipe_schedule") not in (None, AUTO, ONE_F_ONE_B)
            and not isinstance(engine, PlannedEngine),
            "pipe_within_machine": bool(given.get("pipe_within_machine")) and not is_within,
            "partition_method": given.get("partition_method") == MEASURED and not is_divided,
        }
        message = f"{MADE} was made without it: a PipelineTrial reads it"
        fix = "leave it out, or subclass determined_ds.PipelineTrial"
        problems += [
            hyperparameters.problem((name,), message, fix, "engine-config") for name in unread if unread[name]
        ]
    if problems:
        raise ConfigError(problems)
    if before is not None and ds.data == before.ds_config:
        return before
    own = {name: given[name] for name in KEPT if name in given}
    own |= {name: getattr(layout, name) for name in PARALLEL_SIZES}
    found = reconcile(
        replace(hyperparameters, data=own), ds, slots=layout.slots, accelerator=accelerator, machines=machines
    )
    # Nothing is filled in: the engine exists.
    return replace(found, ds=found.stated, hyperparameters=hyperparameters)


def made_otherwise(stated: Document, engine: Any) -> str:
    """What an engine was made with otherwise than a DeepSpeed JSON states, for a warning; "" for nothing."""
    made = made_with(engine)
    return ", ".join(
        f"{dotted(path)} {shown(made.get(path))} instead of {shown(stated.get(path))}"
        for path in leaf_paths(stated.data)
        if stated.get(path) not in (AUTO, made.get(path)) and path[0] not in BATCH_KEYS
    )
