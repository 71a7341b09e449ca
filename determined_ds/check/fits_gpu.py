"""Whether a point of a search space fits into the memory of a slot's GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.strategy import Strategy
from determined_ds.documents.document import Document
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.memory import (
    Memory,
    ModelShape,
    alternatives,
    fits,
    format_bytes,
    largest_micro_batch,
    memory_per_rank,
    usable_bytes,
)
from determined_ds.memory.fitting import device_bytes

ShapeOf = Callable[[Experiment, ResolvedConfig, Path, Document], ModelShape]
PARTS = ("parameters", "gradients", "optimizer_states", "activations", "buffers")
MICRO_BATCH = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory of a slot.

    Args:
        num_bytes: Of a slot's GPU.
        shape_of: Builds a point's model for its sizes; raises a :class:`ConfigError` where it cannot.
    """

    num_bytes: int
    shape_of: ShapeOf

    def problem_of(
        self, experiment: Experiment, resolved: ResolvedConfig, context_dir: Path, hyperparameters: Document
    ) -> Problem | None:
        """The problem of a point that does not fit; None where it does.

        Raises:
            ConfigError: its model cannot be built.
        """
        shape = self.shape_of(experiment, resolved, context_dir, hyperparameters)
        size = self.num_bytes
        return memory_problem(shape, resolved, gpu_memory_bytes=size, hyperparameters=hyperparameters)


def memory_problem(
    shape: ModelShape, resolved: ResolvedConfig, *, gpu_memory_bytes: int, hyperparameters: Document
) -> Problem | None:
    """The problem of a configuration that does not fit into a GPU; None where it does."""
    strategy = resolved.strategy.checkpointed_by(shape.checkpoint_interval)
    memory = memory_per_rank(shape, strategy)
    if memory.total_bytes <= usable_bytes(gpu_memory_bytes):
        return None
    path = ("deepspeed_config",)
    return Problem(
        key=hyperparameters.key(path),
        value=hyperparameters.get(path),
        origin=hyperparameters.origin(path),
        message=f"a rank needs {format_bytes(memory.total_bytes)}, and a GPU of {format_bytes(gpu_memory_bytes)}"
        f" leaves {format_bytes(usable_bytes(gpu_memory_bytes))}: {_parts(memory)}",
        fix=_fix(shape, strategy, resolved, gpu_memory_bytes),
        code="memory",
    )


def _parts(memory: Memory) -> str:
    parts = ((name, getattr(memory, f"{name}_bytes")) for name in PARTS)
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts if size)


def _fix(shape: ModelShape, strategy: Strategy, resolved: ResolvedConfig, gpu_memory_bytes: int) -> str:
    """A smaller micro-batch if one fits; else the cheapest strategy that fits, if one does."""
    largest = largest_micro_batch(shape, strategy, gpu_memory_bytes)
    if largest is not None:
        per_replica = resolved.batch.global_batch_size // resolved.batch.replicas
        return f"set {MICRO_BATCH} to {_largest_divisor(per_replica, largest)} (at most {largest} fit)"
    one_each = [replace(other, micro_batch_size=1) for other in alternatives(strategy)]
    fitting = next((other for other in one_each if fits(shape, other, gpu_memory_bytes)), None)
    if fitting is not None:
        return f"use {fitting.name}, which fits with a micro-batch of 1"
    least, name = min((memory_per_rank(shape, other).total_bytes, other.name) for other in one_each)
    needed = format_bytes(device_bytes(least))
    return f"use more slots, a smaller model, or GPUs of {needed} ({name} with a micro-batch of 1)"


def _largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
