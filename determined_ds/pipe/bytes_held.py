"""The bytes that each rank of a pipeline holds at most for its passes: what a schedule keeps, in parts of any sizes.

The way of a rank's bytes::

    steps of the rank -> what is received, kept, sent and let go by each -> the most that there is at a time

What engines do beyond the passes: a part computes on a copy of its inputs; its outputs stay until its backward pass;
messages are received before the pass that takes them. 1F1B is DeepSpeed's own engine: it receives into buffers that
stay, and what it sends is gone when it has been sent.

Source: ``PipelineEngine`` in deepspeed 0.19.8's runtime/pipe/engine.py; ``trial/pipeline_engine.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from determined_ds.pipe.orders import BACKWARD, FORWARD, GPIPE, INPUT, ONE_F_ONE_B, Pipeline
from determined_ds.pipe.timeline import Receive, Send, Step, steps

SETTLED = 4  # micro-batches a rank from which on no schedule but gpipe holds more
ON_THEIR_WAY = 2  # messages to a rank that the engine does not wait for


class PartBytes(NamedTuple):
    """Bytes of a micro-batch in a layer, or in the layers of a part of the model."""

    inputs: int = 0  # what it takes, and the gradient of that
    # From its forward to its backward pass, beside the inputs: what layers save, the outputs that are sent; of a part
    # also a copy of its inputs.
    kept: int = 0
    forward: int = 0  # at the peak of the forward pass, beside the inputs
    backward: int = 0  # at the peak of the backward pass, beside the inputs and the gradient of the outputs
    split: int = 0  # from the input pass to the weight pass, where there are two
    input_pass: int = 0  # at the peak of the one, likewise
    weight_pass: int = 0  # at the peak of the other, likewise
    outputs: int = 0  # what it hands on, or the loss is made of
    unsaved: int = 0  # as much of that as is not in ``kept``: neither it nor the loss saves them
    gradients: int = 0  # of a layer: what the input pass leaves for the weight pass

    def scaled(self, by: int, over: int) -> PartBytes:
        """In elements of another width."""
        return PartBytes(*(each * by // over for each in self))


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
            hold(0, part.input_pass - part.kept)
            hold(part.split - part.kept)
            hold(part.inputs if op.part else 0)  # the graph, which stays, has the inputs and their gradient
            let_go(op.part)
        else:
            hold(0, part.weight_pass - part.split)
            hold(-part.split - (2 * part.inputs if op.part else 0))
    return most
