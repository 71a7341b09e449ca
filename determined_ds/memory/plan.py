"""A model, GPUs and a batch -> candidates with their bytes, what communicates least first -> the one to take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from determined_ds.config.create import create_deepspeed_config, create_offload_config
from determined_ds.config.layout import assumed_cuda
from determined_ds.config.resolve import reconcile
from determined_ds.config.strategy import Strategy, plain_forms
from determined_ds.documents.document import Document
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.decide import Problems
from determined_ds.memory.fitting import Fit, ScheduleFit, device_bytes, of_form, schedule_fits, usable_bytes
from determined_ds.memory.model import ModelShape, shape_from_sizes
from determined_ds.memory.rank import memory_per_rank
from determined_ds.memory.units import GIB, divisors, format_bytes, format_count, parse_bytes, parse_count
from determined_ds.pipe.partition import MEASURED

FULL_PIPELINE = 4  # micro-batches a stage that keep a pipeline's bubble under 20 %
BOOKKEEPING = 0.05  # of a step, that a schedule may take beyond a simpler one for the same work


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model, the GPUs to train it on, and what the user has decided already."""

    shape: ModelShape  # its depth and width are those of published transformers of its size
    slots: int  # in all, a multiple of ``pipe_parallel_size``
    gpu_memory_bytes: int  # of one GPU
    global_batch_size: int  # samples an optimizer step
    precision: str = "bf16"
    offload: str = "none"  # ``auto``: to host memory, if nothing fits without it; ``cpu`` or ``nvme``: always
    nvme_path: str = ""  # folder for what is offloaded to nvme
    pipe_parallel_size: int = 1
    is_script: bool = False  # a script is to be trained, whose engine has its own schedule and partition

    @property
    def replicas(self) -> int:
        """Copies of the model, each with its share of the batch."""
        return self.slots // self.pipe_parallel_size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was chosen for a request: the first candidate that fits, of a pipeline with its schedule."""

    request: PlanRequest
    strategy: Strategy  # with micro-batch and accumulation
    schedules: Sequence[ScheduleFit] = ()  # those that a pipeline could have; empty without one


def read_request(*, parameters: str, gpu_memory: str, sequence_length: int, **decided: Any) -> PlanRequest:
    """Check the options of ``det-ds new --experiment``.

    Args:
        parameters: Of the model, as typed.
        gpu_memory: Of one GPU, as typed.
        sequence_length: Tokens of a sample.
        decided: The other fields of :class:`PlanRequest`.

    Raises:
        ConfigError: everything that is wrong, with the nearest values that are right.
    """
    found = Problems()
    memory = found.of(lambda: parse_bytes(gpu_memory))
    shape = found.of(
        lambda: shape_from_sizes(num_parameters=parse_count(parameters), sequence_length=sequence_length)
    )
    # Of sizes that are wrong the problem is found; the others are checked all the same.
    request = PlanRequest(
        shape=shape or ModelShape(num_parameters=1), gpu_memory_bytes=memory or 1, **decided
    )

    def wrong(key: str, value: object, message: str, fix: str, code: str) -> None:
        found.problems.append(Problem(key=key, value=value, message=message, fix=fix, code=code))

    def near(number: int, unit: int) -> str:
        """The multiples of a unit on either side of a number, >= 1."""
        below = number // unit * unit
        return " or ".join(str(each) for each in (below, below + unit) if each)

    offload, path, batch = request.offload, request.nvme_path, request.global_batch_size
    slots, stages, key = request.slots, request.pipe_parallel_size, "--pipe-parallel-size"
    if offload == "nvme" and not path:
        message = "missing: --offload nvme needs a folder for its files"
        wrong("--nvme-path", NOT_GIVEN, message, "give e.g. --nvme-path /local_nvme", "offload-nvme-path")
    elif path and offload != "nvme":
        fix = "give --offload nvme, or leave it out"
        wrong("--nvme-path", path, f"is not used: --offload is {offload}", fix, "offload-nvme-path")
    if offload in ("cpu", "nvme") and stages > 1:
        # Measured with deepspeed 0.19.8: in bf16, such a run does not restore its weights from a checkpoint exactly.
        message = f"a pipeline of {stages} stages keeps its optimizer on the GPUs"
        wrong("--offload", offload, message, f"leave out --offload, or {key}", "offload-pipeline")
    if 0 < request.shape.num_layers < stages:
        message = f"a model of this size has about {request.shape.num_layers} layers, fewer than stages"
        wrong(key, stages, message, f"use at most {request.shape.num_layers}", "pipeline-layers")
    if slots % stages:
        other = max(n for n in divisors(slots) if n < stages)
        fix = f"use --slots {near(slots, stages)}, or {key} {other}"
        wrong(key, stages, f"{stages} stages do not divide {slots} slots", fix, "topology")
    elif batch % request.replicas:
        fix = f"use --global-batch-size {near(batch, request.replicas)}"
        message = f"must be a multiple of the {request.replicas} replicas"
        wrong("--global-batch-size", batch, message, fix, "batch")
    found.raise_any()
    return request


