"""``det-ds new --experiment``: a model, GPUs and a batch -> candidates -> the first that fits -> its JSON and YAML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from determined_ds.cluster.log import LOG_POLICIES
from determined_ds.config.layout import assumed_cuda
from determined_ds.config.params import AUTO
from determined_ds.config.resolve import first_json, reconcile
from determined_ds.config.strategy import Strategy, plain_forms
from determined_ds.documents.document import Document
from determined_ds.documents.text import as_plain, dump_yaml
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.entrypoint import CLASS, ENTRYPOINT_FORM, SCRIPT_FORM
from determined_ds.memory.fitting import Fit, device_bytes, usable_bytes
from determined_ds.memory.model import ModelShape, shape_from_sizes
from determined_ds.memory.rank import memory_per_rank
from determined_ds.memory.units import GIB, divisors, format_bytes, format_count, parse_bytes, parse_count
from determined_ds.pipe.partition import MEASURED

FULL_PIPELINE = 4  # micro-batches a stage that keep a pipeline's bubble under 20 %
# GPT-2 of model_defs stands in for a model whose trial is not named.
GPT2 = "model_defs.gpt2.trial:GPT2Trial"
GPT2_PIPELINE = "model_defs.gpt2.trial:GPT2PipelineTrial"
GPT2_SIZES = {"tiny": 843e3, "small": 124e6, "medium": 355e6, "large": 774e6, "xl": 1558e6}
# (parameters, learning rate). Source: table 2.1 of the GPT-3 paper, arXiv 2005.14165; so is the weight decay.
LEARNING_RATES = (
    *((125e6, 6e-4), (350e6, 3e-4), (760e6, 2.5e-4), (1.3e9, 2e-4)),
    *((2.7e9, 1.6e-4), (6.7e9, 1.2e-4), (13e9, 1e-4), (175e9, 6e-5)),
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model, the GPUs to train it on, and what the user has decided already."""

    shape: ModelShape  # its depth and width are those of published transformers of its size
    slots: int  # in all, a multiple of ``pipe_parallel_size``
    gpu_memory_bytes: int  # of one GPU
    global_batch_size: int  # samples an optimizer step
    precision: str = "bf16"
    offload: str = "none"  # ``cpu``: to host memory; ``auto``: if nothing fits without it
    pipe_parallel_size: int = 1
    entrypoint: str = GPT2  # ``MODULE:CLASS``, or a script with its arguments

    @property
    def replicas(self) -> int:
        """Copies of the model, each with its share of the batch."""
        return self.slots // self.pipe_parallel_size


def read_request(*, parameters: str, gpu_memory: str, sequence_length: int, **decided: Any) -> PlanRequest:
    """Check the options of ``det-ds new --experiment``.

    Args:
        parameters: Of the model, as typed.
        gpu_memory: Of one GPU, as typed.
        sequence_length: Tokens of a sample.
        decided: The other fields of :class:`PlanRequest`.

    Raises:
        ConfigError: a size is not a number, or the options do not go together; with the nearest that would.
    """
    request = PlanRequest(
        shape=shape_from_sizes(num_parameters=parse_count(parameters), sequence_length=sequence_length),
        gpu_memory_bytes=parse_bytes(gpu_memory),
        **decided,
    )
    stages = request.pipe_parallel_size
    if request.entrypoint == GPT2 and stages > 1:
        request = replace(request, entrypoint=GPT2_PIPELINE)
    if request.offload == "cpu" and stages > 1:
        # Measured with deepspeed 0.19.8: in bf16, such a run does not restore its weights from a checkpoint exactly.
        message = f"a pipeline of {stages} stages keeps its optimizer on the GPUs"
        fix, code = "leave out --offload, or --pipe-parallel-size", "offload-pipeline"
        raise ConfigError(Problem(key="--offload", value="cpu", message=message, fix=fix, code=code))
    # What a run would refuse of the slots or the batch.
    strategy = Strategy(zero_stage=1, precision=request.precision, pipe_parallel_size=stages)
    stated = Document(name="", data=_hyperparameters(request, strategy))
    ds = Document(name="", data=_deepspeed_json(request, strategy))
    reconcile(stated, ds, slots=request.slots, accelerator=assumed_cuda(request.slots))
    return request


# ------------------------------------------------------------------------------------------------------ choosing


