"""What a changed key means to a run that has begun: refused, in effect from here on, or without meaning.

Two configurations are compared: the experiment's, and the mapping that DeepSpeed is given. A key is decided by the
longest entry of its table that it begins with.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_ds.config.hyperparameters import TRIAL_SEED
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.documents.differences import Difference, differences, in_words
from determined_ds.documents.document import Document, KeyPath, dotted, plain_copy, words
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import Experiment, read_experiment
from determined_ds.experiment.secrets import masked
from determined_ds.experiment.variables import names_of


class Meaning(enum.Enum):
    """What a change of a key means to a run that goes on from a checkpoint."""

    LAYOUT = "must be what it was: a checkpoint is laid out by it"
    COURSE = "must be what it was: the batches trained so far count by it"
    EFFECT = "takes effect from here on"
    NOTHING = "has no effect on a run that has begun"
    RESOLVED = "is compared in what it makes: the mapping that DeepSpeed is given"


def _table(**keys: str) -> dict[KeyPath, Meaning]:
    return {
        tuple(key.split(".")): Meaning[name.upper()] for name, text in keys.items() for key in words(text)
    }


EXPERIMENT: Mapping[KeyPath, Meaning] = _table(
    layout="resources.slots_per_trial hyperparameters.pipe_parallel_size hyperparameters.model_parallel_size",
    course="entrypoint reproducibility hyperparameters.trial_seed",
    # Of the hyperparameters all that are not named here: the model's own.
    effect="""data debug environment.environment_variables hyperparameters hyperparameters.fit
        hyperparameters.torch_compile hyperparameters.sdpa_kernel max_restarts profiling searcher.metric
        searcher.smaller_is_better""",
    resolved="""hyperparameters.data_parallel_world_size hyperparameters.deepspeed_config
        hyperparameters.global_batch_size hyperparameters.micro_batch_size hyperparameters.overwrite_deepspeed_args
        hyperparameters.zero_stage""",
    nothing="""bind_mounts checkpoint_policy checkpoint_storage data_layer description environment integrations
        internal labels log_policies min_checkpoint_period min_validation_period name optimizations pbs
        perform_initial_validation preemption_timeout project records_per_epoch resources retention_policy
        scheduling_unit searcher security slurm tensorboard_storage workspace""",
)

DEEPSPEED: Mapping[KeyPath, Meaning] = _table(
    layout="""bf16 checkpoint.load_universal data_parallel_size data_types datastates_ckpt expert_parallel fp16
        hybrid_engine managed_gradient_accumulation optimizer.legacy_fusion optimizer.type
        optimizer.params.adam_w_mode optimizer.params.amsgrad optimizer.params.fp32_optimizer_states
        optimizer.params.torch_adam scheduler.type sequence_parallel_size tensor_parallel torch_autocast
        use_data_before_expert_parallelism weight_quantization zero_force_ds_cpu_optimizer zero_optimization""",
    course="data_efficiency train_batch_size",
    effect="""activation_checkpointing aio checkpoint comet comms_logger communication_data_type compile csv_monitor
        dataloader_drop_last disable_allgather disable_python_gc dump_state flops_profiler
        gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor log_level
        memory_breakdown optimizer.params pipeline prescale_gradients scheduler.params
        seq_parallel_communication_data_type steps_per_print tensorboard timers train_micro_batch_size_per_gpu
        wall_clock_breakdown wandb zero_allow_untested_optimizer
        zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions
        zero_optimization.allgather_sequential zero_optimization.contiguous_gradients
        zero_optimization.enable_sanity_checks zero_optimization.gather_16bit_weights_on_model_save
        zero_optimization.ignore_unused_parameters zero_optimization.log_trace_cache_warnings
        zero_optimization.max_live_parameters zero_optimization.max_reuse_distance
        zero_optimization.memory_efficient_linear zero_optimization.offload_optimizer.buffer_count
        zero_optimization.offload_optimizer.cpuadam_cores_perc zero_optimization.offload_optimizer.fast_init
        zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_optimizer.pipeline_read
        zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_param.buffer_count
        zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu
        zero_optimization.offload_param.pin_memory zero_optimization.overlap_comm
        zero_optimization.pipeline_loading_checkpoint zero_optimization.prefetch_bucket_size
        zero_optimization.reduce_bucket_size zero_optimization.reduce_scatter
        zero_optimization.stage3_allgather_sequential
        zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.stage3_max_live_parameters
        zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_prefetch_bucket_size
        zero_optimization.stage3_use_all_reduce_for_fetch_params
        zero_optimization.use_all_reduce_for_fetch_params
        zero_optimization.use_multi_rank_bucket_allreduce""",
    nothing="autotuning vocabulary_size",
)

# Of one of several engines.
OVERWRITES, CONFIG, ZERO_STAGE = "_overwrite_deepspeed_args", "_deepspeed_config", "_zero_stage"
DEFAULTS: dict[str, Any] = {"pipe_parallel_size": 1, "model_parallel_size": 1}
# How a model is cut into parts: of weights alone nothing else has to be as it was.
PARTS = {("hyperparameters", "pipe_parallel_size"), ("hyperparameters", "model_parallel_size")}
START_ANEW = "start anew in another --run-dir, without --resume"
START_WITHOUT = "start anew, without it"
WHERE = "deepspeed"  # what keys of the second comparison are shown under


def meaning_of(path: KeyPath) -> Meaning | None:
    """What a change of a key of the experiment means; None for a key that nobody has decided."""
    if len(path) > 1 and path[0] == "hyperparameters":
        name = str(path[1])
        if name.endswith((CONFIG, ZERO_STAGE)):
            return Meaning.LAYOUT
        if name.endswith(OVERWRITES):
            return _longest(DEEPSPEED, path[2:]) or Meaning.LAYOUT
    return _longest(EXPERIMENT, path)


def meaning_to_deepspeed(path: KeyPath) -> Meaning | None:
    """The same for a key of the mapping that DeepSpeed is given."""
    return _longest(DEEPSPEED, path)


def _longest(table: Mapping[KeyPath, Meaning], path: KeyPath) -> Meaning | None:
    return next((table[path[:end]] for end in range(len(path), 0, -1) if path[:end] in table), None)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What decides a training, in a form that two of them can be compared in.

    Args:
        experiment: Plain data: the experiment's configuration, of its hyperparameters one point.
        ds_config: Plain data: what DeepSpeed is given; None where that is not known.
    """

    experiment: Mapping[str, Any]
    ds_config: Mapping[str, Any] | None


