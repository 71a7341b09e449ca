"""What fits a device: a strategy, its largest micro-batch, the other strategies and schedules of the same training."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace

from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.strategy import Strategy, plain_forms
from determined_ds.documents.document import Document
from determined_ds.errors import Problem
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import Memory, memory_of_stages, memory_per_rank
from determined_ds.memory.units import GIB, divisors, format_bytes
from determined_ds.pipe.orders import INTERLEAVED, SCHEDULES, default_chunks
from determined_ds.pipe.timeline import most_held

# What CUDA, cuBLAS and NCCL take before the first tensor. The context alone is 0.3 to 0.6 GiB from Volta to Hopper;
# NCCL adds about 0.1 a communicator, cuBLAS up to 0.03 a handle. Source: "Model Memory Anatomy" of transformers'
# documentation has 1.3 GB with kernels loaded eagerly (CUDA 11); loading them lazily, as since 12.2, about halves it.
CUDA_BYTES = GIB
# Share of the rest that torch's caching allocator cannot use: blocks are rounded up to 2 MiB, and gaps remain.
FRAGMENTED = 0.05
LARGEST_MICRO_BATCH = 1 << 20
CHUNKS = (2, 4)  # of a rank, under the interleaved schedule, that are looked at


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A strategy on a device of a given size."""

    strategy: Strategy
    memory: Memory  # of one rank
    fits: bool | None  # None where no device was named
    largest_micro_batch: int | None = None  # None where none fits, or no device was named


@dataclass(frozen=True, kw_only=True)
class ScheduleFit:
    """A schedule of a pipeline."""

    strategy: Strategy
    most_held: tuple[int, ...]  # the most micro-batches whose activations each stage holds, each of one part
    stages: tuple[Memory, ...]  # bytes of a rank of each stage


def usable_bytes(gpu_memory_bytes: int) -> int:
    """Bytes of a device for tensors: all of it, less CUDA's own and a share for fragments."""
    return max(0, int((gpu_memory_bytes - CUDA_BYTES) * (1 - FRAGMENTED)))


def device_bytes(tensor_bytes: int) -> int:
    """Bytes that a device must have for so many bytes of tensors: the inverse of :func:`usable_bytes`."""
    return int(tensor_bytes / (1 - FRAGMENTED)) + CUDA_BYTES + 1


def largest_micro_batch(shape: ModelShape, strategy: Strategy, gpu_memory_bytes: int) -> int | None:
    """The largest micro-batch that fits, all else as in ``strategy``; None where not even one sample does.

    Where nothing is known of the activations, the answer is None too.
    """

    def needed(samples: int) -> int:
        return memory_per_rank(shape, replace(strategy, micro_batch_size=samples)).total_bytes

    if not shape.knows_activations:
        return None
    sizes = range(LARGEST_MICRO_BATCH + 1)
    return bisect(sizes, usable_bytes(gpu_memory_bytes), lo=1, key=needed) - 1 or None


def fit(shape: ModelShape, strategy: Strategy, gpu_memory_bytes: int | None) -> Fit:
    """A strategy's bytes, and how it fits."""
    memory = memory_per_rank(shape, strategy)
    if gpu_memory_bytes is None:
        return Fit(strategy=strategy, memory=memory, fits=None)
    return Fit(
        strategy=strategy,
        memory=memory,
        fits=memory.total_bytes <= usable_bytes(gpu_memory_bytes),
        largest_micro_batch=largest_micro_batch(shape, strategy, gpu_memory_bytes),
    )


def alternatives(strategy: Strategy) -> tuple[Strategy, ...]:
    """Every ZeRO stage and offload on the same slots, from the cheapest in time to the cheapest in memory.

    Where ``strategy`` is a pipeline, its rows come first; the others have its slots as replicas.
    """
    stages = strategy.pipe_parallel_size
    without = replace(
        strategy,
        pipe_parallel_size=1,
        replicas=strategy.replicas * stages,
        pipe_schedule=Strategy.pipe_schedule,
        pipe_chunks=Strategy.pipe_chunks,
    )
    piped = [of_form(strategy, form) for form in plain_forms(has_stages=True)] if stages > 1 else []
    if stages > 1 and strategy.offload_optimizer:
        piped.append(strategy)
    return (*piped, *(of_form(without, form) for form in plain_forms(has_stages=False)))


def of_form(strategy: Strategy, form: Strategy, device: str = "cpu") -> Strategy:
    """A strategy with the ZeRO stage and the offload of another, to ``cpu`` or ``nvme``.

    Stage 0 does not accumulate in another type than it computes in. Source: deepspeed 0.19.8 runtime/engine.py
    _do_optimizer_sanity_check, which raises.
    """
    return replace(
        strategy,
        zero_stage=form.zero_stage,
        offload_optimizer=device if form.offload_optimizer else None,
        offload_param=device if form.offload_param else None,
        grad_accum_dtype=strategy.grad_accum_dtype if form.zero_stage else None,
    )


def schedule_fits(shape: ModelShape, strategy: Strategy) -> list[ScheduleFit]:
    """The schedules that a pipeline could have with the same stages and micro-batches; none without a pipeline."""
    if strategy.pipe_parallel_size == 1:
        return []
    found, num_layers = [], len(shape.layers) or shape.num_layers
    for schedule in SCHEDULES:
        chunks = {default_chunks(schedule)}
        if schedule == INTERLEAVED:
            chunks |= {*CHUNKS, strategy.pipe_chunks} - {1}
        for number in sorted(chunks):
            each = replace(strategy, pipe_schedule=schedule, pipe_chunks=number)
            pipe = each.pipeline
            if not pipe.problem() and (pipe.parts <= num_layers or each == strategy):
                stages = tuple(memory_of_stages(shape, each))
                found.append(ScheduleFit(strategy=each, most_held=tuple(most_held(pipe)), stages=stages))
    return found


def memory_problem(
    size: int, shape: ModelShape, hyperparameters: Document, resolved: ResolvedConfig
) -> Problem | None:
    """The problem of a training that does not fit a GPU of so many bytes, with what does; None where it does."""
    strategy = resolved.strategy.checkpointed_by(shape.checkpoint_interval)
    needed, usable = memory_per_rank(shape, strategy).total_bytes, usable_bytes(size)
    if needed <= usable:
        return None
    if largest := largest_micro_batch(shape, strategy, size):
        of_replica = divisors(resolved.batch.global_batch_size // resolved.batch.replicas)
        best = max(number for number in of_replica if number <= largest)
        fix = f"set train_micro_batch_size_per_gpu to {best} (at most {largest} fit)"
    else:
        fix = "use more slots, larger GPUs or a smaller model: --memory shows what each strategy needs"
        for other in alternatives(strategy):
            if memory_per_rank(shape, replace(other, micro_batch_size=1)).total_bytes <= usable:
                fix = f"use {other.name}, which fits with a micro-batch of 1"
                break
    total, gpu, left = map(format_bytes, (needed, size, usable))
    message = f"a rank needs {total}, and a GPU of {gpu} leaves {left}: --memory shows what for"
    return hyperparameters.problem(("deepspeed_config",), message, fix, "memory")
