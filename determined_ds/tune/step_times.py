"""How long a step takes by arithmetic over computing, communication and the optimizer, at a machine's rates."""

from __future__ import annotations

from dataclasses import dataclass

from determined_ds.config.strategy import Strategy
from determined_ds.memory import ModelShape
from determined_ds.memory.estimate import checkpoint_copies_bytes
from determined_ds.protocol.machine_figures import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND_RECV
from determined_ds.tune.rates import Rates

STEP_BYTES = (
    28  # that AdamW reads and writes of a parameter: fp32 weight, gradient and two moments, and the copy
)
GATHER_BUCKET = 500_000_000  # elements: DeepSpeed 0.19.8's allgather_bucket_size


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step, by what takes them.

    Args:
        compute_s: Forward and backward, a pipeline's bubble included.
        communication_s: Between ranks, were none of it hidden behind computing.
        optimizer_s: The optimizer's step, with what is offloaded of it.
    """

    compute_s: float
    communication_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s + self.optimizer_s


def step_times(strategy: Strategy, shape: ModelShape, rates: Rates) -> StepTimes:
    """Seconds of a step; up to a factor that all strategies share, where rates are assumed.

    Compute is 6 operations a parameter and token (8 where activations are computed again; "Scaling Laws for Neural
    Language Models", arXiv 2001.08361); a pipeline takes that much longer as its schedule
    has ranks wait. Communication is ZeRO's (arXiv 1910.02054, section 7): twice the parameters a step, three times at
    stage 3; stages 2 and 3 reduce after every micro-batch.

    Args:
        strategy: How it is trained.
        shape: Of the model.
        rates: Of a rank.
    """
    count, stages = strategy.accumulation, strategy.pipe_parallel_size
    parameters, ranks = shape.num_parameters / stages, strategy.slots
    samples = strategy.micro_batch_size * count
    work = (
        (8 if strategy.activation_checkpointing else 6) * parameters * max(1, shape.sequence_length) * samples
    )
    starts = rates.start_s * count * strategy.pipe_chunks
    compute = (work / rates.flops_per_s(strategy, shape.num_parameters) + starts) / (1 - strategy.bubble)
    shards = strategy.shards if strategy.zero_stage else 1
    step = STEP_BYTES * parameters / shards / rates.memory_bytes_per_s(ranks)
    element, to_device = strategy.element_bytes, rates.to_device_bytes_per_s(ranks)
    communication = _between_replicas(strategy, shape, rates) + _between_stages(strategy, shape, rates)
    if strategy.offload_optimizer:
        step += STEP_BYTES * parameters / shards / rates.host_bytes_per_s(ranks)
        step += 2 * element * parameters / shards / to_device
    if strategy.offload_param:
        communication += 3 * count * element * parameters / shards / to_device
    return StepTimes(compute_s=compute, communication_s=communication, optimizer_s=step)


def is_predictable(shape: ModelShape, rates: Rates) -> bool:
    """Whether seconds mean seconds: the samples' length is known, and operations per second were measured."""
    return shape.sequence_length > 0 and rates.knows_training


def expected_step_s(strategy: Strategy, shape: ModelShape | None, rates: Rates) -> float | None:
    """Seconds of a step by measured figures; None where they, or the model's sizes, are unknown."""
    if shape is None or not is_predictable(shape, rates):
        return None
    return step_times(strategy.checkpointed_by(shape.checkpoint_interval), shape, rates).total_s


def _between_replicas(strategy: Strategy, shape: ModelShape, rates: Rates) -> float:
    """Reducing gradients and gathering parameters.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: with ``use_multi_rank_bucket_allreduce`` stages
    1 and 2 all-reduce whole buckets; by assumed rates they are counted as the paper has them.
    """
    replicas, stage, count = strategy.shards, strategy.zero_stage, strategy.accumulation
    if replicas < 2:
        return 0.0
    size = shape.num_parameters / strategy.pipe_parallel_size * strategy.element_bytes
    buckets = _calls(size, strategy.reduce_bucket_size * strategy.element_bytes)
    all_reduces = stage == 0 or (stage < 3 and rates.knows_collectives)
    reduce = rates.collective_s(ALL_REDUCE if all_reduces else REDUCE_SCATTER, size, replicas, calls=buckets)
    if stage == 0:
        return reduce
    if stage == 3:  # gathered layer by layer, forward and backward
        layers = max(
            shape.num_layers or 1, _calls(size, strategy.prefetch_bucket_size * strategy.element_bytes)
        )
        gather = rates.collective_s(ALL_GATHER, size, replicas, calls=layers)
        return count * (reduce + 2 * gather)
    gather = rates.collective_s(
        ALL_GATHER, size, replicas, calls=_calls(size, GATHER_BUCKET * strategy.element_bytes)
    )
    return (count if stage == 2 else 1) * reduce + gather


def _between_stages(strategy: Strategy, shape: ModelShape, rates: Rates) -> float:
    """Activations forward and their gradients backward."""
    if strategy.pipe_parallel_size < 2:
        return 0.0
    width = max(1, shape.sequence_length) * max(1, shape.hidden_size) * strategy.element_bytes
    passes = 2 * strategy.accumulation * strategy.pipe_chunks
    return rates.collective_s(SEND_RECV, passes * strategy.micro_batch_size * width, 2, calls=passes)


def checkpoint_seconds(strategy: Strategy, shape: ModelShape, rates: Rates) -> float | None:
    """Seconds that training waits for a checkpoint that is written at once; None where that was not measured."""
    size = checkpoint_copies_bytes(shape, strategy) / 2 * strategy.slots
    return rates.checkpoint_s(size, strategy.zero_stage, strategy.slots)


def _calls(size_bytes: float, bucket_bytes: float) -> int:
    return max(1, -int(-size_bytes // max(1, bucket_bytes)))
