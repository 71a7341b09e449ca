"""The layers of a pipeline, cut into the parts of its schedule: parameters of a rank, bytes of a micro-batch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache

from determined_ds.config.strategy import Strategy
from determined_ds.memory.model import LayerShape, ModelShape
from determined_ds.pipe.bytes_held import PartBytes
from determined_ds.pipe.partition import BY_TYPE, UNIFORM, evenest


def stage_parameters(shape: ModelShape, strategy: Strategy) -> list[tuple[int, int]]:
    """(parameters, trainable ones) of each stage of a pipeline, with its copies of tied layers."""
    pipe = strategy.pipeline
    if len(shape.layers) >= pipe.parts:
        cut = _cut(shape.layers, strategy.partition_method or shape.partition_method, pipe.parts)
        found = []
        for rank in range(pipe.ranks):
            parts = (own for part, own in enumerate(cut) if pipe.rank_of(part) == rank)
            layers = enumerate(itertools.chain.from_iterable(parts))
            own = {layer.tied_key or index: layer for index, layer in layers}.values()  # what is tied, once
            trainable = sum(layer.num_trainable_parameters for layer in own)
            found.append((sum(layer.num_parameters for layer in own), trainable))
        return found
    counted = shape.stage_parameters
    if len(counted) != pipe.ranks:
        # Blocks are spread evenly. Embedding and head are tied and sit at either end; a copy is on both.
        embedding = min(shape.vocab_size * shape.hidden_size, shape.num_parameters)
        num_layers = shape.num_layers or pipe.ranks
        most = (shape.num_parameters - embedding) * -(-num_layers // pipe.ranks) // num_layers
        ends = (pipe.rank_of(0), pipe.rank_of(pipe.parts - 1))
        counted = tuple(most + (embedding if rank in ends else 0) for rank in range(pipe.ranks))
    return [(each, -(-each * shape.trainable // shape.num_parameters)) for each in counted]


def measured_parts(shape: ModelShape, strategy: Strategy) -> list[PartBytes]:
    """What a micro-batch takes in each part of a pipeline whose layers were measured."""
    recomputed = shape.checkpoint_interval or int(strategy.activation_checkpointing)  # layers together
    if shape.activations is not None and shape.activations.is_checkpointed:
        recomputed = 0
    method, found = strategy.partition_method or shape.partition_method, []
    for part, layers in enumerate(_cut(shape.layers, method, strategy.pipeline.parts)):
        own = [layer.of(strategy.micro_batch_size) for layer in layers]
        copy = own[0].inputs
        if recomputed:
            own = [_recomputed(own[at : at + recomputed]) for at in range(0, len(own), recomputed)]
        together = _in_a_row(own, copy)
        if part == 0:  # its inputs have no gradient: all of its backward pass is for weights, and waits
            waiting, passed = together.kept + together.outputs, together.backward + together.outputs
            together = together._replace(split=waiting, input_pass=waiting, weight_pass=passed)
        found.append(together.scaled(strategy.element_bytes, shape.layer_element_bytes))
    return found


@lru_cache(maxsize=256)
def _cut(layers: tuple[LayerShape, ...], method: str, parts: int) -> list[tuple[LayerShape, ...]]:
    """The layers of each part: near where DeepSpeed cuts them.

    DeepSpeed takes the cut with the least difference between its heaviest and its lightest part, and this the one whose
    heaviest part is lightest. What ``measured`` times is not known here: it is taken for ``parameters``.
    """
    weights = [layer.num_trainable_parameters for layer in layers]
    if method.lower().startswith(BY_TYPE):
        pattern = re.compile(method.lower().removeprefix(BY_TYPE), re.IGNORECASE)
        weights = [int(bool(pattern.search(layer.name))) for layer in layers]
    each, more = divmod(len(layers), parts)
    uniform = tuple(part * each + min(part, more) for part in range(parts + 1))
    bounds = uniform if method.lower() == UNIFORM else evenest(weights, parts)
    return [layers[start:end] for start, end in itertools.pairwise(bounds)]


def _in_a_row(layers: Sequence[PartBytes], copy: int = 0) -> PartBytes:
    """Of layers one after the other; ``copy`` is there beside them, from the forward pass on."""
    kept = split = copy
    forward = backward = more_in_input_pass = more_in_weight_pass = 0
    gradients = sum(layer.gradients for layer in layers)  # of the layers after each
    for index, layer in enumerate(layers):
        gradients -= layer.gradients
        # The layer after it makes the gradient of its outputs; that of the last one's is not of the part.
        gradient = layer.outputs if index < len(layers) - 1 else 0
        forward = max(forward, kept + layer.forward)
        backward = max(backward, kept + layer.backward + gradient)
        more_in_input_pass = max(more_in_input_pass, layer.input_pass - layer.kept + gradient + gradients)
        more_in_weight_pass = max(more_in_weight_pass, layer.weight_pass - layer.split)
        kept += layer.kept
        split += layer.split + gradient
    return PartBytes(
        inputs=copy,
        kept=kept,
        forward=forward,
        backward=backward,
        split=split,
        input_pass=kept + more_in_input_pass,
        weight_pass=split + more_in_weight_pass,
        outputs=layers[-1].outputs,
        unsaved=layers[-1].unsaved,
    )


def _recomputed(layers: Sequence[PartBytes]) -> PartBytes:
    """Of some layers only the outputs of the last one are kept; all is there again in the backward pass."""
    before, outputs = [0, *(layer.outputs for layer in layers)], layers[-1].outputs
    together = _in_a_row(layers)
    most = max(together.backward, together.kept) + outputs
    return PartBytes(
        kept=outputs,
        forward=max(layer.forward + inputs for inputs, layer in zip(before, layers, strict=False)),
        backward=most,
        split=outputs,
        input_pass=most,
        weight_pass=most,
        outputs=outputs,
        gradients=outputs,
    )
