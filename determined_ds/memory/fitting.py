"""What fits a device: a strategy, its largest micro-batch, the other strategies and schedules of the same training."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace
from functools import cached_property

from determined_ds.config.strategy import Strategy, plain_forms
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import Memory, memory_of_stages, memory_per_rank
from determined_ds.memory.units import GIB
from determined_ds.pipe.orders import INTERLEAVED, SCHEDULES, default_chunks

# What CUDA, cuBLAS and NCCL take before the first tensor. The context alone is 0.3 to 0.6 GiB from Volta to Hopper;
# NCCL adds about 0.1 a communicator, cuBLAS up to 0.03 a handle. Source: "Model Memory Anatomy" of transformers'
# documentation has 1.3 GB with kernels loaded eagerly (CUDA 11); loading them lazily, as since 12.2, about halves it.
CUDA_BYTES = GIB
# Share of the rest that torch's caching allocator cannot use: blocks are rounded up to 2 MiB, and gaps remain.
FRAGMENTED = 0.05
LARGEST_BATCH = 1 << 20  # samples of a micro-batch


def usable_bytes(gpu_memory_bytes: int) -> int:
    """Bytes of a device for tensors: all of it, less CUDA's own and a share for fragments."""
    return max(0, int((gpu_memory_bytes - CUDA_BYTES) * (1 - FRAGMENTED)))


def device_bytes(tensor_bytes: int) -> int:
    """Bytes that a device must have for so many bytes of tensors: the inverse of :func:`usable_bytes`."""
    return int(tensor_bytes / (1 - FRAGMENTED)) + CUDA_BYTES + 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model that is trained by a strategy, on a device of a given size."""

    shape: ModelShape
    strategy: Strategy
    gpu_memory_bytes: int | None = None  # None: no device is named

    @property
    def stages(self) -> list[Memory]:
        """Bytes of a rank of each pipeline stage; of one rank without a pipeline."""
        return memory_of_stages(self.shape, self.strategy)

    @cached_property
    def memory(self) -> Memory:
        """Bytes of the rank that needs most."""
        return memory_per_rank(self.shape, self.strategy)

    @property
    def fits(self) -> bool | None:
        """Whether it does; None where no device is named."""
        gpu = self.gpu_memory_bytes
        return None if gpu is None else self.memory.total_bytes <= usable_bytes(gpu)

    @cached_property
    def largest_micro_batch(self) -> int | None:
        """The largest micro-batch that fits, all else as in the strategy.

        None where not even one sample does, where no device is named, or where nothing is known of the activations.
        """

        def needed(samples: int) -> int:
            return memory_per_rank(self.shape, replace(self.strategy, micro_batch_size=samples)).total_bytes

        gpu = self.gpu_memory_bytes
        if gpu is None or not self.shape.knows_activations:
            return None
        return bisect(range(LARGEST_BATCH + 1), usable_bytes(gpu), lo=1, key=needed) - 1 or None


def alternatives(strategy: Strategy) -> list[Strategy]:
    """Every ZeRO stage and offload on the same slots, from the cheapest in time to the cheapest in memory.

    Where ``strategy`` is a pipeline, its rows come first; the others have its slots as replicas.
    """

    def by(form: Strategy, strategy: Strategy) -> Strategy:
        # Stage 0 does not accumulate in another type than it computes in: deepspeed 0.19.8 runtime/engine.py
        # _do_optimizer_sanity_check raises.
        return replace(
            strategy,
            zero_stage=form.zero_stage,
            offload_optimizer=form.offload_optimizer,
            offload_param=form.offload_param,
            grad_accum_dtype=strategy.grad_accum_dtype if form.zero_stage else None,
        )

    stages, found = strategy.pipe_parallel_size, []
    if stages > 1:
        found = [by(form, strategy) for form in plain_forms(has_stages=True)]
        found += [strategy] if strategy.offload_optimizer else []
        strategy = replace(strategy, pipe_parallel_size=1, replicas=strategy.replicas * stages)
        strategy = replace(strategy, pipe_schedule=Strategy.pipe_schedule, pipe_chunks=Strategy.pipe_chunks)
    return found + [by(form, strategy) for form in plain_forms(has_stages=False)]


def schedule_fits(shape: ModelShape, strategy: Strategy) -> list[Fit]:
    """The schedules that a pipeline could have with the same stages and micro-batches; none without a pipeline."""
    if strategy.pipe_parallel_size == 1:
        return []
    found, num_layers = [], len(shape.layers) or shape.num_layers
    for schedule in SCHEDULES:
        chunks = {default_chunks(schedule)}
        if schedule == INTERLEAVED:
            chunks |= {2, 4, strategy.pipe_chunks} - {1}
        for number in sorted(chunks):
            each = replace(strategy, pipe_schedule=schedule, pipe_chunks=number)
            is_possible = not each.pipeline.problem() and each.pipeline.parts <= num_layers
            if is_possible or each == strategy:
                found.append(Fit(shape=shape, strategy=each))
    return found