def candidates(request: PlanRequest) -> Iterator[Fit]:
    """Every strategy that may be chosen, the cheapest in communication first, each with its largest micro-batch.

    For Ψ parameters, ZeRO 0, 1 and 2 send 2 Ψ elements a rank and step, ZeRO 3 sends 3 Ψ (arXiv 1910.02054,
    section 7), and 1 and 2 hold less than 0; offload sends states to the host and back beside that. Where two send
    the same, the one that computes nothing twice comes first. One that does not fit has one sample a micro-batch,
    which needs least.
    """
    stages, samples = request.pipe_parallel_size, request.global_batch_size // request.replicas
    # A pipeline keeps four micro-batches a stage, or as many as there are samples, so that its stages are busy.
    at_least = min(samples, FULL_PIPELINE * stages) if stages > 1 else 1
    sizes = [size for size in divisors(samples) if samples // size >= at_least]
    strategies = [
        replace(
            form,
            precision=request.precision,
            pipe_parallel_size=stages,
            replicas=request.replicas,
            activation_checkpointing=is_checkpointed,
            # Safe with many micro-batches.
            grad_accum_dtype="fp32" if stages > 1 and request.precision == "bf16" else None,
            overlap_comm=True if form.zero_stage >= 2 and not form.offload_optimizer else None,
        )
        for form in plain_forms(has_stages=stages > 1)
        for is_checkpointed in (False, True)
        if (request.offload == "auto" or bool(form.offload_optimizer) == (request.offload != "none"))
        # DeepSpeed trains a pipeline in 16 bits from ZeRO 1 on: see the rules of ``config.rules``.
        and (form.zero_stage or stages == 1 or request.precision == "fp32")
    ]

    def sends(each: Strategy) -> tuple[bool, ...]:
        offloads = bool(each.offload_optimizer), each.zero_stage == 3, bool(each.offload_param)
        return *offloads, each.activation_checkpointing

    for strategy in sorted(strategies, key=sends):
        for size in reversed(sizes):
            each = replace(strategy, micro_batch_size=size, accumulation=samples // size)
            found = Fit(shape=request.shape, strategy=each, gpu_memory_bytes=request.gpu_memory_bytes)
            if found.fits or size == sizes[0]:
                yield found
                break


def nothing_fits(request: PlanRequest, considered: Sequence[Fit]) -> Problem:
    """The problem where no candidate fits, with the GPU that the least would fit."""
    least = min(considered, key=lambda each: each.memory.total_bytes)
    gpu, needed = request.gpu_memory_bytes, least.memory.total_bytes
    left, size = format_bytes(usable_bytes(gpu)), format_count(request.shape.num_parameters)
    message = f"no strategy fits {request.slots} GPUs of {format_bytes(gpu)}, which leave {left} to tensors"
    message += f": the least, by {least.strategy.name} and micro-batches of 1, is {format_bytes(needed)}"
    fix = f"use --gpu-memory {-(-device_bytes(needed) // GIB)}GiB or more, or more slots"
    if any(each.fits for each in candidates(replace(request, offload="auto"))):
        fix += ", or --offload auto"
    return Problem(key="--parameters", value=size, message=message, fix=fix, code="nothing-fits")


# ------------------------------------------------------------------------------------------------------- writing


def experiment_files(request: PlanRequest, strategy: Strategy, name: str) -> dict[str, str]:
    """An experiment's YAML and its DeepSpeed JSON: path from the context directory -> text.

    Args:
        request: What is to be trained.
        strategy: Chosen for it.
        name: Of the experiment and of the files.
    """
    trial, count = request.entrypoint, request.shape.num_parameters
    hyperparameters = _hyperparameters(request, strategy, name)
    entrypoint = SCRIPT_FORM.replace("train.py", trial.removeprefix("python3 "))
    if CLASS.fullmatch(trial):
        entrypoint = ENTRYPOINT_FORM.replace(GPT2, trial)
    sections: dict[str, object] = {
        "name": name,
        "entrypoint": entrypoint,
        "description": f"{strategy.name} on {request.slots} GPUs",
        "resources": {"slots_per_trial": request.slots},
        "hyperparameters": hyperparameters,
        "searcher": {"name": "single", "metric": "validation_loss", "smaller_is_better": True},
        "reproducibility": {"experiment_seed": 0},
        "max_restarts": 2,
        "labels": ["deepspeed", f"zero{strategy.zero_stage}"],
        "log_policies": as_plain(LOG_POLICIES),
    }
    if trial in (GPT2, GPT2_PIPELINE):
        near = min(GPT2_SIZES, key=lambda size: abs(math.log(GPT2_SIZES[size] / count)))
        hyperparameters |= {"model_size": near, "dropout": 0.0}
        sections["data"] = {"path": None, "tokenizer": None}  # Python's own source, as bytes
    gpu, needed = request.gpu_memory_bytes, memory_per_rank(request.shape, strategy).total_bytes
    model = f"{format_count(count)} parameters on {request.slots} x {format_bytes(gpu)}"
    batch = f"micro-batch {strategy.micro_batch_size} x accumulation {strategy.accumulation}"
    text = f"""\
# {model}: by estimate, {format_bytes(needed)} of {format_bytes(usable_bytes(gpu))} a rank.
# {request.global_batch_size} samples = {batch} x replicas {strategy.replicas}
# Learning rate and weight decay are those of GPT-3's model that is nearest in size; the length is that of a trial run.
# Your own code must read activation_checkpointing, sequence_length and data, and report searcher.metric.
{dump_yaml(sections)}"""
    ds_config = json.dumps(_deepspeed_json(request, strategy), indent=2) + "\n"
    return {f"experiments/{name}.yaml": text, hyperparameters["deepspeed_config"]: ds_config}


def default_name(request: PlanRequest, strategy: Strategy) -> str:
    """A name for the experiment and its files, e.g. ``6b_zero1_32gpu``."""
    size = format_count(request.shape.num_parameters).lower()
    pipeline = "pipeline_" * (request.pipe_parallel_size > 1)
    return f"{size}_{pipeline}zero{strategy.zero_stage}_{request.slots}gpu"


def _deepspeed_json(request: PlanRequest, strategy: Strategy) -> dict[str, Any]:
    """The DeepSpeed JSON of a candidate, with what DeepSpeed or a run fills in left out."""
    offload, of_gradients = {"device": "cpu", "pin_memory": AUTO}, strategy.grad_accum_dtype
    zero: dict[str, Any] = {
        "stage": strategy.zero_stage,
        "offload_optimizer": offload if strategy.offload_optimizer else None,
        "offload_param": offload if strategy.offload_param else None,
        "contiguous_gradients": strategy.overlap_comm,
        "overlap_comm": strategy.overlap_comm,
        "stage3_gather_16bit_weights_on_model_save": True if strategy.zero_stage == 3 else None,
    }
    in_fp16 = request.precision == "fp16"
    warm_up = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)
    return first_json(
        {key: value for key, value in zero.items() if value is not None},
        train_micro_batch_size_per_gpu=strategy.micro_batch_size,
        scheduler={"type": "WarmupLR", "params": {**warm_up, "warmup_type": "linear"}},
        bf16=None if in_fp16 else {"enabled": request.precision == "bf16"},
        fp16={"enabled": True} if in_fp16 else None,
        data_types=None if of_gradients is None else {"grad_accum_dtype": of_gradients},
    )


def _hyperparameters(request: PlanRequest, strategy: Strategy, name: str = "") -> dict[str, Any]:
    """Those of a candidate, for any trial."""
    _, rate = min(LEARNING_RATES, key=lambda row: abs(math.log(row[0] / request.shape.num_parameters)))
    found: dict[str, Any] = {
        "global_batch_size": request.global_batch_size,
        "data_parallel_world_size": "auto",
        "pipe_parallel_size": strategy.pipe_parallel_size,
        "deepspeed_config": f"experiments/deepspeed/{name}.json",
        "activation_checkpointing": strategy.activation_checkpointing,
        "fit": {
            "max_length": {"batches": 1000},
            "validation_period": {"batches": 100},
            "checkpoint_period": {"batches": 500},
            "reporting_period": {"batches": 10},
            "checkpoint_policy": "best",
        },
        "sequence_length": request.shape.sequence_length,
        "learning_rate": rate,
        "weight_decay": 0.1,
        "warmup_num_steps": 100,
    }
    if strategy.pipe_parallel_size > 1 and CLASS.fullmatch(request.entrypoint):
        found["partition_method"] = MEASURED  # a script's engine has its own
    return found
