"""Whether a point of a search space fits into the memory of a slot's GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import Document
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.memory.fitting import alternatives, device_bytes, fits, largest_micro_batch, usable_bytes
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import memory_per_rank
from determined_ds.memory.units import format_bytes

ShapeOf = Callable[[Experiment, ResolvedConfig, Path, Document], ModelShape]
PARTS = ("parameters", "gradients", "optimizer_states", "activations", "buffers")


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
        """The problem of a point that does not fit, with what does; None where it does.

        Raises:
            ConfigError: its model cannot be built.
        """
        size, shape = self.num_bytes, self.shape_of(experiment, resolved, context_dir, hyperparameters)
        strategy = resolved.strategy.checkpointed_by(shape.checkpoint_interval)
        needed = memory_per_rank(shape, strategy)
        if needed.total_bytes <= usable_bytes(size):
            return None
        largest = largest_micro_batch(shape, strategy, size)
        one_each = [replace(other, micro_batch_size=1) for other in alternatives(strategy)]
        fitting = next((other.name for other in one_each if fits(shape, other, size)), None)
        if largest is not None:
            of_replica = resolved.batch.global_batch_size // resolved.batch.replicas
            divisors = (
                number for number in range(min(of_replica, largest), 0, -1) if of_replica % number == 0
            )
            fix = f"set train_micro_batch_size_per_gpu to {next(divisors)} (at most {largest} fit)"
        elif fitting is not None:
            fix = f"use {fitting}, which fits with a micro-batch of 1"
        else:
            least, name = min((memory_per_rank(shape, other).total_bytes, other.name) for other in one_each)
            larger = f"GPUs of {format_bytes(device_bytes(least))} ({name} with a micro-batch of 1)"
            fix = f"use more slots, a smaller model, or {larger}"
        parts = ((name.replace("_", " "), getattr(needed, f"{name}_bytes")) for name in PARTS)
        message = (
            f"a rank needs {format_bytes(needed.total_bytes)}, and a GPU of {format_bytes(size)} leaves "
            f"{format_bytes(usable_bytes(size))}: "
            + ", ".join(f"{name} {format_bytes(part)}" for name, part in parts if part)
        )
        return hyperparameters.problem(("deepspeed_config",), message, fix, "memory")
