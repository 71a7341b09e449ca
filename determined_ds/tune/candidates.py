"""The choices that can run: rules and the memory model drop the others before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.fitting import usable_bytes
from determined_ds.memory.model import ModelShape
from determined_ds.memory.units import format_bytes
from determined_ds.tune.axes import choices_of, name_of
from determined_ds.tune.choice import Base, Choice
from determined_ds.tune.cost import memory_bytes
from determined_ds.tune.stage_axes import Left
from determined_ds.tune.variants import Variant, decided

PROCESS_BYTES = 600 * 2**20  # of a rank that holds no tensor yet: Python, torch and DeepSpeed on a CPU


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A variant that may be measured.

    Args:
        base: The experiment.
        variant: It.
        shape: Of its model; None where its sizes are not known, as of most scripts.
    """

    base: Base
    variant: Variant
    shape: ModelShape | None

    @property
    def name(self) -> str:
        return self.variant.name


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What there is to choose from.

    Args:
        possible: What can run; the first is the experiment as it is.
        dropped: Reason -> how many choices it dropped.
        left: Axes that are not searched.
    """

    possible: tuple[Candidate, ...]
    dropped: dict[str, int]
    left: tuple[Left, ...]


def candidates_of(
    base: Base, over: Sequence[str], shape_of: Callable[[Variant], ModelShape | None], limit: int
) -> Candidates:
    """Decide every choice, and drop what cannot run or does not fit; of a model of unknown sizes all may fit.

    A trial may refuse a choice, as a cut into more parts than it has layers; then that one is dropped, for its reason.

    Args:
        base: The experiment.
        over: See :data:`determined_ds.tune.axes.AXES`.
        shape_of: Gives the sizes of a variant's model; None where they are not known.
        limit: Bytes of tensors that a rank may hold.

    Raises:
        ConfigError: the experiment as it is does not fit, or its model cannot be built.
    """
    choices, left = choices_of(base, over)
    dropped: Counter[str] = Counter()
    possible: list[Candidate] = []
    for index, choice in enumerate(choices):
        name = name_of(base, choice) if index else f"as it is ({name_of(base, choice)})"
        variant = decided(base, name, choice)
        if not variant.can_run:
            dropped[variant.reason] += 1
            continue
        try:
            shape = shape_of(variant)
        except ConfigError as error:
            if index == 0:
                raise
            dropped[error.problems[0].message.rstrip(".")] += 1
            continue
        candidate = Candidate(base=base, variant=variant, shape=shape)
        if index and (too_many := _too_many_parts(candidate)):
            dropped[too_many] += 1
            continue
        needed = 0 if candidate.shape is None else memory_bytes(variant, candidate.shape)
        if needed > limit and index == 0:
            raise ConfigError(_too_large(base, needed, limit))
        if needed > limit:
            dropped["it does not fit a rank's memory"] += 1
        elif index == 0 or not _is_the_same(variant, possible[0].variant):
            possible.append(candidate)
    return Candidates(possible=tuple(possible), dropped=dict(dropped), left=tuple(left))


def _too_many_parts(candidate: Candidate) -> str:
    """Why a model has too few layers for a choice's chunks; "" where it has enough, or that is not known."""
    assert candidate.variant.resolved is not None
    strategy, shape = candidate.variant.resolved.strategy, candidate.shape
    parts = strategy.pipeline.parts
    if shape is None or strategy.pipe_chunks == 1 or parts <= (shape.num_layers or parts):
        return ""
    return f"{parts} parts are more than the model's {shape.num_layers} layers"


def _is_the_same(variant: Variant, first: Variant) -> bool:
    """Whether both run just alike, though one of them states what the other leaves open."""
    mine, its = variant.resolved, first.resolved
    assert mine is not None
    assert its is not None
    assert variant.experiment is not None
    assert first.experiment is not None
    own = {key: value for key, value in variant.experiment.hyperparameters.data.items() if value is not False}
    other = {key: value for key, value in first.experiment.hyperparameters.data.items() if value is not False}
    for data in (own, other):
        data.pop("deepspeed_config", None)
    return mine.ds_config == its.ds_config and mine.topology == its.topology and own == other


def takes_as_much(candidate: Candidate, other: Candidate) -> bool:
    """Whether a candidate surely takes as much memory as another, by the memory model.

    Without the model's sizes: it is the same but for less sharding, less offloading or a larger micro-batch.
    """
    if candidate.shape is not None and other.shape is not None:
        return memory_bytes(candidate.variant, candidate.shape) >= memory_bytes(other.variant, other.shape)
    own, its = candidate.variant, other.variant
    assert own.resolved is not None
    assert its.resolved is not None
    compared = ("zero_stage", "offload_optimizer", "offload_param", "micro_batch_size")
    rest = {name: getattr(its.choice, name) for name in compared}
    return (
        replace(own.choice, **rest) == its.choice
        and all(getattr(own.choice, name) <= rest[name] for name in compared[:3])
        and own.resolved.batch.micro_batch_size >= its.resolved.batch.micro_batch_size
    )


def memory_of_rank(base: Base) -> int:
    """Bytes of tensors that a rank of this machine may hold."""
    if base.accelerator.name == "cuda":
        import torch

        return usable_bytes(int(torch.cuda.get_device_properties(0).total_memory))
    slots = base.resolved.topology.slots
    return max(0, int(psutil.virtual_memory().available / slots) - PROCESS_BYTES)


def _too_large(base: Base, needed: int, limit: int) -> Problem:
    return Problem(
        key="resources.slots_per_trial",
        value=base.experiment.slots,
        origin=base.document.origin(("resources", "slots_per_trial")),
        message=f"a rank needs {format_bytes(needed)} as the experiment is, and here has {format_bytes(limit)}",
        fix="use a strategy that fits, as det-ds check CONFIG --memory lists them, or a larger machine",
        code="memory",
    )


def reference_of(base: Base, shape_of: Callable[[Variant], ModelShape | None]) -> Candidate | None:
    """The experiment in fp32, not compiled, which every other's loss is held against; None where it is so already."""
    if base.resolved.strategy.precision == "fp32" and not base.resolved.torch_compile:
        return None
    choice: Choice = replace(base.own, precision="fp32", torch_compile=False)
    variant = decided(base, "in fp32, for its loss", choice)
    if not variant.can_run:
        return None
    return Candidate(base=base, variant=variant, shape=shape_of(variant))
