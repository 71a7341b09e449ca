"""Bytes of activations: what the forward pass keeps for the backward pass.

Of a model that was built they are measured (see ``ModelShape.activations``). Else they are taken from the sizes of
a transformer, by "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.1,
for one block, s tokens, b samples, width h, a heads, elements of e bytes::

    attention     5 e sbh + sbh      its input; queries, keys, values; its output's input; a dropout mask
    feed-forward  9 e sbh + sbh      its input, 4 h before and 4 h after the nonlinearity; a dropout mask
    two norms     2 e sbh

which is the paper's 34 sbh at e = 2. Its 5 a s² b for the scores of attention is left out: torch's
``scaled_dot_product_attention`` and FlashAttention (arXiv 2205.14135) compute them again, and keep one float a head
and token. Ranks that share a sequence keep a slice of it each, and of attention all tokens of a part of the heads,
which is as much (arXiv 2309.14509).

The head keeps logits and their log-softmax, and the backward pass begins with a gradient of that size: (e + 4 + 4) sbv.
"""

from __future__ import annotations

from determined_ds.config.strategy import Strategy
from determined_ds.memory.model_shape import ModelShape


def activation_bytes(shape: ModelShape, strategy: Strategy) -> int:
    """Bytes of activations at the peak, on the rank that holds most.

    Args:
        shape: The model.
        strategy: Its micro-batch, precision, pipeline, slices of sequences and checkpointing count.
    """
    head = head_bytes(shape, strategy)
    blocks, fixed = _block_bytes(shape, strategy, head), 0
    if shape.activations is not None:
        fixed = shape.activations.fixed_bytes * strategy.element_bytes // shape.activations.element_bytes
    seen = shape.activations is not None and shape.activations.is_checkpointed
    if strategy.activation_checkpointing and not seen and shape.num_layers:
        # Full recomputation (the paper's section 4.2 ff.): a block's input is kept, and one block at a time is whole.
        inputs = shape.num_layers * _per_hidden(shape, strategy) * strategy.element_bytes
        blocks = min(blocks, inputs + blocks // shape.num_layers)
    stages = strategy.pipe_parallel_size
    if stages > 1:
        # 1F1B: the first stage has as many micro-batches under way as there are stages, the last stage one, with
        # the head. Source: deepspeed 0.19.8 runtime/pipe/schedule.py TrainSchedule.
        under_way = min(stages, strategy.accumulation)
        return fixed + max(under_way * blocks // stages, blocks // stages + head)
    return fixed + blocks + head


def are_known(shape: ModelShape) -> bool:
    """Whether enough is known of a model to tell its activations."""
    measured = shape.activations is not None
    return measured or bool(shape.num_layers and shape.hidden_size and shape.sequence_length)


def head_bytes(shape: ModelShape, strategy: Strategy) -> int:
    """Bytes of logits, of their log-softmax and of its gradient."""
    return _tokens(shape, strategy) * shape.vocab_size * (strategy.element_bytes + 8)


def _tokens(shape: ModelShape, strategy: Strategy) -> int:
    """Tokens that a rank computes at a time: all of its samples, or its slice of each where ranks share sequences."""
    return strategy.micro_batch_size * -(-shape.sequence_length // strategy.sequence_parallel_size)


def _per_hidden(shape: ModelShape, strategy: Strategy) -> int:
    """Elements of one tensor of the residual stream."""
    return _tokens(shape, strategy) * shape.hidden_size


def _block_bytes(shape: ModelShape, strategy: Strategy, head: int) -> int:
    """Bytes of all blocks: what was measured less the head, or by the formula."""
    measured, element = shape.activations, strategy.element_bytes
    if measured is not None:
        in_all = measured.bytes_per_sample * element // measured.element_bytes * strategy.micro_batch_size
        return max(0, -(-in_all // strategy.sequence_parallel_size) - head)
    block = _per_hidden(shape, strategy) * (16 * element + 2)
    scores = 4 * _tokens(shape, strategy) * shape.num_heads
    norm_and_head = 2 * element * _per_hidden(shape, strategy)
    in_all = shape.num_layers * (block + scores) + norm_and_head
    return -(-in_all // strategy.model_parallel_size)
