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
from determined_ds.pipe.orders import INTERLEAVED

# GPT-2 of model_defs stands in for a model whose trial is not named. Parameters and attention heads of its sizes.
GPT2 = "model_defs.gpt2.trial:GPT2Trial"
GPT2_PIPELINE = "model_defs.gpt2.trial:GPT2PipelineTrial"
PARAMETERS = {"tiny": 843e3, "small": 124e6, "medium": 355e6, "large": 774e6, "xl": 1558e6}
HEADS = {"tiny": 4, "small": 12, "medium": 16, "large": 20, "xl": 25}
ALIKE = 1.15  # as a ratio of sizes
# (parameters, learning rate). Source: table 2.1 of the GPT-3 paper, arXiv 2005.14165; so is the weight decay.
LEARNING_RATES = (
    *((125e6, 6e-4), (350e6, 3e-4), (760e6, 2.5e-4), (1.3e9, 2e-4)),
    *((2.7e9, 1.6e-4), (6.7e9, 1.2e-4), (13e9, 1e-4), (175e9, 6e-5)),
)


def nearest_size(parameters: int) -> str:
    """The size of GPT-2 that is nearest to a number of parameters."""
    return min(PARAMETERS, key=lambda size: abs(math.log(PARAMETERS[size] / parameters)))


def default_name(plan: Plan) -> str:
    """The name of the experiment and its files, e.g. ``6b_zero1_32gpu``."""
    strategy = plan.strategy
    parts = (
        (strategy.pipe_parallel_size > 1, f"pipeline{strategy.pipe_parallel_size}"),
        (True, f"zero{strategy.zero_stage}"),
        (strategy.sequence_parallel_size > 1, f"sequence{strategy.sequence_parallel_size}"),
        (strategy.offload_optimizer, "nvme" if plan.request.offload == "nvme" else "offload"),
        (True, f"{plan.request.slots}gpu"),
    )
    size = format_count(plan.request.shape.num_parameters).lower()
    return "_".join([size, *(word for is_said, word in parts if is_said)])


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
        if _is_gpt2(parameters):
            return []
        return [
            f"there is no GPT-2 of {format_count(parameters)}: {trial} with model_size {nearest_size(parameters)}"
            " stands in for your model; name your own by --entrypoint MODULE:TRIAL, or --entrypoint train.py"
        ]
    if not plan.strategy.activation_checkpointing:
        return []
    kind, key = "trial" if CLASS.fullmatch(trial) else "script", "hyperparameters.activation_checkpointing"
    return [f"the {kind} must turn activation checkpointing on where {key} is true"]


def _is_gpt2(parameters: int) -> bool:
    return 1 / ALIKE <= parameters / PARAMETERS[nearest_size(parameters)] <= ALIKE


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
    size, gpu = format_count(shape.num_parameters), request.gpu_memory_bytes
    needed, usable = (
        format_bytes(memory_per_rank(shape, strategy).total_bytes),
        format_bytes(usable_bytes(gpu)),
    )
    head = f"# {size} parameters on {request.slots} x {format_bytes(gpu)}: by estimate, {needed} of {usable} a rank"
    stages, sharing = strategy.pipe_parallel_size, strategy.sequence_parallel_size
    degrees = f"  pipe_parallel_size: {stages}\n"
    if sharing > 1:
        degrees += f"  sequence_parallel_size: {sharing}  # ranks that share a sequence\n"
    if plan.schedules:
        degrees += f"  pipe_schedule: {strategy.pipe_schedule}  # its stages wait {strategy.bubble:.0%} of the time\n"
        if strategy.pipe_schedule == INTERLEAVED:
            degrees += f"  pipe_chunks: {strategy.pipe_chunks}\n"
        degrees += "  partition_method: measured  # layers are timed once, and shared out by their times\n"
    model = data = ""
    if trial in (GPT2, GPT2_PIPELINE):
        why = "" if _is_gpt2(shape.num_parameters) else "  # the nearest size, in place of your model"
        model = f"  model_size: {nearest_size(shape.num_parameters)}{why}\n  dropout: 0.0\n"
        data = "# Without a path: Python's own source, as bytes. Else a file or folder: text, JSON lines, parquet.\n"
        data += "data:\n  path: null\n  tokenizer: null\n"
    reads = "" if model else "  # yours to read: DeepSpeed leaves it to the model"
    metric = (
        "" if CLASS.fullmatch(trial) else "  # as the script reports it; eval_loss of transformers' Trainer"
    )
    like, rate = min(LEARNING_RATES, key=lambda row: abs(math.log(row[0] / shape.num_parameters)))
    return f"""\
{head}
{dump_yaml({"name": name, "entrypoint": entrypoint_of(trial)})}\
description: {f"a pipeline of {stages}, " * (stages > 1)}ZeRO {strategy.zero_stage} on {request.slots} GPUs
resources:
  slots_per_trial: {request.slots}
hyperparameters:
  # micro-batch {strategy.micro_batch_size} x accumulation {strategy.accumulation} x replicas {strategy.replicas}
  global_batch_size: {request.global_batch_size}
  data_parallel_world_size: auto
{degrees}\
  deepspeed_config: {ds_config_path}
  activation_checkpointing: {str(strategy.activation_checkpointing).lower()}{reads}
  fit:
    max_length: {{batches: 1000}}  # a trial run
    validation_period: {{batches: 100}}
    checkpoint_period: {{batches: 500}}
    reporting_period: {{batches: 10}}
    checkpoint_policy: best
{model}\
  sequence_length: {shape.sequence_length}
  learning_rate: {rate:.6f}  # as GPT-3's model of {format_count(int(like))}, and so is the weight decay
  weight_decay: 0.1
  warmup_num_steps: 100  # a tenth of the trial run
{data}\
searcher:
  name: single
  metric: validation_loss{metric}
  smaller_is_better: true
reproducibility:
  experiment_seed: 0
max_restarts: 2
labels: [deepspeed, zero{strategy.zero_stage}]
# A failure that no restart can help is not restarted.
{dump_yaml({"log_policies": as_plain(LOG_POLICIES)})}"""
