"""PlanRequest -> Plan: the strategy that communicates least of those that fit, and why each of its parts was chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from determined_ds.config.forms import Form, plain_forms
from determined_ds.config.strategy import Strategy
from determined_ds.errors import ConfigError, Problem
from determined_ds.memory import (
    Memory,
    fits,
    format_bytes,
    format_count,
    memory_per_rank,
    usable_bytes,
)
from determined_ds.memory.fitting import device_bytes, of_form
from determined_ds.memory.plan.needs import PlanRequest
from determined_ds.memory.plan.schedule_choice import (
    Rejected,
    partition_in_words,
    schedule_in_words,
    with_schedule,
)
from determined_ds.memory.plan.sequence_choice import sequences_in_words
from determined_ds.memory.units import GIB

FULL_PIPELINE = 4  # micro-batches a stage that keep a pipeline's bubble under 20 %


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One part of a plan.

    Args:
        key: The key in the JSON or the YAML.
        value: What it is set to, in words.
        reason: Why, in a sentence with numbers.
    """

    key: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy for a model on GPUs.

    Args:
        needs: What it was chosen for.
        strategy: The strategy, micro-batch and accumulation included.
        memory: What a rank needs, by the memory model.
        choices: Each part of it, with the reason.
    """

    needs: PlanRequest
    strategy: Strategy
    memory: Memory
    choices: tuple[Decision, ...]

    def choice(self, key: str) -> Decision:
        """The decision on a key."""
        return next(choice for choice in self.choices if choice.key == key)


def choose_plan(needs: PlanRequest) -> Plan:
    """Choose the strategy that communicates least of those that fit, with the largest micro-batch that it has room for.

    Args:
        needs: What to choose for.

    Raises:
        ConfigError: nothing fits; the fix lists what would: more GPUs, larger ones, offload, a pipeline.
    """
    rejected: list[Strategy] = []
    for candidate in candidates(needs):
        strategy = with_largest_micro_batch(needs, candidate)
        if strategy is not None:
            strategy, orders = with_schedule(needs, strategy)
            return Plan(
                needs=needs,
                strategy=strategy,
                memory=memory_per_rank(needs.shape, strategy),
                choices=tuple(_choices(needs, strategy, rejected, orders)),
            )
        rejected.append(candidate)
    raise ConfigError(_nothing_fits(needs, rejected))


def candidates(needs: PlanRequest) -> Iterator[Strategy]:
    """Every strategy that may be chosen, the cheapest in communication first.

    For Ψ parameters, ZeRO 0, 1 and 2 send 2 Ψ elements a rank and step, ZeRO 3 sends 3 Ψ (arXiv 1910.02054,
    section 7), and 1 and 2 hold less than 0; offload sends states to the host and back beside that. Where two send
    the same, the one that computes nothing twice comes first. Ranks share sequences where nothing fits that does not,
    activations checkpointed or not: their attention exchanges all of its inputs and outputs.
    """
    tried = {"none": (False,), "auto": (False, True)}.get(needs.offload, (True,))
    for offloads, ranks_of_sequence in itertools.product(tried, needs.splits):
        forms = [
            form
            for form in plain_forms(has_stages=needs.pipe_parallel_size > 1)
            if form.offload_optimizer == offloads
            and (form.zero_stage > 0 or not _wants_zero_1(needs))
            and (
                form.zero_stage == 3 or needs.offload != "nvme"
            )  # the optimizer goes to nvme from ZeRO 3 only
        ]
        tiers = itertools.groupby(forms, key=lambda form: (form.zero_stage == 3, form.offload_param))
        for _, tier in tiers:
            alike = list(tier)
            yield from (
                _strategy(needs, form, checkpointing, ranks_of_sequence)
                for checkpointing in (False, True)
                for form in alike
            )


def accumulates_in_fp32(needs: PlanRequest) -> bool:
    """Whether gradients are accumulated in fp32, which is safe with many micro-batches, and needs ZeRO 1.

    Source: deepspeed 0.19.8 runtime/engine.py _do_optimizer_sanity_check, which at stage 0 raises.
    """
    return needs.pipe_parallel_size > 1 and needs.precision == "bf16"


def _wants_zero_1(needs: PlanRequest) -> bool:
    """Whether DeepSpeed trains this only from ZeRO 1 on: a pipeline in 16 bits. See the rules of ``config.rules``."""
    return needs.pipe_parallel_size > 1 and needs.precision in ("bf16", "fp16")


def _strategy(needs: PlanRequest, form: Form, checkpointing: bool, ranks_of_sequence: int) -> Strategy:
    """With one sample a micro-batch, which needs least."""
    replicas = needs.gpus // needs.pipe_parallel_size // ranks_of_sequence
    plain = Strategy(
        precision=needs.precision,
        pipe_parallel_size=needs.pipe_parallel_size,
        sequence_parallel_size=ranks_of_sequence,
        replicas=replicas,
        accumulation=needs.global_batch_size // replicas,
        activation_checkpointing=checkpointing,
        grad_accum_dtype="fp32" if accumulates_in_fp32(needs) else None,
        overlap_comm=True if form.zero_stage >= 2 and not form.offload_optimizer else None,
    )
    return of_form(plain, form, "nvme" if needs.offload == "nvme" else "cpu")


def with_largest_micro_batch(needs: PlanRequest, strategy: Strategy) -> Strategy | None:
    """The same with the largest micro-batch that divides a replica's samples and fits; None where none does.

    A pipeline keeps four micro-batches a stage, or as many as there are samples, so that its stages are busy.
    """
    samples = needs.global_batch_size // strategy.replicas
    at_least = (
        min(samples, FULL_PIPELINE * strategy.pipe_parallel_size) if strategy.pipe_parallel_size > 1 else 1
    )
    for micro_batch in _divisors(samples):
        if samples // micro_batch < at_least:
            continue
        tried = replace(strategy, micro_batch_size=micro_batch, accumulation=samples // micro_batch)
        if fits(needs.shape, tried, needs.gpu_memory_bytes):
            return tried
    return None


def _divisors(number: int) -> list[int]:
    """All of them, the largest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)}, reverse=True)


