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
from determined_ds.errors import ConfigError, shown
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
    engine: Any, hyperparameters: Document, *, accelerator: Accelerator, machines: int
) -> ResolvedConfig:
    """What was decided by making an engine.

    Args:
        engine: Of DeepSpeed.
        hyperparameters: One point; what it says of sizes must agree with the engine.
        accelerator: What the ranks compute on.
        machines: Machines that they are spread over.

    Raises:
        ConfigError: hyperparameters state other sizes than the engine's, or it cannot train what it was made for.
    """
    ds, layout = made_with(engine), layout_of(engine)
    hyperparameters = by_real_names(hyperparameters)[0]
    made = {name: getattr(layout, name) for name in SIZES if name != "global_batch_size"}
    made |= {name: ds.get(path) for name, path in SHORTHANDS.items()}
    made |= {"global_batch_size": ds.data["train_batch_size"], "zero_stage": made["zero_stage"] or 0}
    problems = []
    for name, value in made.items():
        if hyperparameters.get((name,)) not in (None, AUTO, value):
            message = f"{MADE} has {shown(value)}"
            fix = f"write {shown(value)}, leave it out, or initialize the engine with context.overwrite(...)"
            problems.append(hyperparameters.problem((name,), message, fix, "engine-config"))
    if problems:
        raise ConfigError(problems)
    given = hyperparameters.data
    own = {name: given[name] for name in KEPT if name in given} | {
        name: getattr(layout, name) for name in PARALLEL_SIZES
    }
    found = reconcile(
        replace(hyperparameters, data=own), ds, slots=layout.slots, accelerator=accelerator, machines=machines
    )
    # Nothing is filled in: the engine exists.
    return replace(found, ds=found.stated, hyperparameters=hyperparameters)


def check_pipeline(engine: Any, hyperparameters: Document) -> None:
    """Refuse what is stated of a pipeline and carried out by a PipelineTrial alone, for a module made otherwise.

    Raises:
        ConfigError: names each.
    """
    if isinstance(engine, PipelineEngine) and engine.num_stages == 1:
        return  # nothing to order or to divide, of which rules warn
    schedule, method = hyperparameters.get(("pipe_schedule",)), hyperparameters.get(("partition_method",))
    stated = {
        "pipe_schedule": schedule not in (None, AUTO, ONE_F_ONE_B) and not isinstance(engine, PlannedEngine),
        "pipe_within_machine": bool(hyperparameters.get(("pipe_within_machine",)))
        and engine.grid.topology().get_axis_names()[0] != "data",
        "partition_method": method == MEASURED and getattr(engine.module, "bounds", None) is None,
    }
    message = f"{MADE} was made without it: a PipelineTrial reads it"
    fix = "leave it out, or subclass determined_ds.PipelineTrial"
    if unread := [name for name, is_unread in stated.items() if is_unread]:
        raise ConfigError(hyperparameters.problem((name,), message, fix, "engine-config") for name in unread)


def made_otherwise(stated: Document, engine: Any) -> str:
    """What an engine was made with otherwise than a DeepSpeed JSON states, for a warning; "" for nothing."""
    made = made_with(engine)
    return ", ".join(
        f"{dotted(path)} {shown(made.get(path))} instead of {shown(stated.get(path))}"
        for path in leaf_paths(stated.data)
        if stated.get(path) not in (AUTO, made.get(path)) and path[0] not in BATCH_KEYS
    )
