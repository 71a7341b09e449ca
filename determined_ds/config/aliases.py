"""Other names for keys, hyperparameters, arguments and options: one table, with a section for each place.

A hyperparameter or an argument, which only this library reads, is accepted by a name that means the same. In a file
that others read too it is not: Determined's master refuses unknown keys of the YAML, and DeepSpeed ignores those of its
JSON. There, and where the meaning differs, the name is refused with the one to write. No name in here is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from determined_ds.config.hyperparameters import SHORTHANDS
from determined_ds.documents.document import KeyPath, dotted

PIPE, MODEL, SEQUENCE, DATA, BATCH = (
    "pipe_parallel_size",
    "model_parallel_size",
    "sequence_parallel_size",
    "data_parallel_world_size",
    "global_batch_size",
)
MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _each(names: str, of: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), of)


# ------------------------------------------------------------------------------------------- hyperparameters

# Read as another hyperparameter.
HYPERPARAMETERS: dict[str, str] = {
    **_each(
        "pipeline_parallel_size pipeline_model_parallel_size num_pipeline_stages pipeline_stages pp_size",
        PIPE,
    ),
    **_each("tensor_parallel_size tensor_model_parallel_size tp_size mp_size", MODEL),
    **_each("ulysses_sequence_parallel_size ulysses_size sp_size", SEQUENCE),
    **_each("data_parallel_size dp_size", DATA),
    **_each("train_batch_size", BATCH),
    **_each("micro_batch_size_per_gpu per_device_train_batch_size", "micro_batch_size"),
}
# Read as a value of the DeepSpeed JSON, where that leaves it open.
OF_THE_JSON: dict[str, KeyPath] = {
    MICRO_BATCH: (MICRO_BATCH,),
    **dict.fromkeys((ACCUMULATION, "accumulation_steps", "grad_accum_steps"), (ACCUMULATION,)),
    **dict.fromkeys(("bf16", "use_bf16"), ("bf16", "enabled")),
    **dict.fromkeys(("fp16", "use_fp16"), ("fp16", "enabled")),
}


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A hyperparameter that the library does not read, though its name suggests it.

    Args:
        write: What to write instead.
        beside: Names of which one, stated beside it, shows that it is the model's own.
        kinds: Types of the values that are refused; of any other type it is the model's own. All, if empty.
    """

    write: str
    beside: tuple[str, ...] = ()
    kinds: tuple[type, ...] = ()


def _offload(what: str) -> Refused:
    return Refused(write=f"overwrite_deepspeed_args: {{zero_optimization: {{{what}: {{device: cpu}}}}}}")


_OWN_BATCH = Refused(
    write=f"{BATCH} (samples of an optimizer step, all replicas) or micro_batch_size (of a forward pass of one)",
    beside=(BATCH, "train_batch_size", MICRO_BATCH, "micro_batch_size"),
)
_PATH = Refused(write="deepspeed_config: the path of the JSON in the context directory")
_SLOTS = Refused(write="resources.slots_per_trial, beside hyperparameters")
REFUSED: dict[str, Refused] = {
    "num_stages": Refused(write=PIPE, beside=(PIPE,)),
    "pipeline": Refused(write=PIPE, kinds=(dict,)),
    "context_parallel_size": Refused(write=f"{SEQUENCE}, which splits sequences by Ulysses"),
    "batch_size": _OWN_BATCH,
    "per_slot_batch_size": _OWN_BATCH,
    **dict.fromkeys(("ds_config", "ds_config_path", "deepspeed_config_path", "deepspeed_config_file"), _PATH),
    "deepspeed": Refused(write=_PATH.write, kinds=(str, dict)),
    "zero_optimization": Refused(write="overwrite_deepspeed_args: {zero_optimization: {...}}"),
    **dict.fromkeys(("offload_optimizer", "optimizer_offload", "cpu_offload"), _offload("offload_optimizer")),
    **dict.fromkeys(("offload_param", "param_offload", "parameter_offload"), _offload("offload_param")),
    **dict.fromkeys(("slots_per_trial", "num_gpus", "n_gpus"), _SLOTS),
}

# ------------------------------------------------------------------------------------------- the experiment's YAML

