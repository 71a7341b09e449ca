"""A model, GPUs and a batch -> candidates with their bytes, what communicates least first -> the one to take."""

from __future__ import annotations

import itertools
import math
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
    """A model, the GPUs to train it on, and what the user has decided already.

    Args:
        shape: The model; its depth and width are those of published transformers of its size.
        slots: In all, a multiple of ``pipe_parallel_size``.
        gpu_memory_bytes: Of one GPU.
        global_batch_size: Samples an optimizer step.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        offload: ``none``; ``auto``: to host memory, if nothing fits without it; ``cpu`` or ``nvme``: always.
        nvme_path: Folder for what is offloaded to nvme, "" for none.
        pipe_parallel_size: Pipeline stages; 1: without a pipeline.
        is_script: A script is to be trained, whose engine has a schedule and a partition of its own.
        slices: What the number of ranks that share a sequence must divide: the tokens of a sequence, and the attention
            heads. 1: sequences are whole.
    """

    shape: ModelShape
    slots: int
    gpu_memory_bytes: int
    global_batch_size: int
    precision: str = "bf16"
    offload: str = "none"
    nvme_path: str = ""
    pipe_parallel_size: int = 1
    is_script: bool = False
    slices: int = 1

    @property
    def splits(self) -> list[int]:
        """How many ranks may share a sequence, the fewest first: so many that the replicas divide the batch.

        More than one only without a pipeline, whose engine takes no such groups; empty where 1 does not divide the
        batch, though there are as many sequences as replicas.
        """
        replicas = self.slots // self.pipe_parallel_size
        most = math.gcd(self.slots, self.slices) if self.pipe_parallel_size == 1 else 1
        found = [n for n in divisors(most) if self.global_batch_size % (replicas // n) == 0]
        return found if 1 in found or self.slots > self.global_batch_size else []


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was chosen for a request: the first candidate that fits, of a pipeline with its schedule."""

    request: PlanRequest
    strategy: Strategy  # with micro-batch and accumulation
    schedules: Sequence[ScheduleFit] = ()  # those that a pipeline could have; empty without one


def read_request(
    *, parameters: str, gpu_memory: str, sequence_length: int, num_heads: int | None = 1, **decided: Any
) -> PlanRequest:
    """Check the options of ``det-ds new --experiment``.

    Args:
        parameters: Of the model, as typed.
        gpu_memory: Of one GPU, as typed.
        sequence_length: Tokens of a sample.
        num_heads: Attention heads, where ranks may share a sequence; 1: they may not. None: as many as a model of the
            size has.
        decided: The other fields of :class:`PlanRequest`.

    Raises:
        ConfigError: everything that is wrong, with the nearest values that are right.
    """
    found = Problems()
    memory = found.of(lambda: parse_bytes(gpu_memory))
    shape = found.of(
        lambda: shape_from_sizes(num_parameters=parse_count(parameters), sequence_length=sequence_length)
    )
    shape = shape or ModelShape(num_parameters=1)  # whose problem is found
    slices = max(1, math.gcd(num_heads or shape.num_heads or 1, sequence_length))
    request = PlanRequest(shape=shape, gpu_memory_bytes=memory or 1, slices=slices, **decided)

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
    if 0 < shape.num_layers < stages:
        message = f"a model of this size has about {shape.num_layers} layers, fewer than stages"
        wrong(key, stages, message, f"use at most {shape.num_layers}", "pipeline-layers")
    if slots % stages:
        other = max(n for n in divisors(slots) if n < stages)
        fix = f"use --slots {near(slots, stages)}, or {key} {other}"
        wrong(key, stages, f"{stages} stages do not divide {slots} slots", fix, "topology")
    elif not request.splits:
        replicas, flag = slots // stages, "--global-batch-size"
        fix = f"use {flag} {near(batch, replicas)}"
        wrong(flag, batch, f"must be a multiple of the {replicas} replicas", fix, "batch")
    found.raise_any()
    return request


def candidates(request: PlanRequest) -> Iterator[Fit]:
    """Every strategy that may be chosen, the cheapest in communication first, each with its largest micro-batch.

    For Ψ parameters, ZeRO 0, 1 and 2 send 2 Ψ elements a rank and step, ZeRO 3 sends 3 Ψ (arXiv 1910.02054,
    section 7), and 1 and 2 hold less than 0; offload sends states to the host and back beside that. Where two send
    the same, the one that computes nothing twice comes first. Ranks share sequences where nothing fits that does not,
    activations checkpointed or not: their attention exchanges all of its inputs and outputs. One that does not fit has
    one sample a micro-batch, which needs least.
    """
    stages, usable = request.pipe_parallel_size, usable_bytes(request.gpu_memory_bytes)
    in_16_bits = request.precision != "fp32"
    offloads = {"none": (False,), "auto": (False, True)}.get(request.offload, (True,))
    for is_offloaded, sharing in itertools.product(offloads, request.splits):
        forms = [
            form
            for form in plain_forms(has_stages=stages > 1)
            if bool(form.offload_optimizer) == is_offloaded
            # DeepSpeed trains a pipeline in 16 bits from ZeRO 1 on: see the rules of ``config.rules``.
            and (form.zero_stage or stages == 1 or not in_16_bits)
            and (form.zero_stage == 3 or request.offload != "nvme")
        ]
        ways = sorted(
            itertools.product(forms, (False, True)),
            key=lambda way: (way[0].zero_stage == 3, bool(way[0].offload_param), way[1]),
        )
        replicas = request.slots // stages // sharing
        samples = request.global_batch_size // replicas
        # A pipeline keeps four micro-batches a stage, or as many as there are samples, so that its stages are busy.
        at_least = min(samples, FULL_PIPELINE * stages) if stages > 1 else 1
        sizes = [size for size in divisors(samples) if samples // size >= at_least]
        for form, is_checkpointed in ways:
            plain = Strategy(
                precision=request.precision,
                pipe_parallel_size=stages,
                sequence_parallel_size=sharing,
                replicas=replicas,
                activation_checkpointing=is_checkpointed,
                # Safe with many micro-batches.
                grad_accum_dtype="fp32" if stages > 1 and request.precision == "bf16" else None,
                overlap_comm=True if form.zero_stage >= 2 and not is_offloaded else None,
            )
            strategy = of_form(plain, form, "nvme" if request.offload == "nvme" else "cpu")
            tried = [replace(strategy, micro_batch_size=n, accumulation=samples // n) for n in sizes]
            of_each = ((each, memory_per_rank(request.shape, each)) for each in reversed(tried))
            for each, memory in of_each:
                if memory.total_bytes <= usable or each is tried[0]:
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
    point |= {"global_batch_size": request.global_batch_size}
    point |= {"learning_rate": 1e-4, "weight_decay": 0.0, "warmup_num_steps": 1}  # which have no say in it
    stated, ds = Document(name="", data=point), Document(name="", data=deepspeed_json(request, strategy))
    try:
        reconcile(stated, ds, slots=request.slots, accelerator=assumed_cuda(request.slots))
    except ConfigError:
        return False
    return True


def _nothing_fits(request: PlanRequest, considered: Sequence[Fit]) -> Problem:
    """With the nearest that would fit, one thing changed at a time."""
    least = min(considered, key=lambda each: each.memory.total_bytes)
    stages, batch, slots, ways = (
        request.pipe_parallel_size,
        request.global_batch_size,
        request.slots,
        list[str](),
    )

    def first_fit(**changes: Any) -> Fit | None:
        return next((each for each in candidates(replace(request, **changes)) if each.fits), None)

    more = (n * stages for n in divisors(batch) if n * stages > slots)
    ways += [f"--slots {n}" for n in itertools.islice((n for n in more if first_fit(slots=n)), 1)]
    ways.append(f"--gpu-memory {-(-device_bytes(least.memory.total_bytes) // GIB)}GiB")
    if request.offload == "none" and (found := first_fit(offload="auto")):
        ways.append(
            f"--offload cpu (which takes {format_bytes(found.memory.host_bytes)} of host memory a rank)"
        )
    if request.offload in ("none", "auto"):
        for n in (n for n in divisors(slots) if stages < n <= request.shape.num_layers):
            found = first_fit(pipe_parallel_size=n) if batch % (slots // n) == 0 else None
            if found and found.strategy.accumulation >= n:
                ways.append(f"--pipe-parallel-size {n}")
                break
    if stages > 1 and batch % slots == 0 and first_fit(pipe_parallel_size=1):
        ways.append("--pipe-parallel-size 1")
    usable, needed = usable_bytes(request.gpu_memory_bytes), least.memory.total_bytes
    checkpointing = " and activation checkpointing" if least.strategy.activation_checkpointing else ""
    return Problem(
        key="--parameters",
        value=format_count(request.shape.num_parameters),
        message=f"no strategy fits {slots} GPUs of {format_bytes(request.gpu_memory_bytes)}: with one sample a"
        f" micro-batch{checkpointing}, {least.strategy.name} needs {format_bytes(needed)} of the"
        f" {format_bytes(usable)} that CUDA and fragments leave",
        fix="use " + ", or ".join(ways),
        code="nothing-fits",
    )