def asked_of(
    experiment: Experiment, ds_config: Mapping[str, Any] | None, trial_seed: int | None = None
) -> Asked:
    """What an experiment asks for. Of environment variables only the names: values may be secrets.

    Args:
        experiment: The experiment.
        ds_config: What DeepSpeed is given.
        trial_seed: The seed that it was trained with; the experiment's own if None.
    """
    searcher = dict(experiment.config.get("searcher") or {})
    if (
        searcher.get("source_checkpoint_uuid") is not None
    ):  # the path and the uuid of one checkpoint are the same
        searcher["source_checkpoint_uuid"] = True
    data = {
        **experiment.config,
        "searcher": searcher,
        "max_restarts": experiment.max_restarts,
        "environment": {
            **(experiment.config.get("environment") or {}),
            "environment_variables": names_of(experiment.config) or None,
        },
        "entrypoint": [experiment.trial, *experiment.train_options],
        "hyperparameters": {
            **DEFAULTS,
            **experiment.hyperparameters.data,
            TRIAL_SEED: experiment.trial_seed if trial_seed is None else trial_seed,
        },
        "resources": {**(experiment.config.get("resources") or {}), "slots_per_trial": experiment.slots},
        "reproducibility": {"experiment_seed": experiment.seed},
    }
    plain = json.loads(json.dumps(plain_copy(data), default=str))
    # As a checkpoint has it, without secrets.
    ds_config = None if ds_config is None else masked({WHERE: ds_config})[WHERE]
    return Asked(experiment=masked(plain), ds_config=ds_config)


