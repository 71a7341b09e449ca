"""The bytes that each rank of a pipeline holds at most for its passes: what a schedule keeps, in parts of any sizes.

The way of a rank's bytes::

    steps of the rank -> what is received, kept, sent and let go by each -> the most that there is at a time

What engines do beyond the passes: a part computes on a copy of its inputs; its outputs stay until its backward pass;
messages are received before the pass that takes them. 1F1B is DeepSpeed's own engine: it receives into buffers that
stay, and what it sends is gone when it has been sent.

Source: ``PipelineEngine`` in deepspeed 0.19.8's runtime/pipe/engine.py; ``trial/ordered_engine.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from determined_ds.pipe.orders import (
    BACKWARD,
    FORWARD,
    GPIPE,
    INPUT,
    ONE_F_ONE_B,
    WEIGHT,
    Op,
    Pipeline,
)
from determined_ds.pipe.sends import Receive, Send, Step, steps

SETTLED = 4  # micro-batches a rank from which on no schedule but gpipe holds more
ON_THEIR_WAY = 2  # messages to a rank that the engine does not wait for


@dataclass(frozen=True, kw_only=True)
class PartBytes:
    """Bytes of a micro-batch in a part of the model.

    Args:
        inputs: What it takes, and the gradient of that.
        kept: From its forward to its backward pass, beside the inputs: a copy of them, what layers save, the outputs
            that are sent.
        forward: At the peak of the forward pass, beside the inputs.
        backward: At the peak of the backward pass, beside the inputs and the gradient of the outputs.
        split: From the input pass to the weight pass, where there are two.
        input_pass: At the peak of the one, likewise.
        weight_pass: At the peak of the other, likewise.
        outputs: What it hands on, or the loss is made of.
        unsaved: As much of that as is not in ``kept``.
    """

    inputs: int = 0
    kept: int = 0
    forward: int = 0
    backward: int = 0
    split: int = 0
    input_pass: int = 0
    weight_pass: int = 0
    outputs: int = 0
    unsaved: int = 0

    def scaled(self, by: int, over: int) -> PartBytes:
        """In elements of another width."""
        return PartBytes(**{each.name: getattr(self, each.name) * by // over for each in fields(self)})


def most_bytes(pipe: Pipeline, parts: Sequence[PartBytes]) -> list[int]:
    """The most bytes that each rank holds at a time.

    Args:
        pipe: The schedule.
        parts: Of each part of the model.
    """
    few = replace(pipe, micro_batches=min(pipe.micro_batches, SETTLED * pipe.ranks))
    if pipe.schedule == GPIPE:
        few = pipe
    return [_Walk(few, rank, parts).most(own) for rank, own in enumerate(_steps(few))]


@lru_cache(maxsize=256)
def _steps(pipe: Pipeline) -> list[list[Step]]:
    return steps(pipe)


class _Walk:
    """A rank on its way through a step."""

    def __init__(self, pipe: Pipeline, rank: int, parts: Sequence[PartBytes]) -> None:
        self._pipe, self._rank, self._parts = pipe, rank, parts
        self._held = self._most = 0
        self._sent: dict[int, deque[int]] = {}
        self._own_buffers = pipe.schedule == ONE_F_ONE_B

    def most(self, own: Sequence[Step]) -> int:
        """The most bytes at a time."""
        if self._own_buffers:
            self._hold(self._buffers())
        for step in own:
            if isinstance(step, Receive):
                self._receive(step)
            elif isinstance(step, Send):
                self._send(step)
            else:
                self._compute(step)
        return self._most

    def _buffers(self) -> int:
        """What DeepSpeed's engine receives into; on the last rank the outputs of the loss, and those before them."""
        last, own = len(self._parts) - 1, self._parts[self._rank]
        after = self._parts[self._rank + 1].inputs if self._rank < last else own.outputs + own.unsaved
        return after + (own.inputs if self._rank else 0)

    def _hold(self, more: int, for_a_moment: int = 0) -> None:
        self._held += more
        self._most = max(self._most, self._held + for_a_moment)

    def _receive(self, step: Receive) -> None:
        if step.op.kind == FORWARD:
            self._hold(self._parts[step.op.part + 1].inputs)
        elif not self._own_buffers:
            self._hold(self._parts[step.op.part].inputs)

    def _send(self, step: Send) -> None:
        """Activations stay with their part, as gradients do before a weight pass; others until they have been taken."""
        size = self._parts[step.op.part].inputs if step.op.kind == BACKWARD else 0
        sent = self._sent.setdefault(step.rank, deque())
        sent.append(size)
        if len(sent) > (0 if self._own_buffers else ON_THEIR_WAY):
            self._hold(-sent.popleft())

    def _compute(self, op: Op) -> None:
        part = self._parts[op.part]
        if op.kind == FORWARD:
            # The part before it on this rank, if it is here, has handed on what it keeps itself.
            self._hold(0 if op.part else part.inputs, part.forward)
            self._hold(part.kept)
        elif op.kind == BACKWARD:
            self._hold(0, part.backward - part.kept)
            self._hold(-part.kept)
            self._let_go(op.part)
        elif op.kind == INPUT:
            self._hold(0, part.input_pass - part.kept)
            self._hold(part.split - part.kept)
            self._hold(
                part.inputs if op.part else 0
            )  # the graph, which stays, has the inputs and their gradient
            self._let_go(op.part)
        elif op.kind == WEIGHT:
            self._hold(0, part.weight_pass - part.split)
            self._hold(-part.split - (2 * part.inputs if op.part else 0))

    def _let_go(self, part: int) -> None:
        """Of the inputs their gradient is left; the gradient of the outputs is used."""
        inputs = self._parts[part].inputs
        if part == 0:
            self._hold(-inputs)
        elif self._is_here(part - 1):
            self._hold(inputs)  # the inputs themselves were the other part's outputs
        if part < len(self._parts) - 1 and not self._own_buffers:
            self._hold(-self._parts[part + 1].inputs)

    def _is_here(self, part: int) -> bool:
        return self._pipe.rank_of(part) == self._rank
