"""Bytes of model states: parameters, gradients and optimizer states, on the device and on the host.

ZeRO (arXiv 1910.02054, sections 3.1 and 5) counts, for Ψ parameters trained by Adam in mixed precision, 2 Ψ of
parameters, 2 Ψ of gradients and 12 Ψ of fp32 copy, momentum and variance: 16 Ψ, of which N replicas keep
4 Ψ + 12 Ψ/N at stage 1, 2 Ψ + 14 Ψ/N at stage 2 and 16 Ψ/N at stage 3. In bf16 and fp16 that is what deepspeed
0.19.8 holds when the backward pass ends, and what is counted here. Where it holds something else, so does this::

    fp32, stage 0     16 Ψ            the model's own parameters are stepped; there is no second copy
    fp32, stages 1-2  8 Ψ + 12 Ψ/N    ... but here there is: the optimizer's partition is cloned
                      4 Ψ + 16 Ψ/N    (runtime/zero/stage_1_and_2.py, single_partition_of_fp32_groups)
    fp32, stage 3     20 Ψ/N          and here: the branch that would share the storage compares a torch.device
                                      with a string (runtime/zero/stage3.py, _create_fp32_partitions)
    grad_accum_dtype  gradients are of its width. Of bf16 parameters with fp32 gradients stage 1 keeps both widths
                      whole, 2 Ψ + 4 Ψ (runtime/bf16_optimizer.py, fp32_groups_gradients_flat), unless
                      bf16.immediate_grad_update; stage 2 keeps a partition in fp32
                      (stage_1_and_2.py, _build_compact_grad_partition_buffer)
    bf16 pipelines    divide the optimizer states among the replicas at stage 0 too
                      (runtime/engine.py, _do_optimizer_sanity_check: BF16_Optimizer)
    tensor parallel   the embedding is whole on each rank; of Ψ that are cut, one of T ranks has Ψ/T
    ZeRO++ (hpz)      a second copy of the parameters, divided among few ranks
                      (runtime/zero/partition_parameters.py, ds_secondary_tensor)
    offload           the optimizer's partition, its fp32 gradient and a copy in the parameters' width are on the
                      host (stage_1_and_2.py, param_buffer_of_bit16_for_cpu_offload_groups)

Flat buffers are padded to a multiple of 2 N elements (stage_1_and_2.py, nccl_start_alignment_factor).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from determined_ds.config.strategy import ELEMENT_BYTES, Strategy
from determined_ds.memory.layers import LayerShape, bounds, rank_parameters
from determined_ds.memory.model_shape import ModelShape, round_up

ALIGNMENT = 2  # elements a rank


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of model states of one rank when a backward pass ends.

    Args:
        parameters_bytes: On the device, in the precision the model computes in.
        gradients_bytes: On the device.
        optimizer_states_bytes: On the device; the fp32 copy of the parameters counts as one.
        host_bytes: What is offloaded.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_states_bytes: int
    host_bytes: int


def parameters_of_rank(shape: ModelShape, strategy: Strategy, stage: int | None = None) -> tuple[int, int]:
    """(parameters, trainable ones) that one rank would hold without ZeRO.

    Args:
        shape: Of the model.
        strategy: Its pipeline, its schedule and the ranks that share a layer count.
        stage: Of the pipeline; the largest, if None.
    """
    if strategy.pipe_parallel_size > 1:
        stages = stage_parameters(shape, strategy)
        in_all, trainable = max(stages) if stage is None else stages[stage]
    else:
        in_all, trainable = shape.num_parameters, shape.trainable
    held = _cut_by_tensor_parallel(in_all, shape, strategy) - _experts_elsewhere(shape, strategy)
    return held, trainable if held == in_all else -(-held * trainable // in_all)


def stage_parameters(shape: ModelShape, strategy: Strategy) -> list[tuple[int, int]]:
    """(parameters, trainable ones) of each stage of a pipeline, with its copies of tied layers."""
    pipe = strategy.pipeline
    if len(shape.layers) >= pipe.parts:
        cut = bounds(shape.layers, strategy.partition_method or shape.partition_method, pipe.parts)
        own: list[list[LayerShape]] = [[] for _ in range(pipe.ranks)]
        for part, (start, end) in enumerate(itertools.pairwise(cut)):
            own[pipe.rank_of(part)] += shape.layers[start:end]
        return [rank_parameters(layers) for layers in own]
    counted = shape.stage_parameters
    if len(counted) != pipe.ranks:
        # Blocks are spread evenly. Embedding and head are tied and sit at either end; a copy is on both.
        embedding = min(shape.vocab_size * shape.hidden_size, shape.num_parameters)
        blocks = shape.num_parameters - embedding
        layers = shape.num_layers or pipe.ranks
        most, ends = (
            blocks * -(-layers // pipe.ranks) // layers,
            (pipe.rank_of(0), pipe.rank_of(pipe.parts - 1)),
        )
        counted = tuple(most + (embedding if rank in ends else 0) for rank in range(pipe.ranks))
    return [(each, -(-each * shape.trainable // shape.num_parameters)) for each in counted]


def _cut_by_tensor_parallel(parameters: int, shape: ModelShape, strategy: Strategy) -> int:
    """What one of the ranks that share layers holds: a part of each matrix, and the embedding whole.

    Source: DeepSpeedEngine._apply_autotp_partitioning with vocab_parallel_lm_head false, which config/autotp
    fills (deepspeed 0.19.8 runtime/engine.py). A head that is not tied to the embedding is cut as the others.
    """
    if strategy.model_parallel_size == 1:
        return parameters
    embedding = min(shape.vocab_size * shape.hidden_size, parameters)
    return embedding - (embedding - parameters) // strategy.model_parallel_size


def _experts_elsewhere(shape: ModelShape, strategy: Strategy) -> int:
    """Parameters of experts that other ranks hold (deepspeed 0.19.8 module_inject/auto_ep_layer.py AutoEPMoELayer)."""
    experts = shape.num_expert_parameters
    return experts - -(-experts // strategy.expert_parallel_size)


def share_of_all(held: int, shape: ModelShape, strategy: Strategy) -> int:
    """Elements of a rank's part of what all ranks hold together.

    Fewer ranks have the same experts: ZeRO divides those among them, so of each expert a rank has as much as without
    expert parallel.

    Args:
        held: Elements that one rank would hold without ZeRO.
        shape: Of the model.
        strategy: Its replicas, and those that share experts.
    """
    return share(held + _experts_elsewhere(shape, strategy), strategy)


def share(elements: int, strategy: Strategy) -> int:
    """Elements of one of N equal parts, padding included."""
    return round_up(elements, ALIGNMENT * strategy.shards) // strategy.shards


def uses_bf16_optimizer(strategy: Strategy) -> bool:
    """Whether DeepSpeed takes its BF16_Optimizer. Source: runtime/engine.py _do_optimizer_sanity_check (0.19.8)."""
    if strategy.precision != "bf16" or strategy.offload_optimizer:
        return False
    if strategy.zero_stage == 0:
        return strategy.pipe_parallel_size > 1
    return strategy.zero_stage == 1 and strategy.grad_dtype == "fp32"


def model_states(shape: ModelShape, strategy: Strategy, pipe_stage: int | None = None) -> States:
    """Bytes of model states of a rank of a pipeline stage; of the one that holds most, if None."""
    in_all, trainable = parameters_of_rank(shape, strategy, pipe_stage)
    element, gradient = strategy.element_bytes, ELEMENT_BYTES[strategy.grad_dtype]
    partition = share_of_all(trainable, shape, strategy)
    stage = strategy.zero_stage
    parameters = element * in_all
    if stage == 3:
        parameters = element * share_of_all(in_all, shape, strategy)
    host = 0
    if strategy.offload_param and stage == 3:
        parameters, host = 0, parameters
    if strategy.hpz_partition_size > 1 and stage == 3:
        parameters += element * -(-in_all // strategy.hpz_partition_size)
    if strategy.offload_optimizer and stage >= 1:
        on_device, offloaded = _offloaded(strategy, trainable, partition)
        return States(
            parameters_bytes=parameters,
            gradients_bytes=on_device,
            optimizer_states_bytes=0,
            host_bytes=host + offloaded,
        )
    divided = stage >= 1 or uses_bf16_optimizer(strategy)
    whole_gradients = stage <= 1
    keeps_both = uses_bf16_optimizer(strategy) and not strategy.immediate_grad_update
    first_width = element * trainable if keeps_both else 0
    return States(
        parameters_bytes=parameters,
        gradients_bytes=gradient * (trainable if whole_gradients else partition) + first_width,
        optimizer_states_bytes=optimizer_bytes(strategy) * (partition if divided else trainable),
        host_bytes=host,
    )


def optimizer_bytes(strategy: Strategy) -> int:
    """Bytes of optimizer states a parameter: the copy that is stepped, where there is one, and Adam's two."""
    states = strategy.num_optimizer_states * ELEMENT_BYTES[strategy.optimizer_state_dtype]
    if strategy.precision == "fp32" and strategy.zero_stage == 0:
        return states
    return states + ELEMENT_BYTES[strategy.master_dtype]


def _offloaded(strategy: Strategy, trainable: int, partition: int) -> tuple[int, int]:
    """(gradients on the device, states on the host) where the optimizer is offloaded."""
    element, gradient = strategy.element_bytes, ELEMENT_BYTES[strategy.grad_dtype]
    # The copy that is stepped, its states, and its gradient.
    host = partition * (optimizer_bytes(strategy) + ELEMENT_BYTES[strategy.master_dtype])
    if strategy.zero_stage == 3:
        return 0, host + gradient * partition  # grad_partitions_flat_buffer is on the host as well
    host += element * partition
    if strategy.zero_stage == 1:
        return gradient * trainable, host
    if gradient != element:
        return gradient * partition, host
    if strategy.accumulation > 1:
        host += element * partition  # accumulated_grads_in_cpu
    return 0, host
