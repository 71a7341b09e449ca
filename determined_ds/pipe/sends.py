"""What ranks send to one another between the passes of a schedule, in an order that is the same on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, Op, Pipeline
from determined_ds.pipe.timeline import timeline


class Send(NamedTuple):
    """What a pass made goes to another rank.

    Args:
        op: The pass that made it.
        rank: That it goes to.
    """

    op: Op
    rank: int


class Receive(NamedTuple):
    """What a pass of another rank made is received, before a pass that needs it.

    Args:
        op: The pass that makes it.
        rank: Whose pass that is.
    """

    op: Op
    rank: int


Step = Op | Send | Receive


def steps(pipe: Pipeline, *, forward_only: bool = False) -> list[list[Step]]:
    """The passes of each rank with the messages between them.

    Messages are begun in the order in which the passes that make them end, on the rank that sends and on the one that
    receives: whatever two ranks have for each other, they begin it in the same order, so that no message waits for one
    that is begun later.

    Args:
        pipe: The schedule.
        forward_only: Leave the backward passes out.
    """
    orders = pipe.forward_orders() if forward_only else pipe.orders()
    spans = timeline(pipe, orders=orders)
    placed: list[list[tuple[float, int, Step]]] = [
        [(span.start, 1, span.op) for span in own] for own in spans
    ]
    made = [(span.end, rank, span.op) for rank, own in enumerate(spans) for span in own]
    for end, rank, op in sorted(made):
        to = _needed_by(pipe, op)
        if to not in (None, rank):
            assert to is not None
            placed[rank].append((end, 0, Send(op, to)))
            placed[to].append((end, 0, Receive(op, rank)))
    # Messages before the passes that start when they are there. A sort is stable: they stay in the order above.
    return [[step for _, _, step in sorted(own, key=lambda item: item[:2])] for own in placed]


def _needed_by(pipe: Pipeline, op: Op) -> int | None:
    """The rank of the pass that takes what another makes."""
    if op.kind == FORWARD:
        part = op.part + 1
    elif op.kind in (BACKWARD, INPUT):
        part = op.part - 1
    else:
        return None
    return pipe.rank_of(part) if 0 <= part < pipe.parts else None


def pairs(all_steps: Sequence[Sequence[Step]], first: int, second: int) -> tuple[list[Op], list[Op]]:
    """The messages between two ranks in the order of either."""
    found = []
    for rank, other in ((first, second), (second, first)):
        found.append([step.op for step in all_steps[rank] if not isinstance(step, Op) and step.rank == other])
    return found[0], found[1]