def candidates(request: PlanRequest) -> Iterator[Fit]:
    """Every strategy that may be chosen, the cheapest in communication first, each with its largest micro-batch.

    For Ψ parameters, ZeRO 0, 1 and 2 send 2 Ψ elements a rank and step, ZeRO 3 sends 3 Ψ (arXiv 1910.02054,
    section 7), and 1 and 2 hold less than 0; offload sends states to the host and back beside that. Where two send
    the same, the one that computes nothing twice comes first. One that does not fit has one sample a micro-batch,
    which needs least.
    """
    stages, usable = request.pipe_parallel_size, usable_bytes(request.gpu_memory_bytes)
    samples = request.global_batch_size // request.replicas
    # A pipeline keeps four micro-batches a stage, or as many as there are samples, so that its stages are busy.
    at_least = min(samples, FULL_PIPELINE * stages) if stages > 1 else 1
    sizes = [size for size in divisors(samples) if samples // size >= at_least]
    for is_offloaded in {"none": (False,), "auto": (False, True)}.get(request.offload, (True,)):
        forms = [
            form
            for form in plain_forms(has_stages=stages > 1)
            if bool(form.offload_optimizer) == is_offloaded
            # DeepSpeed trains a pipeline in 16 bits from ZeRO 1 on: see the rules of ``config.rules``.
            and (form.zero_stage or stages == 1 or request.precision == "fp32")
            and (form.zero_stage == 3 or request.offload != "nvme")
        ]
        ways = sorted(
            itertools.product(forms, (False, True)),
            key=lambda way: (way[0].zero_stage == 3, bool(way[0].offload_param), way[1]),
        )
        for form, is_checkpointed in ways:
            plain = Strategy(
                precision=request.precision,
                pipe_parallel_size=stages,
                replicas=request.replicas,
                activation_checkpointing=is_checkpointed,
                # Safe with many micro-batches.
                grad_accum_dtype="fp32" if stages > 1 and request.precision == "bf16" else None,
                overlap_comm=True if form.zero_stage >= 2 and not is_offloaded else None,
            )
            strategy = of_form(plain, form, "nvme" if request.offload == "nvme" else "cpu")
            for size in reversed(sizes):
                each = replace(strategy, micro_batch_size=size, accumulation=samples // size)
                memory = memory_per_rank(request.shape, each)
                if memory.total_bytes <= usable or size == sizes[0]:
                    yield Fit(strategy=each, memory=memory, fits=memory.total_bytes <= usable)
                    break


def choose(request: PlanRequest, considered: Sequence[Fit]) -> Plan:
    """The first candidate that fits; of a pipeline under the schedule in which its stages wait least.

    A schedule that saves less than 5 % of a step over a simpler one is not taken.

    Raises:
        ConfigError: nothing fits; the fix lists what would: more slots, larger GPUs, offload, a pipeline.
    """
    chosen = next((each.strategy for each in considered if each.fits), None)
    if chosen is None:
        raise ConfigError(_nothing_fits(request, considered))
    if chosen.pipe_parallel_size == 1 or request.is_script:
        return Plan(request=request, strategy=chosen)
    chosen = replace(chosen, partition_method=MEASURED)
    schedules = [each for each in schedule_fits(request.shape, chosen) if _runs(request, each.strategy)]
    usable = usable_bytes(request.gpu_memory_bytes)
    for each in sorted(schedules, key=lambda each: each.strategy.pipe_chunks):
        has_room = max(stage.total_bytes for stage in each.stages) <= usable
        if has_room and (1 - each.strategy.bubble) > (1 + BOOKKEEPING) * (1 - chosen.bubble):
            chosen = each.strategy
    return Plan(request=request, strategy=chosen, schedules=schedules)


def deepspeed_json(request: PlanRequest, strategy: Strategy) -> dict[str, Any]:
    """The DeepSpeed JSON of a candidate, with what DeepSpeed or a run fills in left out."""
    offload = None
    if strategy.offload_optimizer:
        is_nvme = request.offload == "nvme"
        offload = create_offload_config("nvme" if is_nvme else "cpu", nvme_path=request.nvme_path or None)
    return create_deepspeed_config(
        zero_stage=strategy.zero_stage,
        micro_batch_size=strategy.micro_batch_size,
        precision=request.precision,  # type: ignore[arg-type]
        offload_optimizer=offload,
        offload_param=offload if strategy.offload_param else None,
        contiguous_gradients=strategy.overlap_comm,
        overlap_comm=strategy.overlap_comm,
        stage3_gather_16bit_weights_on_model_save=True if strategy.zero_stage == 3 else None,
        grad_accum_dtype=strategy.grad_accum_dtype,  # type: ignore[arg-type]
    )


def _runs(request: PlanRequest, strategy: Strategy) -> bool:
    """Whether the rules accept a pipeline under its schedule."""
    names = ("pipe_parallel_size", "pipe_schedule", "pipe_chunks", "activation_checkpointing")
    point = {name: getattr(strategy, name) for name in names}
    # Which have no say in it, but for the batch.
    point |= {"global_batch_size": request.global_batch_size, "learning_rate": 1e-4}
    point |= {"weight_decay": 0.0, "warmup_num_steps": 1}
    stated, ds = Document(name="", data=point), Document(name="", data=deepspeed_json(request, strategy))
    try:
        reconcile(stated, ds, slots=request.slots, accelerator=assumed_cuda(request.slots))
    except ConfigError:
        return False
    return True


def _nothing_fits(request: PlanRequest, considered: Sequence[Fit]) -> Problem:
    """With the nearest that would fit, one thing changed at a time."""
    least = min(considered, key=lambda each: each.memory.total_bytes)
    stages, batch, slots = request.pipe_parallel_size, request.global_batch_size, request.slots
    needed, gpu = least.memory.total_bytes, request.gpu_memory_bytes

    def fits(**changes: Any) -> bool:
        changed = replace(request, **changes)
        return batch % changed.replicas == 0 and any(each.fits for each in candidates(changed))

    more = (n * stages for n in divisors(batch) if n * stages > slots)
    ways = [f"--slots {n}" for n in itertools.islice((n for n in more if fits(slots=n)), 1)]
    ways.append(f"--gpu-memory {-(-device_bytes(needed) // GIB)}GiB")
    if request.offload == "none" and fits(offload="auto") and stages == 1:
        ways.append("--offload cpu")
    if request.offload == "none" and stages > 1 and fits(pipe_parallel_size=1):
        ways.append("--pipe-parallel-size 1")
    checkpointing = " and activation checkpointing" if least.strategy.activation_checkpointing else ""
    return Problem(
        key="--parameters",
        value=format_count(request.shape.num_parameters),
        message=f"no strategy fits {slots} GPUs of {format_bytes(gpu)}: with one sample a micro-batch{checkpointing}, "
        f"{least.strategy.name} needs {format_bytes(needed)} of the {format_bytes(usable_bytes(gpu))} that CUDA and "
        "fragments leave",
        fix="use " + ", or ".join(ways),
        code="nothing-fits",
    )