# ------------------------------------------------------------------------------------------------------- reasons


PRECISION_REASONS = {
    "bf16": "2 bytes a parameter and activation, and the range of fp32, so that no loss has to be scaled",
    "fp16": "2 bytes a parameter and activation; its range is small, so DeepSpeed scales the loss",
    "fp32": "4 bytes a parameter and activation, twice those of bf16",
}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _needed(needs: PlanRequest, strategy: Strategy, **changes: Any) -> str:
    """Bytes that a rank needs under a strategy with some parts changed."""
    return format_bytes(memory_per_rank(needs.shape, replace(strategy, **changes)).total_bytes)


def _choices(
    needs: PlanRequest, strategy: Strategy, rejected: list[Strategy], orders: list[Rejected]
) -> Iterator[Decision]:
    memory = memory_per_rank(needs.shape, strategy)
    values = {
        "zero_optimization.stage": (
            f"ZeRO {strategy.zero_stage}",
            f"{_room(needs, memory)}; {_next_cheaper(needs, strategy, rejected)}",
        ),
        "offload": _offload(needs, strategy, memory, rejected),
        "precision": (needs.precision, PRECISION_REASONS[needs.precision]),
        "pipe_parallel_size": _pipeline(needs, strategy),
        **_order(needs, strategy, orders),
        **sequences_in_words(needs, strategy),
        "train_micro_batch_size_per_gpu": (str(strategy.micro_batch_size), _micro_batch(needs, strategy)),
        "gradient_accumulation_steps": (
            str(strategy.accumulation),
            f"{needs.global_batch_size} = micro-batch {strategy.micro_batch_size} x {strategy.accumulation} accumulated"
            f" x {_count(strategy.replicas, 'replica')}, exactly",
        ),
        "activation_checkpointing": _checkpointing(needs, strategy, memory),
    }
    for key, (value, reason) in values.items():
        yield Decision(key=key, value=value, reason=reason)


