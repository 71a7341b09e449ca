"""Plan -> the DeepSpeed JSON and the experiment YAML of a trial, or of a script, that it is to train."""

from __future__ import annotations

import math

from determined_ds.cluster.log import LOG_POLICIES
from determined_ds.documents.text import as_plain, dump_yaml
from determined_ds.experiment.entrypoint import CLASS, ENTRYPOINT_FORM, SCRIPT_FORM
from determined_ds.memory.fitting import usable_bytes
from determined_ds.memory.plan import Plan
from determined_ds.memory.rank import memory_per_rank
from determined_ds.memory.units import format_bytes, format_count

# GPT-2 of model_defs stands in for a model whose trial is not named.
GPT2 = "model_defs.gpt2.trial:GPT2Trial"
GPT2_PIPELINE = "model_defs.gpt2.trial:GPT2PipelineTrial"
PARAMETERS = {"tiny": 843e3, "small": 124e6, "medium": 355e6, "large": 774e6, "xl": 1558e6}
ALIKE = 1.15  # as a ratio of sizes
# (parameters, learning rate). Source: table 2.1 of the GPT-3 paper, arXiv 2005.14165; so is the weight decay.
LEARNING_RATES = (
    *((125e6, 6e-4), (350e6, 3e-4), (760e6, 2.5e-4), (1.3e9, 2e-4)),
    *((2.7e9, 1.6e-4), (6.7e9, 1.2e-4), (13e9, 1e-4), (175e9, 6e-5)),
)


def default_name(plan: Plan) -> str:
    """The name of the experiment and its files, e.g. ``6b_zero1_32gpu``."""
    strategy, parts = plan.strategy, [format_count(plan.request.shape.num_parameters).lower()]
    if strategy.pipe_parallel_size > 1:
        parts.append(f"pipeline{strategy.pipe_parallel_size}")
    parts.append(f"zero{strategy.zero_stage}")
    if strategy.offload_optimizer:
        parts.append("nvme" if plan.request.offload == "nvme" else "offload")
    return "_".join([*parts, f"{plan.request.slots}gpu"])


def entrypoint_of(code: str) -> str:
    """The entrypoint that runs code on all slots.

    Args:
        code: ``MODULE:CLASS``, or a script with its arguments: ``train.py ARGS``, ``-m package.train ARGS``; with
            ``python3`` before it or without.
    """
    if CLASS.fullmatch(code):
        return ENTRYPOINT_FORM.replace(GPT2, code)
    return SCRIPT_FORM.replace("train.py", code.removeprefix("python3 "))


def notes(plan: Plan, trial: str) -> list[str]:
    """Warnings for the user, of a trial or script that is to train the plan."""
    parameters = plan.request.shape.num_parameters
    if trial in (GPT2, GPT2_PIPELINE):
        size = _nearest_size(parameters)
        if 1 / ALIKE <= parameters / PARAMETERS[size] <= ALIKE:
            return []
        return [
            f"there is no GPT-2 of {format_count(parameters)}: {trial} with model_size {size}"
            " stands in for your model; name your own by --entrypoint MODULE:TRIAL, or --entrypoint train.py"
        ]
    if not plan.strategy.activation_checkpointing:
        return []
    kind, key = "trial" if CLASS.fullmatch(trial) else "script", "hyperparameters.activation_checkpointing"
    return [f"the {kind} must turn activation checkpointing on where {key} is true"]


def _nearest_size(parameters: int) -> str:
    return min(PARAMETERS, key=lambda size: abs(math.log(PARAMETERS[size] / parameters)))


def experiment_yaml(plan: Plan, *, name: str, trial: str, ds_config_path: str) -> str:
    """The text of the experiment YAML.

    Args:
        plan: What was chosen.
        name: Of the experiment.
        trial: ``MODULE:CLASS``, GPT-2's with the hyperparameters that it reads; or a script, as for
            :func:`entrypoint_of`.
        ds_config_path: Of the DeepSpeed JSON, relative to the context directory.
    """
    request, strategy, shape = plan.request, plan.strategy, plan.request.shape
    size, gpu, stages = (
        format_count(shape.num_parameters),
        request.gpu_memory_bytes,
        strategy.pipe_parallel_size,
    )
    needed = format_bytes(memory_per_rank(shape, strategy).total_bytes)
    usable = format_bytes(usable_bytes(gpu))
    pipeline = f"a pipeline of {stages}, " if stages > 1 else ""
    _, rate = min(LEARNING_RATES, key=lambda row: abs(math.log(row[0] / shape.num_parameters)))
    hyperparameters = {
        "global_batch_size": request.global_batch_size,
        "data_parallel_world_size": "auto",
        "pipe_parallel_size": stages,
        "deepspeed_config": ds_config_path,
        "activation_checkpointing": strategy.activation_checkpointing,
        "fit": {
            "max_length": {"batches": 1000},
            "validation_period": {"batches": 100},
            "checkpoint_period": {"batches": 500},
            "reporting_period": {"batches": 10},
            "checkpoint_policy": "best",
        },
        "sequence_length": shape.sequence_length,
        "learning_rate": rate,
        "weight_decay": 0.1,
        "warmup_num_steps": 100,
    }
    if plan.schedules:
        hyperparameters |= {"pipe_schedule": strategy.pipe_schedule, "partition_method": "measured"}
        hyperparameters |= {"pipe_chunks": strategy.pipe_chunks} if strategy.pipe_chunks > 1 else {}
    sections: dict[str, object] = {
        "name": name,
        "entrypoint": entrypoint_of(trial),
        "description": f"{pipeline}ZeRO {strategy.zero_stage} on {request.slots} GPUs",
        "resources": {"slots_per_trial": request.slots},
        "hyperparameters": hyperparameters,
        "searcher": {"name": "single", "metric": "validation_loss", "smaller_is_better": True},
        "reproducibility": {"experiment_seed": 0},
        "max_restarts": 2,
        "labels": ["deepspeed", f"zero{strategy.zero_stage}"],
        "log_policies": as_plain(LOG_POLICIES),
    }
    if trial in (GPT2, GPT2_PIPELINE):
        hyperparameters |= {"model_size": _nearest_size(shape.num_parameters), "dropout": 0.0}
        sections["data"] = {"path": None, "tokenizer": None}  # Python's own source, as bytes
    batch = f"micro-batch {strategy.micro_batch_size} x accumulation {strategy.accumulation}"
    return f"""\
# {size} parameters on {request.slots} x {format_bytes(gpu)}: by estimate, {needed} of {usable} a rank.
# {request.global_batch_size} samples = {batch} x replicas {strategy.replicas}
# Learning rate and weight decay are those of GPT-3's model that is nearest in size; the length is that of a trial run.
# A code of your own reads activation_checkpointing, sequence_length and data, and reports searcher.metric.
{dump_yaml(sections)}"""
