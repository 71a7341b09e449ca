"""Bytes that one rank needs at the peak of a step.

A step has two peaks. As the backward pass begins, all model states, all activations and the communication buckets
are there. As the optimizer steps, the activations are gone, and gradients are there a second time, flattened and
widened to fp32. What the second needs beyond the first is counted as buffers, so that the parts add up to the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from determined_ds.config.strategy import ELEMENT_BYTES, Strategy
from determined_ds.memory.activations import activations_of_stages
from determined_ds.memory.model_shape import ModelShape
from determined_ds.memory.states import (
    model_states,
    optimizer_bytes,
    parameters_of_rank,
    share_of_all,
    uses_bf16_optimizer,
)

# DeepSpeedEngine.buffered_allreduce_fallback's elements_per_buffer (deepspeed 0.19.8 runtime/engine.py).
ALLREDUCE_ELEMENTS = 500_000_000


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank, the one that needs most.

    Args:
        parameters_bytes: Parameters, in the precision that the model computes in.
        gradients_bytes: Gradients.
        optimizer_states_bytes: The optimizer's copy of the parameters, and its states.
        activations_bytes: What the forward pass keeps for the backward pass.
        buffers_bytes: Buckets of communication, parameters that ZeRO 3 gathers, copies that the step makes.
        host_bytes: Host memory of this rank; every other field is of the device.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_states_bytes: int
    activations_bytes: int
    buffers_bytes: int
    host_bytes: int

    @property
    def model_states_bytes(self) -> int:
        """Parameters, gradients and optimizer states, on the device."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_states_bytes

    @property
    def total_bytes(self) -> int:
        """All on the device, at the peak."""
        return self.model_states_bytes + self.activations_bytes + self.buffers_bytes


def memory_per_rank(shape: ModelShape, strategy: Strategy) -> Memory:
    """Bytes of the rank that needs most.

    What a CUDA context and the allocator's fragments take is not in it: see
    :func:`determined_ds.memory.fitting.usable_bytes`.
    """
    return max(memory_of_stages(shape, strategy), key=lambda each: (each.total_bytes, each.host_bytes))


def memory_of_stages(shape: ModelShape, strategy: Strategy) -> list[Memory]:
    """Bytes of a rank of each pipeline stage, by its schedule; of one rank without a pipeline."""
    found = []
    for stage, activations in enumerate(activations_of_stages(shape, strategy)):
        states = model_states(shape, strategy, stage)
        buffers = backward_buffer_bytes(shape, strategy, stage)
        more_in_step = step_bytes(shape, strategy, stage) - buffers - activations
        found.append(
            Memory(
                parameters_bytes=states.parameters_bytes,
                gradients_bytes=states.gradients_bytes,
                optimizer_states_bytes=states.optimizer_states_bytes,
                activations_bytes=activations,
                buffers_bytes=buffers + max(0, more_in_step),
                host_bytes=states.host_bytes + _host_buffer_bytes(shape, strategy),
            )
        )
    return found


def backward_buffer_bytes(shape: ModelShape, strategy: Strategy, pipe_stage: int | None = None) -> int:
    """Bytes of buffers while the backward pass runs.

    Source: deepspeed 0.19.8. Buckets are ``reduce_bucket_size`` long however small the model is
    (runtime/zero/stage_1_and_2.py setup_buckets; runtime/zero/stage3.py _setup_for_real_optimizer), and two where
    communication overlaps; ZeRO 3 has one all the time, and gathers up to ``max_live_parameters``
    (runtime/zero/partitioned_param_coordinator.py).
    """
    stage, element = strategy.zero_stage, strategy.element_bytes
    in_all, trainable = parameters_of_rank(shape, strategy, pipe_stage)
    if stage == 0 or uses_bf16_optimizer(strategy):
        return 0
    bucket = (
        strategy.reduce_bucket_size
        if strategy.contiguous_gradients
        else min(trainable, strategy.reduce_bucket_size)
    )
    if stage == 3:
        gathered = min(
            in_all, max(shape.largest_layer, strategy.max_live_parameters) + strategy.prefetch_bucket_size
        )
        # A bucket's gradients are laid out anew, a part for each rank, to be reduced and scattered.
        in_flight = min(trainable, strategy.reduce_bucket_size)
        return element * (gathered + bucket + in_flight)
    width = ELEMENT_BYTES[strategy.grad_dtype] if stage == 1 else element
    buckets = 2 if strategy.overlap_comm else 1
    buffers = width * bucket * buckets
    if strategy.offload_optimizer:
        buffers += element * _largest_parameter(shape, strategy)  # temp_grad_buffer_for_gpu_offload
    elif stage == 2 and strategy.accumulation > 1 and strategy.grad_dtype == strategy.precision:
        buffers += element * share_of_all(trainable, shape, strategy)  # the sum so far, beside the newest
    return buffers


def step_bytes(shape: ModelShape, strategy: Strategy, pipe_stage: int | None = None) -> int:
    """Bytes beyond the model states while the optimizer steps; less than 0 where gradients were let go before.

    Source: deepspeed 0.19.8: step in runtime/zero/stage_1_and_2.py and runtime/fp16/fused_optimizer.py,
    _prepare_fp32_grad_for_sub_group in runtime/zero/stage3.py, allreduce_bucket in runtime/engine.py.
    """
    stage, element = strategy.zero_stage, strategy.element_bytes
    gradient, master = ELEMENT_BYTES[strategy.grad_dtype], ELEMENT_BYTES[strategy.master_dtype]
    _, trainable = parameters_of_rank(shape, strategy, pipe_stage)
    partition = share_of_all(trainable, shape, strategy)
    if uses_bf16_optimizer(strategy):
        return 0 if gradient == master else master * partition
    if stage == 0:
        reduced = element * min(trainable, ALLREDUCE_ELEMENTS) if strategy.shards > 1 else 0
        widened = 0 if strategy.precision == "fp32" else 2 * 4 * trainable  # one by one, then flat
        return max(reduced, widened)
    if strategy.offload_optimizer:
        return 0
    widening = 0 if gradient == master else master
    if stage == 3:
        stepped = min(partition, strategy.sub_group_size)
        bucket = element * strategy.reduce_bucket_size if strategy.contiguous_gradients else 0
        return bucket + (gradient + widening) * stepped
    let_go = gradient * (trainable - partition) if stage == 1 else 0
    return (gradient + widening) * partition - let_go


def _largest_parameter(shape: ModelShape, strategy: Strategy) -> int:
    return -(-shape.largest_layer // strategy.model_parallel_size)


def _host_buffer_bytes(shape: ModelShape, strategy: Strategy) -> int:
    if strategy.offload_optimizer and strategy.zero_stage in (1, 2):
        return strategy.element_bytes * _largest_parameter(
            shape, strategy
        )  # temp_grad_buffer_for_cpu_offload
    return 0


def checkpoint_copies_bytes(shape: ModelShape, strategy: Strategy) -> int:
    """Host memory of a rank for checkpoints that are written while training continues: two copies of its share.

    All ranks together write each weight and each optimizer state once.
    """
    in_all, trainable = parameters_of_rank(shape, strategy)
    weights = 0 if strategy.zero_stage == 3 else strategy.element_bytes * in_all
    return 2 * -(-(weights + optimizer_bytes(strategy) * trainable) // strategy.shards)