def _order(needs: PlanRequest, strategy: Strategy, orders: list[Rejected]) -> dict[str, tuple[str, str]]:
    if strategy.pipe_parallel_size == 1:
        return {}
    return {
        "pipe_schedule": schedule_in_words(needs, strategy, orders),
        "partition_method": partition_in_words(strategy),
    }


def _room(needs: PlanRequest, memory: Memory) -> str:
    parts = (
        ("model states", memory.model_states_bytes),
        ("activations", memory.activations_bytes),
        ("buffers", memory.buffers_bytes),
    )
    said = " + ".join(f"{name} {format_bytes(number)}" for name, number in parts if number)
    usable = format_bytes(usable_bytes(needs.gpu_memory_bytes))
    return (
        f"a rank needs {format_bytes(memory.total_bytes)} ({said}) of the {usable} that CUDA and fragments leave of"
        f" {format_bytes(needs.gpu_memory_bytes)}"
    )


def _beside_zero(strategy: Strategy) -> tuple[object, ...]:
    """What else differs between candidates."""
    offloads = (strategy.offload_optimizer, strategy.offload_param)
    return (*offloads, strategy.activation_checkpointing, strategy.sequence_parallel_size)


def _next_cheaper(needs: PlanRequest, strategy: Strategy, rejected: list[Strategy]) -> str:
    """What the strategies that communicate less would need."""
    alike = [
        other
        for other in rejected
        if _beside_zero(other) == _beside_zero(strategy) and other.zero_stage < strategy.zero_stage
    ]
    if alike:
        least = min(alike, key=lambda other: memory_per_rank(needs.shape, other).total_bytes)
        return f"ZeRO {least.zero_stage} would need {_needed(needs, least)} for one sample"
    if strategy.zero_stage == 1 and accumulates_in_fp32(needs):
        return "a bf16 pipeline accumulates gradients in fp32, which DeepSpeed does from ZeRO 1 on"
    if strategy.zero_stage == 1 and _wants_zero_1(needs):
        return "DeepSpeed scales the fp16 loss of a pipeline from ZeRO 1 on"
    return "no permitted strategy communicates less"


def _offload(
    needs: PlanRequest, strategy: Strategy, memory: Memory, rejected: list[Strategy]
) -> tuple[str, str]:
    if not strategy.offload_optimizer:
        auto = needs.offload == "auto"
        return "nothing", "all fits the GPU, and offload is slower" if auto else "--offload is none"
    moved = "the optimizer and the parameters" if strategy.offload_param else "the optimizer"
    to = "files" if needs.offload == "nvme" else "host memory"
    reason = f"{format_bytes(memory.host_bytes)} a rank are in {to}, and every step moves them"
    if needs.offload == "auto":
        inside = [memory_per_rank(needs.shape, other) for other in rejected if not other.offload_optimizer]
        least = min(other.total_bytes for other in inside)
        reason += f"; nothing fits without it, {format_bytes(least)} would be needed"
    else:
        reason += f", by --offload {needs.offload}"
    if strategy.offload_param:
        without = _needed(needs, strategy, offload_param=None, micro_batch_size=1)
        reason += f"; with the parameters on the GPU it would need {without} for one sample"
    return f"{moved} to {to}", reason


def _pipeline(needs: PlanRequest, strategy: Strategy) -> tuple[str, str]:
    stages, micro_batches = strategy.pipe_parallel_size, strategy.accumulation
    shared = strategy.sequence_parallel_size
    layout = f"{_count(needs.gpus, 'GPU')} / {_count(stages, 'stage')}"
    layout += f" / {shared} to a sequence" if shared > 1 else ""
    layout += f" = {_count(strategy.replicas, 'replica')}"
    if stages == 1:
        return "none", f"{layout}; --pipeline is 1"
    return f"{stages} stages", f"{layout}; each step has {micro_batches} micro-batches"


