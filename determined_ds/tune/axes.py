"""The choices that ``det-ds autotune`` has: every way to carry out the same training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from determined_ds.config.layout import Accelerator
from determined_ds.config.strategy import plain_forms
from determined_ds.tune.choice import Base, Choice
from determined_ds.tune.stage_axes import Left, schedules_of, unordered

# What may be searched over, in the words of --over, and what it means.
AXES = {
    "zero_stage": "the ZeRO stage, 0 to 3",
    "micro_batch": "samples of a forward pass; accumulation makes up for it",
    "pipeline": "pipeline stages, where the trial's module has a PipelineTrial",
    "pipe_schedule": "the order of a pipeline's passes: 1f1b, interleaved, zb-h1, dualpipev",
    "offload": "optimizer and parameters in host memory; on GPUs",
    "precision": "bf16 where the processor computes it; the loss must agree with fp32's",
    "activation_checkpointing": "blocks computed again going backward, where the model has a hyperparameter for it",
}
MAX_MICRO_BATCHES = 8  # sizes of a micro-batch that are tried: the largest powers of two, and the whole share
CPU_BF16 = ("avx512_bf16", "amx_bf16")


def choices_of(base: Base, over: Sequence[str]) -> tuple[list[Choice], list[Left]]:
    """Every combination of what is searched over, the experiment as it is among them, and what was left out.

    Args:
        base: The experiment; what is not searched over stays as it has it.
        over: Of :data:`AXES`.
    """
    left: list[Left] = []
    found: list[Choice] = [base.own]
    forms = list(_forms(base, over, left))
    left += unordered(base, forms, over)
    for form in forms:
        found += _with_details(base, form, over, left)
    unique = {tuple(sorted(choice.stated().items())): choice for choice in found}
    return list(unique.values()), list(dict.fromkeys(left))


def _forms(base: Base, over: Sequence[str], left: list[Left]) -> Iterator[Choice]:
    """ZeRO stages and pipelines: how the model is spread over the slots."""
    own, slots = base.own, base.own.slots
    depths = {own.pipe_parallel_size}
    if "pipeline" in over:
        depths |= {depth for depth in range(1, slots + 1) if slots % depth == 0}
        if slots < 2:
            left.append(Left(axis="pipeline", reason="a pipeline needs two slots or more"))
    for depth in sorted(depths):
        if depth > 1 and not base.has_form(depth):
            is_script = base.experiment.script is not None
            reason = (
                "a script keeps its own stages" if is_script else "the trial's module has no PipelineTrial"
            )
            left.append(Left(axis="pipeline", reason=reason))
        if not base.has_form(depth):
            continue
        stages = sorted({form.zero_stage for form in plain_forms(has_stages=depth > 1)})
        if depth == slots > 1:
            stages = [0]  # a pipeline of one replica has nothing to divide
        if "zero_stage" not in over:
            is_own = depth == own.pipe_parallel_size
            stages = [own.zero_stage if is_own else min(own.zero_stage, stages[-1])]
        for stage in stages:
            form = replace(own, zero_stage=stage, pipe_parallel_size=depth, micro_batch_size=None)
            is_zeropp = own.zeropp and stage == 3 and depth == 1
            yield replace(form, offload_optimizer=False, offload_param=False, zeropp=is_zeropp)


def _with_details(base: Base, form: Choice, over: Sequence[str], left: list[Left]) -> Iterator[Choice]:
    """All that can be chosen once it is known how the model is spread."""
    details: dict[str, tuple[Any, ...]] = {
        "micro_batch_size": _micro_batches(base, form, over),
        "pipe_schedule": schedules_of(base, form, over),
        "offload": _offloads(base, form, over, left),
        "precision": _precisions(base, over, left),
        "activation_checkpointing": _checkpointing(base, over, left),
    }
    for values in itertools.product(*details.values()):
        chosen = dict(zip(details, values, strict=True))
        optimizer, param = chosen.pop("offload")
        yield replace(form, offload_optimizer=optimizer, offload_param=param, **chosen)


def _micro_batches(base: Base, form: Choice, over: Sequence[str]) -> tuple[int | None, ...]:
    """Divisors of a replica's share; in a pipeline, such that every stage has a micro-batch to work on."""
    a_replica = form.pipe_parallel_size * base.resolved.topology.sequence_parallel_size
    share, rest = divmod(base.resolved.batch.global_batch_size, form.slots // a_replica)
    if rest or "micro_batch" not in over:
        is_own = form.pipe_parallel_size == base.own.pipe_parallel_size
        return (base.own.micro_batch_size if is_own else None,)
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    if form.pipe_parallel_size > 1:
        divisors = [size for size in divisors if share // size >= form.pipe_parallel_size]
    powers = [size for size in divisors if size & (size - 1) == 0 or size == share]
    return tuple(powers[-MAX_MICRO_BATCHES:]) or (None,)


def _offloads(
    base: Base, form: Choice, over: Sequence[str], left: list[Left]
) -> tuple[tuple[bool, bool], ...]:
    """(optimizer, parameters) that the form of a choice can offload."""
    alike = [
        (bool(each.offload_optimizer), bool(each.offload_param))
        for each in plain_forms(has_stages=form.pipe_parallel_size > 1)
        if each.zero_stage == form.zero_stage
    ]
    if "offload" not in over:
        own = (base.own.offload_optimizer, base.own.offload_param and form.zero_stage == 3)
        return (own if len(alike) > 1 else (False, False),)
    if base.accelerator.name == "cpu":
        left.append(Left(axis="offload", reason="a CPU has no other memory to offload to"))
        return ((False, False),)
    return tuple(alike)


def _precisions(base: Base, over: Sequence[str], left: list[Left]) -> tuple[str | None, ...]:
    own = base.resolved.strategy.precision
    if "precision" not in over:
        return (None,)
    if not computes_bf16(base.accelerator):
        left.append(Left(axis="precision", reason="this processor has no instructions for bf16"))
        return (None,)
    if not base.sources.takes_bf16:
        left.append(Left(axis="precision", reason="the script casts no input to bf16"))
        return (None,)
    return (None, "bf16") if own == "fp32" else (None,)


def computes_bf16(accelerator: Accelerator, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bf16 is computed by instructions made for it; on a CPU it may be that it is, and off by default."""
    if accelerator.name != "cpu":
        return accelerator.bf16
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return any(flag in text for flag in CPU_BF16)


def _checkpointing(base: Base, over: Sequence[str], left: list[Left]) -> tuple[bool | None, ...]:
    axis, key = "activation_checkpointing", base.checkpointing_key
    if axis not in over:
        return (None,)
    if key is None:
        left.append(Left(axis=axis, reason="the model reads no hyperparameter of that name"))
        return (None,)
    return (None, not base.states(key))


def name_of(base: Base, choice: Choice) -> str:
    """A choice in a few words: ``zero1 micro 8 bf16 compiled``."""
    words = [f"zero{choice.zero_stage}{'++' * choice.zeropp}"]
    if choice.pipe_parallel_size > 1:
        stage = f" zero{choice.zero_stage}" if choice.zero_stage else ""
        words = [f"pipeline of {choice.pipe_parallel_size}{stage}", choice.pipe_schedule or ""]
    if choice.micro_batch_size is not None:
        words.append(f"micro {choice.micro_batch_size}")
    words.append("offload all" if choice.offload_param else "offload optimizer" * choice.offload_optimizer)
    words.append(choice.precision or "")
    if choice.activation_checkpointing is not None:
        words.append("checkpointed" if choice.activation_checkpointing else "not checkpointed")
    return " ".join(filter(None, words))