def asked_before(
    config: Mapping[str, Any], ds_config: Mapping[str, Any] | None, trial_seed: int | None = None
) -> Asked | None:
    """What the experiment asked for that a checkpoint was written by; None where it cannot be read.

    Args:
        config: The experiment's configuration, as ``load_data.json`` holds it.
        ds_config: What DeepSpeed was given, from there too.
        trial_seed: The trial's seed then.
    """
    experiment, problems = read_experiment(Document(name="the checkpoint", data=dict(config)))
    return None if problems else asked_of(experiment, ds_config, trial_seed)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What has changed since a checkpoint was written.

    Args:
        effective: Lines for people: what takes effect from here on.
        idle: Lines for people: what has no effect any more.
        problems: What must be as it was.
    """

    effective: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def changes_since(
    before: Asked,
    experiment: Experiment,
    resolved: ResolvedConfig,
    *,
    written: str,
    warm_start: str | None = None,
) -> Changes:
    """Compare what is asked for now with what a checkpoint was written by.

    Args:
        before: That.
        experiment: What is asked for now.
        resolved: What it makes.
        written: Words for the checkpoint, for messages.
        warm_start: What is taken of the checkpoint by a training that begins anew: of ``all`` its layout has to
            fit, of ``weights`` how the model is cut into parts; None where training goes on.
    """
    now = asked_of(experiment, resolved.ds_config)
    effective, idle, problems = [], [], []
    for difference, meaning, where in _compared(before, now):
        line = f"{where} {difference}".strip()
        if _must_stay(difference, meaning, warm_start):
            anew = START_ANEW if warm_start is None else START_WITHOUT
            problems.append(_must_be(difference, where, experiment, resolved, written, anew))
        elif meaning is Meaning.NOTHING:
            idle.append(line)
        elif meaning is not Meaning.RESOLVED:
            effective.append(line)
    return Changes(effective=tuple(effective), idle=tuple(idle), problems=tuple(problems))


def _must_stay(difference: Difference, meaning: Meaning, warm_start: str | None) -> bool:
    if warm_start == "weights":
        return difference.path in PARTS
    return meaning is Meaning.LAYOUT or (meaning is Meaning.COURSE and warm_start is None)


def _compared(before: Asked, now: Asked) -> Iterator[tuple[Difference, Meaning, str]]:
    found = list(differences(before.experiment, now.experiment))
    follows = any(difference.path[0] == "reproducibility" for difference in found)
    for difference in found:
        if follows and difference.path == ("hyperparameters", TRIAL_SEED):
            continue
        yield difference, meaning_of(difference.path) or Meaning.COURSE, ""
    if before.ds_config is not None:
        for difference in differences(before.ds_config, now.ds_config):
            yield difference, meaning_to_deepspeed(difference.path) or Meaning.LAYOUT, WHERE


def _must_be(
    difference: Difference,
    where: str,
    experiment: Experiment,
    resolved: ResolvedConfig,
    written: str,
    anew: str,
) -> Problem:
    path = difference.path
    origin = (
        resolved.origins.get(dotted(path), "")
        if where
        else experiment.hyperparameters.origin(path[1:])
        if path[0] == "hyperparameters"
        else experiment.document.origin(path)
    )
    return Problem(
        key=f"{where} {difference.key}".strip(),
        value=difference.now,
        origin=origin,
        message=f"was {in_words(difference.was)} when {written} was written, and must stay so",
        fix=f"go back to {in_words(difference.was)}, or {anew}",
        code="resume-changed",
    )