def _micro_batch(needs: PlanRequest, strategy: Strategy) -> str:
    samples = needs.global_batch_size // strategy.replicas
    replicas = _count(strategy.replicas, "replica")
    share = f"{_count(needs.global_batch_size, 'sample')} / {replicas} = {samples} each"
    larger = [divisor for divisor in _divisors(samples) if divisor > strategy.micro_batch_size]
    if not larger:
        return f"{share}, and all fit in one pass"
    tried = replace(strategy, micro_batch_size=larger[-1], accumulation=samples // larger[-1])
    if tried.pipe_parallel_size > 1 and (problem := tried.pipeline.problem()):
        return f"{share}; the next divisor is {larger[-1]}, and {strategy.pipe_schedule} cannot order it: {problem}"
    if fits(needs.shape, tried, needs.gpu_memory_bytes):
        return f"{share}; larger ones would be fewer, and {FULL_PIPELINE} a stage keep a pipeline busy"
    return f"{share}; the next divisor, {larger[-1]}, would need {_needed(needs, tried)}"


def _checkpointing(needs: PlanRequest, strategy: Strategy, memory: Memory) -> tuple[str, str]:
    if not strategy.activation_checkpointing:
        activations = format_bytes(memory.activations_bytes)
        return "off", f"activations of {activations} fit, and nothing is computed twice"
    without = _needed(needs, strategy, activation_checkpointing=False, micro_batch_size=1)
    return "on", (
        f"without it a rank would need {without} for one sample; with it each block is"
        " computed again in the backward pass, about a third more work"
    )


# --------------------------------------------------------------------------------------------- where nothing fits


def _nothing_fits(needs: PlanRequest, rejected: list[Strategy]) -> Problem:
    least = min(rejected, key=lambda strategy: memory_per_rank(needs.shape, strategy).total_bytes)
    memory = memory_per_rank(needs.shape, least)
    checkpointing = " and activation checkpointing" if least.activation_checkpointing else ""
    gpu, usable = (
        format_bytes(size) for size in (needs.gpu_memory_bytes, usable_bytes(needs.gpu_memory_bytes))
    )
    return Problem(
        key="--model-size",
        value=format_count(needs.shape.num_parameters),
        message=f"no strategy fits {_count(needs.gpus, 'GPU')} of {gpu}: with one sample a micro-batch{checkpointing},"
        f" {least.name} needs {format_bytes(memory.total_bytes)} of the {usable} that CUDA and fragments leave",
        fix="use " + ", or ".join(_ways_out(needs, memory)),
        code="nothing-fits",
    )


def _ways_out(needs: PlanRequest, least: Memory) -> Iterator[str]:
    """The nearest that would fit, one thing changed at a time."""
    for replicas in sorted(_divisors(needs.global_batch_size)):
        gpus = replicas * needs.pipe_parallel_size
        if gpus > needs.gpus and _first_fit(replace(needs, gpus=gpus)):
            yield f"--gpus {gpus}"
            break
    yield f"--gpu-memory {-(-device_bytes(least.total_bytes) // GIB)}GiB"
    if needs.offload == "none" and (found := _first_fit(replace(needs, offload="auto"))):
        host = format_bytes(memory_per_rank(needs.shape, found).host_bytes)
        yield f"--offload cpu (which takes {host} of host memory a rank)"
    for stages in sorted(_divisors(needs.gpus)) if needs.offload in ("none", "auto") else ():
        more = needs.pipe_parallel_size < stages <= needs.shape.num_layers
        if more and needs.global_batch_size % (needs.gpus // stages) == 0:
            found = _first_fit(replace(needs, pipe_parallel_size=stages))
            if found and found.accumulation >= stages:
                yield f"--pipeline {stages}"
                break
    if needs.pipe_parallel_size > 1:
        whole = needs.global_batch_size % needs.gpus == 0
        if whole and _first_fit(replace(needs, pipe_parallel_size=1)):
            yield "--pipeline 1"


def _first_fit(needs: PlanRequest) -> Strategy | None:
    return next(
        (candidate for candidate in candidates(needs) if with_largest_micro_batch(needs, candidate)), None
    )
