"""What a model is, as far as the memory of its training depends on it: its sizes, and of a pipeline its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

# (parameters, layers) of published transformers; a model of which only the size is known is assumed to be as deep as
# the nearest. Source: table 2.1 of the GPT-3 paper, arXiv 2005.14165, and OPT's 66B, arXiv 2205.01068.
PUBLISHED = (
    *((125e6, 12), (350e6, 24), (760e6, 24), (1.3e9, 24), (2.7e9, 32)),
    *((6.7e9, 32), (13e9, 40), (66e9, 64), (175e9, 96)),
)
VOCAB_SIZE, SEQUENCE_LENGTH = 50257, 1024  # assumed of it: GPT-2's


class PartBytes(NamedTuple):
    """Bytes of a micro-batch in a layer, or in the layers of a part of the model."""

    inputs: int = 0  # what it takes, and the gradient of that
    # From its forward to its backward pass, beside the inputs: what layers save, the outputs that are sent; of a part
    # also a copy of its inputs.
    kept: int = 0
    forward: int = 0  # at the peak of the forward pass, beside the inputs
    backward: int = 0  # at the peak of the backward pass, beside the inputs and the gradient of the outputs
    outputs: int = 0  # what it hands on, or the loss is made of
    unsaved: int = 0  # as much of that as is not in ``kept``: neither it nor the loss saves them

    def scaled(self, by: int, over: int) -> PartBytes:
        """In elements of another width."""
        return PartBytes(*(each * by // over for each in self))


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A layer of a pipeline."""

    name: str  # of its class or function
    num_parameters: int
    num_trainable_parameters: int
    tied_key: str  # layers of one key share all their parameters; "" of a layer by itself
    fixed: PartBytes  # bytes that do not depend on the samples of a micro-batch
    per_sample: PartBytes  # bytes that each sample adds

    def of(self, samples: int) -> PartBytes:
        """Bytes of a micro-batch of so many samples."""
        return PartBytes(*(a + samples * b for a, b in zip(self.fixed, self.per_sample, strict=True)))


@dataclass(frozen=True, kw_only=True)
class MeasuredActivations:
    """What a forward and a backward pass held beside the parameters and their gradients."""

    bytes_per_sample: int  # that each further sample of a micro-batch takes at the peak
    fixed_bytes: int = 0  # at the peak, whatever the micro-batch
    element_bytes: int = 2  # width of the model's floats in that pass: 2 or 4
    is_checkpointed: bool = False  # it computed its blocks again in that pass: these are the bytes left


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model. Of a shape only ``num_parameters`` must be known; 0 elsewhere means unknown."""

    num_parameters: int  # all of them, a shared one counted once
    num_trainable_parameters: int | None = None  # those with a gradient; None: all
    num_layers: int = 0  # transformer blocks
    hidden_size: int = 0  # width of the residual stream
    num_heads: int = 0  # attention heads; they divide ``hidden_size``
    vocab_size: int = 0  # width of the logits; 0 for a model without a vocabulary
    sequence_length: int = 0  # tokens of a sample
    # Of the largest module that owns any itself, such as an embedding: what ZeRO 3 holds whole at least.
    largest_layer_parameters: int = 0
    layers: tuple[LayerShape, ...] = ()  # of a pipeline, where they are known one by one
    layer_element_bytes: int = 2  # width of their floats as they were measured: 2 or 4
    partition_method: str = "parameters"  # how a ``PipelineTrial`` shares them out
    num_expert_parameters: int = 0  # those of a mixture of experts' experts, which expert parallel divides
    checkpoint_interval: int = 0  # layers that a ``PipelineTrial`` has computed again together; 0: none
    activations: MeasuredActivations | None = None  # measured on the model; None: estimated from the sizes
    assumptions: tuple[str, ...] = field(default=(), compare=False)  # sizes that were assumed, in words

    @property
    def trainable(self) -> int:
        """Parameters that have a gradient and an optimizer state."""
        known = self.num_trainable_parameters
        return self.num_parameters if known is None else known

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer: as stated, else from the sizes, else all of them."""
        by_sizes = self.hidden_size * max(self.vocab_size, 4 * self.hidden_size + 4)
        return min(self.largest_layer_parameters or by_sizes or self.num_parameters, self.num_parameters)

    @property
    def knows_activations(self) -> bool:
        """Whether enough is known of the model to tell its activations."""
        return self.activations is not None or all((self.num_layers, self.hidden_size, self.sequence_length))


def shape_from_sizes(*, num_parameters: int, sequence_length: int | None = None) -> ModelShape:
    """A transformer of which only the parameters are known; all else is derived, and listed as assumptions.

    It is as deep as a published one of its size, and as wide as its blocks and embedding then have to be: 12 L h² + V h
    parameters. Heads are of 64, or 128 from a width of 2048 on; samples are 1024 tokens long, if not stated.
    """
    depth = min(PUBLISHED, key=lambda row: abs(math.log(row[0] / num_parameters)))[1]
    # Below the smallest, depth shrinks with width.
    layers = max(1, round(depth * min(1.0, num_parameters / PUBLISHED[0][0]) ** (1 / 3)))
    width = (math.sqrt(VOCAB_SIZE**2 + 48 * layers * num_parameters) - VOCAB_SIZE) / (24 * layers)
    step = 128 if width >= 512 else 8
    hidden = max(step, round(width / step) * step)
    most = max(1, hidden // (128 if hidden >= 2048 else 64))
    assumptions = [f"a vocabulary of {VOCAB_SIZE:,} (GPT-2's)", f"{layers:,} layers of width {hidden:,}"]
    if sequence_length is None:
        assumptions.append(f"samples of {SEQUENCE_LENGTH:,} tokens (--sequence-length)")
    return ModelShape(
        num_parameters=num_parameters,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=next(heads for heads in range(most, 0, -1) if hidden % heads == 0),
        vocab_size=VOCAB_SIZE,
        sequence_length=sequence_length or SEQUENCE_LENGTH,
        assumptions=tuple(assumptions),
    )