# Top-level key -> where it belongs, or what to do about it.
IN_YAML: dict[str, str] = {
    **{name: f"hyperparameters.{real}" for name, real in HYPERPARAMETERS.items()},
    **{name: f"hyperparameters.{name}" for name in OF_THE_JSON},
    "num_stages": f"hyperparameters.{PIPE}",
    "batch_size": f"hyperparameters.{BATCH}",
    "num_gpus": "resources.slots_per_trial",
    **_each("ds_config deepspeed", "hyperparameters.deepspeed_config"),
    **_each(
        "training train trainer training_args",
        "write its values as hyperparameters: lengths and periods below hyperparameters.fit, the batch as"
        f" hyperparameters.{BATCH}, and beside them what the model reads",
    ),
    "model": "write its values as hyperparameters; the class of the trial stands in the entrypoint",
    **_each(
        "zero_optimization optimizer scheduler",
        "write it in the DeepSpeed JSON that hyperparameters.deepspeed_config names, or below"
        " hyperparameters.overwrite_deepspeed_args",
    ),
}

# ------------------------------------------------------------------------------------------- the DeepSpeed JSON

_IN_EXPERIMENT = "write it in the experiment's YAML: "
# Unknown key -> where it is read, or what to do about it.
IN_JSON: dict[str, str] = {
    **{
        name: dotted(SHORTHANDS[real]) if real in SHORTHANDS else f"{_IN_EXPERIMENT}hyperparameters.{real}"
        for name, real in HYPERPARAMETERS.items()
        if name != "train_batch_size"
    },
    **{name: dotted(path) for name, path in {**SHORTHANDS, **OF_THE_JSON}.items() if (name,) != path},
    "num_stages": f"{_IN_EXPERIMENT}hyperparameters.{PIPE}",
    "num_gpus": f"{_IN_EXPERIMENT}resources.slots_per_trial",
    "batch_size": f"write train_batch_size (of all replicas) or {MICRO_BATCH} (of one)",
    "communication": "write communication_data_type, comms_logger or zero_optimization.overlap_comm, at their places",
    "compression": "remove it: DeepSpeed 0.19 compresses no model",
    "profiling": 'write "flops_profiler": {"enabled": true}, or "wall_clock_breakdown": true',
    **_each("training train", f"{_IN_EXPERIMENT}hyperparameters, its lengths and periods below fit"),
    "model": f"{_IN_EXPERIMENT}hyperparameters",
    "zero": "zero_optimization",
    **_each("optimizer_offload offload", "zero_optimization.offload_optimizer"),
    **_each("param_offload parameter_offload", "zero_optimization.offload_param"),
    **_each(
        "mixed_precision precision dtype", 'write "bf16": {"enabled": true}, or "fp16": {"enabled": true}'
    ),
    **_each("lr learning_rate", "optimizer.params.lr"),
    **_each("max_grad_norm grad_clip clip_grad_norm", "gradient_clipping"),
    **_each("gradient_checkpointing checkpoint_activations", "activation_checkpointing"),
}
# Keys that DeepSpeed knows and never reads -> what to write instead.
# Source: deepspeed 0.19.8 runtime/config.py get_pipeline_config; PipelineModule takes them as arguments.
NOT_READ: dict[KeyPath, str] = {
    ("pipeline", "stages"): f"{_IN_EXPERIMENT}hyperparameters.{PIPE}",
    ("pipeline", "partition"): "set hyperparameters.partition_method, and remove it here",
    ("pipeline", "seed_layers"): "remove it: it is an argument of DeepSpeed's PipelineModule",
}
# Sections that are written as a plain value -> the form that DeepSpeed takes.
FORMS: dict[KeyPath, str] = {
    **{(name,): '{{"enabled": {value}}}' for name in ("bf16", "fp16", "bfloat16")},
    **{
        ("zero_optimization", f"offload_{what}"): '{{"device": "{device}"}}'
        for what in ("optimizer", "param")
    },
    ("zero_optimization",): '{{"stage": {value}}}',
    ("activation_checkpointing",): '{{"partition_activations": {value}}}',
}

# ------------------------------------------------------------------------------------------- arguments in Python

