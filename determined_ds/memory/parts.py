"""The layers of a pipeline, cut into the parts of its schedule: parameters of a rank, and the most its passes hold.

The way of a rank's bytes::

    layers as measured -> parts of the schedule -> what each step of the rank receives, keeps, sends and lets go
    -> the most that there is at a time

What engines do beyond the passes: a part computes on a copy of its inputs; its outputs stay until its backward pass;
messages are received before the pass that takes them. 1F1B is DeepSpeed's own engine: it receives into buffers that
stay, and what it sends is gone when it has been sent.

Source: ``PipelineEngine`` in deepspeed 0.19.8's runtime/pipe/engine.py; ``trial/pipeline_engine.py``.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from determined_ds.config.strategy import Strategy
from determined_ds.memory.model import LayerShape, ModelShape, PartBytes
from determined_ds.pipe.orders import BACKWARD, FORWARD, GPIPE, INPUT, ONE_F_ONE_B, Pipeline
from determined_ds.pipe.partition import BY_TYPE, UNIFORM, evenest
from determined_ds.pipe.timeline import Receive, Send, Step, steps

SETTLED = 4  # micro-batches a rank from which on no schedule but gpipe holds more
ON_THEIR_WAY = 2  # messages to a rank that the engine does not wait for
# Of what a part keeps for its backward pass, the gradients that zb-h1 keeps until the weights' pass: of a transformer
# those of the outputs of its products, 9 of 16 sbh, and of its norms, 2. See tests/memory/test_measured.py.
GRADIENTS_BETWEEN = 11 / 16


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
    # Blocks are spread evenly. Embedding and head are tied and sit at either end; a copy is on both.
    embedding = min(shape.vocab_size * shape.hidden_size, shape.num_parameters)
    num_layers = shape.num_layers or pipe.ranks
    most = (shape.num_parameters - embedding) * -(-num_layers // pipe.ranks) // num_layers
    ends = (pipe.rank_of(0), pipe.rank_of(pipe.parts - 1))
    counted = (most + (embedding if rank in ends else 0) for rank in range(pipe.ranks))
    return [(each, -(-each * shape.trainable // shape.num_parameters)) for each in counted]


def measured_parts(shape: ModelShape, strategy: Strategy) -> list[PartBytes]:
    """What a micro-batch takes in each part of a pipeline whose layers were measured."""
    recomputed = shape.checkpoint_interval or int(strategy.activation_checkpointing)  # layers together
    if shape.activations is not None and shape.activations.is_checkpointed:
        recomputed = 0
    method, found = strategy.partition_method or shape.partition_method, []
    for layers in _cut(shape.layers, method, strategy.pipeline.parts):
        own = [layer.of(strategy.micro_batch_size) for layer in layers]
        copy = own[0].inputs
        if recomputed:
            own = [_recomputed(own[at : at + recomputed]) for at in range(0, len(own), recomputed)]
        found.append(_in_a_row(own, copy).scaled(strategy.element_bytes, shape.layer_element_bytes))
    return found


@lru_cache(maxsize=256)
def _cut(layers: tuple[LayerShape, ...], method: str, parts: int) -> list[tuple[LayerShape, ...]]:
    """The layers of each part, so that the heaviest is lightest; DeepSpeed takes the least difference between parts.

    What ``measured`` times is not known here: it is taken for ``parameters``.
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
    kept, forward, backward = copy, 0, 0
    for layer in layers:
        # The layer after it makes the gradient of its outputs; that of the last one's is not of the part.
        gradient = layer.outputs if layer is not layers[-1] else 0
        forward = max(forward, kept + layer.forward)
        backward = max(backward, kept + layer.backward + gradient)
        kept += layer.kept
    last = layers[-1]
    return PartBytes(copy, kept, forward, backward, outputs=last.outputs, unsaved=last.unsaved)


def _recomputed(layers: Sequence[PartBytes]) -> PartBytes:
    """Of some layers only the outputs of the last one are kept; all is there again in the backward pass."""
    before, outputs = [0, *(layer.outputs for layer in layers)], layers[-1].outputs
    together = _in_a_row(layers)
    return PartBytes(
        kept=outputs,
        forward=max(layer.forward + inputs for inputs, layer in zip(before, layers, strict=False)),
        backward=max(together.backward, together.kept) + outputs,
        outputs=outputs,
    )


def most_bytes(pipe: Pipeline, parts: Sequence[PartBytes]) -> list[int]:
    """The most bytes that each rank holds at a time, by the bytes of each part of the model."""
    if pipe.schedule != GPIPE:
        pipe = replace(pipe, micro_batches=min(pipe.micro_batches, SETTLED * pipe.ranks))
    return [_most(pipe, rank, parts, own) for rank, own in enumerate(steps(pipe))]


def _most(pipe: Pipeline, rank: int, parts: Sequence[PartBytes], own: Sequence[Step]) -> int:
    held = most = 0
    deepspeeds, last = pipe.schedule == ONE_F_ONE_B, len(parts) - 1
    sent: dict[int, deque[int]] = {}  # to each rank: messages that may be on their way

    def hold(more: int, for_a_moment: int = 0) -> None:
        nonlocal held, most
        held += more
        most = max(most, held + for_a_moment)

    def let_go(number: int) -> None:
        """Of a part's inputs their gradient is left; the gradient of its outputs is used."""
        inputs = parts[number].inputs
        if number == 0:
            hold(-inputs)
        elif pipe.rank_of(number - 1) == rank:
            hold(inputs)  # the inputs themselves were the other part's outputs
        if number < last and not deepspeeds:
            hold(-parts[number + 1].inputs)

    if deepspeeds:
        # What it receives into; on the last rank the outputs of the loss, and those before them.
        after = parts[rank + 1].inputs if rank < last else parts[rank].outputs + parts[rank].unsaved
        hold(after + (parts[rank].inputs if rank else 0))
    for step in own:
        op = step.op if isinstance(step, (Send, Receive)) else step
        part = parts[op.part]
        # From the input pass to the weight pass. The inputs of the model have no gradient: all of its first part's
        # backward pass is for weights, and waits.
        between = int(part.kept * (1 + GRADIENTS_BETWEEN)) if op.part else part.kept + part.outputs
        if isinstance(step, Receive):
            if op.kind == FORWARD:
                hold(parts[op.part + 1].inputs)
            elif not deepspeeds:
                hold(part.inputs)
        elif isinstance(step, Send):
            # Activations stay with their part, as gradients do before a weight pass; others until they are taken.
            queue = sent.setdefault(step.rank, deque())
            queue.append(part.inputs if op.kind == BACKWARD else 0)
            if len(queue) > (0 if deepspeeds else ON_THEIR_WAY):
                hold(-queue.popleft())
        elif op.kind == FORWARD:
            # The part before it on this rank, if it is here, has handed on what it keeps itself.
            hold(0 if op.part else part.inputs, part.forward)
            hold(part.kept)
        elif op.kind == BACKWARD:
            hold(0, part.backward - part.kept)
            hold(-part.kept)
            let_go(op.part)
        elif op.kind == INPUT:
            hold(0, part.backward - part.kept if op.part else 0)
            hold(between - part.kept)
            hold(part.inputs if op.part else 0)  # the graph, which stays, has the inputs and their gradient
            let_go(op.part)
        else:
            hold(0, 0 if op.part else part.backward - part.kept)
            hold(-between - (2 * part.inputs if op.part else 0))
    return most
