"""The steps of a rank, of any schedule of :mod:`determined_ds.pipe`, as DeepSpeed's instructions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from deepspeed.runtime.pipe import schedule

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, WEIGHT, Op, Pipeline
from determined_ds.pipe.sends import Receive, Send, Step, steps


class InputPass(schedule.BackwardPass):
    """The part of a backward pass that the rank before waits for."""


class WeightPass(schedule.BackwardPass):
    """The part of a backward pass that only the optimizer waits for."""


class AwaitMessage(schedule.BufferOpInstruction):
    """Wait for the message that a pass needs, whose receiving has begun."""


PASSES = {
    FORWARD: schedule.ForwardPass,
    BACKWARD: schedule.BackwardPass,
    INPUT: InputPass,
    WEIGHT: WeightPass,
}


@lru_cache(maxsize=16)  # each batch has them
def _steps_of(pipe: Pipeline, rank: int, forward_only: bool) -> tuple[Step, ...]:
    return tuple(steps(pipe, forward_only=forward_only)[rank])


class PlannedSchedule(schedule.PipeSchedule):
    """The steps of a rank as DeepSpeed's instructions.

    Args:
        pipe: The schedule.
        rank: Of the pipeline.
        forward_only: Leave out the backward passes and what comes after them.
    """

    def __init__(self, pipe: Pipeline, rank: int, *, forward_only: bool = False) -> None:
        super().__init__(micro_batches=pipe.micro_batches, stages=pipe.ranks, stage_id=rank)
        self.pipe = pipe
        self._steps = _steps_of(pipe, rank, forward_only)
        self._forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        return self.pipe.parts * self.pipe.micro_batches

    def buffer(self, part: int, micro_batch: int) -> int:
        """Of a part and a micro-batch, one for each; most are empty."""
        return part * self.pipe.micro_batches + micro_batch

    def steps(self) -> Iterator[list[Any]]:
        last = self.pipe.parts - 1
        for step in self._steps:
            kind, part, micro_batch = step if isinstance(step, Op) else step.op
            if isinstance(step, Send):
                made = schedule.SendActivation if kind == FORWARD else schedule.SendGrad
                yield [made(self.buffer(part, micro_batch), part=part, peer=step.rank)]
            elif isinstance(step, Receive):  # into the buffer of the pass that takes it
                made, taker = (
                    (schedule.RecvActivation, part + 1) if kind == FORWARD else (schedule.RecvGrad, part - 1)
                )
                yield [made(self.buffer(taker, micro_batch), part=taker, peer=step.rank)]
            else:
                held = self.buffer(part, micro_batch)
                loads = kind == FORWARD and (
                    part == 0 or (part == last and self.pipe.rank_of(0) != self.stage_id)
                )
                yield [
                    *([schedule.LoadMicroBatch(held, part=part)] if loads else []),
                    *([] if kind == WEIGHT else [AwaitMessage(held, kind=kind)]),
                    PASSES[kind](held, part=part),
                ]
        if not self._forward_only:
            yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]