ARGUMENTS: dict[str, str] = {
    "stage": "zero_stage",
    **_each("global_batch_size", "train_batch_size"),
    **_each(f"{MICRO_BATCH} micro_batch_size_per_gpu per_device_train_batch_size", "micro_batch_size"),
    **_each("accumulation_steps grad_accum_steps", ACCUMULATION),
    **_each("lr", "learning_rate"),
    **_each("max_grad_norm grad_clip clip_grad_norm", "gradient_clipping"),
    **_each("optimizer_type", "optimizer"),
    **_each("scheduler_type lr_scheduler", "scheduler"),
    **_each("warmup_steps", "warmup_num_steps"),
    **_each("total_steps", "total_num_steps"),
    **_each("optimizer_offload cpu_offload", "offload_optimizer"),
    **_each("param_offload parameter_offload cpu_offload_param", "offload_param"),
}
OFFLOAD_ARGUMENTS: dict[str, str] = {
    **_each("device", "offload_device"),
    **_each("path nvme_dir", "nvme_path"),
    **_each("use_pin_memory pinned", "pin_memory"),
}
# Switches of a precision -> the precision.
PRECISIONS: dict[str, str] = {
    **_each("bf16 use_bf16 bfloat16", "bf16"),
    **_each("fp16 use_fp16 float16", "fp16"),
}

# ------------------------------------------------------------------------------------------- options of det-ds

# Options | the options that a command may have instead | the key to set where it has none of them.
OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    name: (tuple(own.split()), key.strip())
    for names, own, key in (
        line.split("|")
        for line in """
--num-gpus --n-gpus --nproc-per-node --num-slots --world-size --gpus --slots|--slots --gpus|resources.slots_per_trial
--zero-stage --stage --zero |  | hyperparameters.zero_stage
--batch-size --train-batch-size --global-batch-size | --global-batch-size | hyperparameters.global_batch_size
--micro-batch-size --micro-batch --per-device-train-batch-size | --micro-batch | hyperparameters.micro_batch_size
--gradient-accumulation-steps |  | hyperparameters.overwrite_deepspeed_args.gradient_accumulation_steps
--pipeline --pipeline-parallel-size --pipe-parallel-size --num-stages | --pipeline | hyperparameters.pipe_parallel_size
--sequence-parallel-size --sp-size |  | hyperparameters.sequence_parallel_size
--model-size --params --num-params | --model-size --params | hyperparameters.model_size
--seq-length --seq-len --max-length --sequence-length | --sequence-length | hyperparameters.sequence_length
--gpu-mem --gpu-memory-gb | --gpu-memory |
--learning-rate --lr |  | hyperparameters.learning_rate
--max-steps --steps | --steps | hyperparameters.fit.max_length.batches
--epochs --num-epochs |  | hyperparameters.fit.max_length.epochs
--seed |  | reproducibility.experiment_seed
--deepspeed --deepspeed-config --ds-config |  | hyperparameters.deepspeed_config
--output-dir --out-dir | --run-dir --output |
--resume-from-checkpoint --checkpoint | --resume |
--device | --accelerator |
""".strip().splitlines()
    )
    for name in names.split()
}


def option_instead(option: str, options: Iterable[str]) -> str:
    """What to write for an option that a command does not have; "" where that is not known.

    Args:
        option: With its hyphens, e.g. ``--num-gpus``.
        options: Those of the command.
    """
    having = set(options)
    candidates, key = OPTIONS.get(option, ((), ""))
    for candidate in candidates:
        if candidate in having:
            return candidate
    return f"--set {key}=VALUE" if key and "--set" in having else ""


# ------------------------------------------------------------------------------------------- imports of a trial

OF_DEEPSPEED = "determined.pytorch.deepspeed"
# Module, and a name that it does not have -> what to write instead.
IMPORTS: dict[tuple[str, str], str] = {
    **{
        ("determined.pytorch", name): f"from {OF_DEEPSPEED} import {name}"
        for name in ("DeepSpeedTrialContext", "ModelParallelUnit", "overwrite_deepspeed_config")
    },
    ("determined.pytorch", "DeepSpeedTrial"): f"from {OF_DEEPSPEED} import DeepSpeedTrial"
    " (or from determined_ds import DataParallelTrial, which writes the training step)",
    (
        "determined.pytorch",
        "dsat",
    ): "remove it: DeepSpeed Autotune is gone from Determined; use `det-ds autotune`",
}
