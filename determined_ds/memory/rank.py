"""Bytes that a rank needs at the peak of a step: model states, activations, buffers; what is offloaded, on the host.

**Model states.** For Ψ parameters trained by Adam in mixed precision, ZeRO (arXiv 1910.02054, sections 3.1 and 5)
counts 2 Ψ of parameters, 2 Ψ of gradients and 12 Ψ of fp32 copy, momentum and variance, of which N replicas keep
4 Ψ + 12 Ψ/N at stage 1, 2 Ψ + 14 Ψ/N at stage 2 and 16 Ψ/N at stage 3. Where deepspeed 0.19.8 holds something else
when the backward pass ends, so does this::

    fp32, stages 1-2  8 Ψ + 12 Ψ/N and 4 Ψ + 16 Ψ/N: the optimizer's partition is cloned
                      (runtime/zero/stage_1_and_2.py, single_partition_of_fp32_groups); at stage 0 it is not
    fp32, stage 3     20 Ψ/N: the branch that would share the storage compares a torch.device with a string
                      (runtime/zero/stage3.py, _create_fp32_partitions)
    grad_accum_dtype  gradients are of its width; of bf16 parameters with fp32 gradients stage 1 keeps both widths
                      whole (runtime/bf16_optimizer.py, fp32_groups_gradients_flat), unless bf16.immediate_grad_update;
                      stage 2 keeps a partition in fp32 (stage_1_and_2.py, _build_compact_grad_partition_buffer)
    bf16 pipelines    divide the optimizer states among the replicas at stage 0 too (Strategy.uses_bf16_optimizer)
    tensor parallel   the embedding is whole on each rank; of Ψ that are cut, one of T ranks has Ψ/T
    ZeRO++ (hpz)      a second copy of the parameters, divided among few ranks (Parameter.ds_secondary_tensor)
    offload           the optimizer's partition, its fp32 gradient and a copy in the parameters' width are on the
                      host (stage_1_and_2.py, param_buffer_of_bit16_for_cpu_offload_groups)

**Activations** of a model that was built are measured (``ModelShape.activations``). Else they follow "Reducing
Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), sections 4.1 and 4.2.1, for a block, s tokens,
b samples, width h and elements of e bytes: (16 e + 2) sbh, of which ranks that share each layer divide 12 e sbh. Its
5 a s² b for the scores of a heads is left out: torch's ``scaled_dot_product_attention`` computes them again, and keeps
one float a head and token. The head keeps logits, their log-softmax and a gradient of that size: (e + 4 + 4) sbv.

**Two peaks.** As the backward pass begins, all model states, all activations and the communication buckets are there.
As the optimizer steps, the activations are gone, and gradients are there a second time, flattened and widened to fp32.
What the second needs beyond the first is counted as buffers, so that the parts add up to the peak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from determined_ds.config.strategy import ELEMENT_BYTES, Strategy
from determined_ds.memory.model import ModelShape, PartBytes
from determined_ds.memory.parts import measured_parts, most_bytes, stage_parameters

ALIGNMENT = 2  # elements a rank
# DeepSpeedEngine.buffered_allreduce_fallback's elements_per_buffer (deepspeed 0.19.8 runtime/engine.py).
ALLREDUCE_ELEMENTS = 500_000_000


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    parameters_bytes: int  # in the precision that the model computes in
    gradients_bytes: int
    optimizer_states_bytes: int  # the optimizer's copy of the parameters, and its states
    activations_bytes: int = 0  # what the forward pass keeps for the backward pass
    buffers_bytes: int = 0  # buckets, parameters that ZeRO 3 gathers, copies that the step makes
    host_bytes: int = 0  # host memory of this rank; every other field is of the device

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
    for own, activations in zip(_shares(shape, strategy), _activations(shape, strategy), strict=True):
        states = _model_states(strategy, own)
        in_backward, in_step, on_host = _buffers(shape, strategy, own)
        buffers, host = in_backward + max(0, in_step - in_backward - activations), states.host_bytes + on_host
        found.append(replace(states, activations_bytes=activations, buffers_bytes=buffers, host_bytes=host))
    return found


# ------------------------------------------------------------------------------------------------- model states


class _Share(NamedTuple):
    """Parameters of a rank, as elements."""

    whole: int  # that it would hold without ZeRO
    trainable: int  # of those
    part_of_whole: int  # that ZeRO leaves it, padding included
    part: int  # of the trainable ones


def _shares(shape: ModelShape, strategy: Strategy) -> list[_Share]:
    """Of a rank of each pipeline stage.

    Of ranks that share layers each holds a part of each matrix, and the embedding whole; of experts, those of its own.
    Fewer ranks have the same experts: ZeRO divides those among them, so of each expert a rank has as much as without
    expert parallel.

    Source: DeepSpeedEngine._apply_autotp_partitioning with vocab_parallel_lm_head false, which config/fill
    fills (deepspeed 0.19.8 runtime/engine.py): a head that is not tied to the embedding is cut as the others;
    module_inject/auto_ep_layer.py AutoEPMoELayer.
    """
    stages = [(shape.num_parameters, shape.trainable)]
    if strategy.pipe_parallel_size > 1:
        stages = stage_parameters(shape, strategy)
    sharing, experts = strategy.model_parallel_size, shape.num_expert_parameters
    elsewhere = experts - -(-experts // strategy.expert_parallel_size)  # in other ranks' experts
    padded = ALIGNMENT * strategy.shards
    found = []
    for in_all, trainable in stages:
        embedding = min(shape.vocab_size * shape.hidden_size, in_all)
        whole = embedding - (embedding - in_all) // sharing - elsewhere
        trained = -(-whole * trainable // max(1, in_all))
        parts = (-(-(each + elsewhere) // padded) * ALIGNMENT for each in (whole, trained))
        found.append(_Share(whole, trained, *parts))
    return found


def _model_states(strategy: Strategy, own: _Share) -> Memory:
    """Model states of a rank when a backward pass ends; no activations, no buffers."""
    element, gradient = strategy.element_bytes, ELEMENT_BYTES[strategy.grad_dtype]
    zero, host = strategy.zero_stage, 0
    parameters = element * (own.part_of_whole if zero == 3 else own.whole)
    if zero == 3 and strategy.offload_param:
        parameters, host = 0, parameters
    if zero == 3 and strategy.hpz_partition_size > 1:
        parameters += element * -(-own.whole // strategy.hpz_partition_size)
    if zero and strategy.offload_optimizer:
        # The copy that is stepped, its states, and its gradient.
        host += own.part * (_optimizer_bytes(strategy) + ELEMENT_BYTES[strategy.master_dtype])
        gradients = states = 0
        if zero == 3:
            host += gradient * own.part  # grad_partitions_flat_buffer is on the host as well
        else:
            host += element * own.part
            if zero == 1:
                gradients = gradient * own.trainable
            elif gradient != element:
                gradients = gradient * own.part
            elif strategy.accumulation > 1:
                host += element * own.part  # accumulated_grads_in_cpu
    else:
        gradients = gradient * (own.trainable if zero <= 1 else own.part)
        if strategy.uses_bf16_optimizer and not strategy.immediate_grad_update:
            gradients += element * own.trainable
        is_divided = zero or strategy.uses_bf16_optimizer
        states = _optimizer_bytes(strategy) * (own.part if is_divided else own.trainable)
    return Memory(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_states_bytes=states,
        host_bytes=host,
    )


def _optimizer_bytes(strategy: Strategy) -> int:
    """Bytes of optimizer states a parameter: the copy that is stepped, where there is one, and Adam's two."""
    states = strategy.num_optimizer_states * ELEMENT_BYTES[strategy.optimizer_state_dtype]
    if strategy.precision == "fp32" and strategy.zero_stage == 0:
        return states
    return states + ELEMENT_BYTES[strategy.master_dtype]


