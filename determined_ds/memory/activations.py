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

Of T ranks that share each layer (section 4.2.1), each has a T-th of what lies between a matrix that is cut by rows and
one that is cut by columns: queries, keys, values and attention's output, and the 8 h around the nonlinearity. The
rest, inputs, norms and dropout masks, is whole on each::

    4 e sbh + 2 sbh + 12 e sbh / T

What is computed in tiles of the sequence keeps its input alone (arXiv 2506.13996, section 3): of a feed-forward e sbh,
and one tile of one of them is whole at a time; of logits, one tile's.
"""

from __future__ import annotations

import itertools

from determined_ds.config.strategy import Strategy
from determined_ds.memory.layers import NOTHING, bounds, part_bytes
from determined_ds.memory.model_shape import ModelShape
from determined_ds.pipe.bytes_held import PartBytes, most_bytes

# Of what a block keeps for its backward pass, the gradients that zb-h1 keeps until the weights' pass: those of the
# outputs of its products, 9 of 16 sbh, and of its norms, 2. Measured on GPT-2: tests/memory/test_schedules.py.
GRADIENTS_BETWEEN = 11 / 16


def activation_bytes(shape: ModelShape, strategy: Strategy) -> int:
    """Bytes of activations at the peak, on the rank that holds most."""
    return max(activations_of_stages(shape, strategy))


def activations_of_stages(shape: ModelShape, strategy: Strategy) -> list[int]:
    """Bytes of activations at the peak, on a rank of each pipeline stage; of one rank without a pipeline.

    Of a pipeline they are those of the micro-batches that its schedule has under way on a rank, in parts of the sizes
    that the layers have, where these were measured, else in parts of one size: :mod:`determined_ds.pipe.bytes_held`.

    Args:
        shape: The model.
        strategy: Its micro-batch, precision, pipeline, slices of sequences and checkpointing count.
    """
    if strategy.pipe_parallel_size > 1:
        return most_bytes(strategy.pipeline, _parts(shape, strategy))
    head = head_bytes(shape, strategy)
    blocks, fixed = _blocks_and_fixed(shape, strategy, head)
    return [fixed + blocks + head]


def _parts(shape: ModelShape, strategy: Strategy) -> list[PartBytes]:
    """What a micro-batch takes in each part of a pipeline."""
    pipe = strategy.pipeline
    if any(layer.kept != NOTHING for layer in shape.layers) and len(shape.layers) >= pipe.parts:
        interval = shape.checkpoint_interval or int(strategy.activation_checkpointing)
        if shape.activations is not None and shape.activations.is_checkpointed:
            interval = 0
        cut = bounds(shape.layers, strategy.partition_method or shape.partition_method, pipe.parts)
        return [
            part_bytes(
                shape.layers[start:end],
                strategy.micro_batch_size,
                recomputed=interval,
                waits_for_nothing=part == 0,
            ).scaled(strategy.element_bytes, shape.layer_element_bytes)
            for part, (start, end) in enumerate(itertools.pairwise(cut))
        ]
    head = head_bytes(shape, strategy)
    blocks, fixed = _blocks_and_fixed(shape, strategy, head)
    each, width = blocks // pipe.parts, _per_hidden(shape, strategy) * strategy.element_bytes
    found = []
    for part in range(pipe.parts):
        own = each + (head if part == pipe.parts - 1 else 0)
        at_once = own + (fixed if part == 0 else 0)
        split = int(own * (1 + GRADIENTS_BETWEEN))
        found.append(
            PartBytes(
                inputs=width if part else 0,
                kept=own,
                forward=at_once,
                backward=at_once,
                split=split,
                input_pass=split,
                weight_pass=split,
            )
        )
    return found


def are_known(shape: ModelShape) -> bool:
    """Whether enough is known of a model to tell its activations."""
    measured = shape.activations is not None
    return measured or bool(shape.num_layers and shape.hidden_size and shape.sequence_length)


def head_bytes(shape: ModelShape, strategy: Strategy) -> int:
    """Bytes of the logits that are there at a time, of their log-softmax and of its gradient."""
    tokens = _tokens(shape, strategy, strategy.tiled_loss)
    return tokens * shape.vocab_size * (strategy.element_bytes + 8)


def _tokens(shape: ModelShape, strategy: Strategy, tiles: int = 1) -> int:
    """Tokens of a rank's samples, or of its slices where ranks share sequences; of one of so many tiles of them."""
    slices = -(-shape.sequence_length // strategy.sequence_parallel_size)
    return strategy.micro_batch_size * -(-slices // tiles)


def _per_hidden(shape: ModelShape, strategy: Strategy) -> int:
    """Elements of one tensor of the residual stream."""
    return _tokens(shape, strategy) * shape.hidden_size


def _blocks_and_fixed(shape: ModelShape, strategy: Strategy, head: int) -> tuple[int, int]:
    """Bytes of all blocks for a micro-batch, with activation checkpointing as the strategy has it; those beside it."""
    blocks, fixed = _block_bytes(shape, strategy, head), 0
    if shape.activations is not None:
        fixed = shape.activations.fixed_bytes * strategy.element_bytes // shape.activations.element_bytes
    seen = shape.activations is not None and shape.activations.is_checkpointed
    if strategy.activation_checkpointing and not seen and shape.num_layers:
        # Full recomputation (the paper's section 4.2 ff.): a block's input is kept, and one block at a time is whole.
        inputs = shape.num_layers * _per_hidden(shape, strategy) * strategy.element_bytes
        blocks = min(blocks, inputs + blocks // shape.num_layers)
    return blocks, fixed


def _block_bytes(shape: ModelShape, strategy: Strategy, head: int) -> int:
    """Bytes of all blocks: what was measured less the head, or by the formula."""
    measured, element = shape.activations, strategy.element_bytes
    if measured is not None:
        in_all = measured.bytes_per_sample * element // measured.element_bytes * strategy.micro_batch_size
        in_all = -(-in_all // strategy.sequence_parallel_size)
        return _of_one_rank(max(0, in_all - head), strategy)
    block = _per_hidden(shape, strategy) * (16 * element + 2)
    scores = 4 * _tokens(shape, strategy) * shape.num_heads
    norm_and_head = 2 * element * _per_hidden(shape, strategy)
    in_all = shape.num_layers * (block + scores) + norm_and_head
    return _of_one_rank(in_all - _saved_by_tiles(shape, strategy), strategy)


def _saved_by_tiles(shape: ModelShape, strategy: Strategy) -> int:
    """Bytes within the feed-forward parts of blocks, by the formula, that are not there beside one tile of one part."""
    width = shape.hidden_size * (8 * strategy.element_bytes + 1)
    one_tile = _tokens(shape, strategy, strategy.tiled_mlp)
    whole = _tokens(shape, strategy)
    return (shape.num_layers * whole - one_tile) * width if strategy.tiled_mlp > 1 else 0


def _of_one_rank(in_all: int, strategy: Strategy) -> int:
    """Bytes of blocks on one of the ranks that share each layer."""
    element, ranks = strategy.element_bytes, strategy.model_parallel_size
    return -(-in_all * ((4 * element + 2) * ranks + 12 * element) // ((16 * element + 2) * ranks))