def _buffers(shape: ModelShape, strategy: Strategy, own: _Share) -> tuple[int, int, int]:
    """Bytes of buffers in the backward pass; bytes beyond the model states as the optimizer steps; buffers on the host.

    The second is less than 0 where gradients were let go before. Source: deepspeed 0.19.8. Buckets are
    ``reduce_bucket_size`` long however small the model is (runtime/zero/stage_1_and_2.py setup_buckets;
    runtime/zero/stage3.py _setup_for_real_optimizer), and two where communication overlaps; ZeRO 3 has one all the
    time, and gathers up to ``max_live_parameters`` (runtime/zero/partitioned_param_coordinator.py). Of the step: step
    in runtime/zero/stage_1_and_2.py and runtime/fp16/fused_optimizer.py, _prepare_fp32_grad_for_sub_group in
    runtime/zero/stage3.py, allreduce_bucket in runtime/engine.py.
    """
    zero, element = strategy.zero_stage, strategy.element_bytes
    gradient, master = ELEMENT_BYTES[strategy.grad_dtype], ELEMENT_BYTES[strategy.master_dtype]
    widening = 0 if gradient == master else master
    if strategy.uses_bf16_optimizer:
        return 0, widening * own.part, 0
    if zero == 0:
        reduced = element * min(own.trainable, ALLREDUCE_ELEMENTS) if strategy.shards > 1 else 0
        widened = 0 if strategy.precision == "fp32" else 2 * 4 * own.trainable  # one by one, then flat
        return 0, max(reduced, widened), 0
    at_most = min(own.trainable, strategy.reduce_bucket_size)
    bucket = strategy.reduce_bucket_size if strategy.contiguous_gradients else at_most
    if zero == 3:
        live = max(shape.largest_layer, strategy.max_live_parameters) + strategy.prefetch_bucket_size
        # A bucket's gradients are laid out anew, a part for each rank, to be reduced and scattered.
        in_backward = element * (min(own.whole, live) + bucket + at_most)
        if strategy.offload_optimizer:
            return in_backward, 0, 0
        stays = element * bucket if strategy.contiguous_gradients else 0
        return in_backward, stays + (gradient + widening) * min(own.part, strategy.sub_group_size), 0
    in_backward = (gradient if zero == 1 else element) * bucket * (2 if strategy.overlap_comm else 1)
    if strategy.offload_optimizer:
        # temp_grad_buffer_for_gpu_offload and temp_grad_buffer_for_cpu_offload
        largest = element * -(-shape.largest_layer // strategy.model_parallel_size)
        return in_backward + largest, 0, largest
    if zero == 2 and strategy.accumulation > 1 and strategy.grad_dtype == strategy.precision:
        in_backward += element * own.part  # the sum so far, beside the newest
    let_go = gradient * (own.trainable - own.part) if zero == 1 else 0
    return in_backward, (gradient + widening) * own.part - let_go, 0


# -------------------------------------------------------------------------------------------------- activations


def _activations(shape: ModelShape, strategy: Strategy) -> list[int]:
    """Bytes of activations at the peak, on a rank of each pipeline stage; of one rank without a pipeline.

    Of a pipeline they are those of the micro-batches that its schedule has under way on a rank, in parts of the sizes
    that the layers have, where these were measured, else in parts of one size: :func:`.parts.most_bytes`.
    """
    pipe = strategy.pipeline
    are_measured = any(layer.of(1).kept for layer in shape.layers)
    if strategy.pipe_parallel_size > 1 and are_measured and len(shape.layers) >= pipe.parts:
        return most_bytes(pipe, measured_parts(shape, strategy))
    element, measured = strategy.element_bytes, shape.activations
    sharing, slices = strategy.model_parallel_size, strategy.sequence_parallel_size
    tokens = strategy.micro_batch_size * -(-shape.sequence_length // slices)
    width = tokens * shape.hidden_size * element  # of one tensor of the residual stream
    head = tokens * shape.vocab_size * (element + 8)
    fixed, recomputes = 0, strategy.activation_checkpointing and shape.num_layers > 0
    if measured is not None:
        blocks = measured.bytes_per_sample * element // measured.element_bytes * strategy.micro_batch_size
        blocks = max(0, -(-blocks // slices) - head)
        fixed = measured.fixed_bytes * element // measured.element_bytes
        recomputes = recomputes and not measured.is_checkpointed
    else:
        of_each = tokens * (shape.hidden_size * (16 * element + 2) + 4 * shape.num_heads)
        blocks = shape.num_layers * of_each + 2 * width
    blocks = -(-blocks * ((4 * element + 2) * sharing + 12 * element) // ((16 * element + 2) * sharing))
    if recomputes:
        # Full recomputation (the paper's section 4.2 ff.): a block's input is kept, and one block at a time is whole.
        blocks = min(blocks, shape.num_layers * width + blocks // shape.num_layers)
    if strategy.pipe_parallel_size == 1:
        return [fixed + blocks + head]
    parts = []
    for part in range(pipe.parts):
        own = blocks // pipe.parts + (head if part == pipe.parts - 1 else 0)
        whole = own + (0 if part else fixed)
        parts.append(PartBytes(width if part else 0, own, forward=whole, backward=whole))
    return most_bytes(pipe, parts)
