"""When each pass of a schedule runs, planned or recorded; the bubble; what ranks hold and send meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from determined_ds.pipe.orders import BACKWARD, DUALPIPEV, FORWARD, INPUT, WEIGHT, ZB_H1, Op, Pipeline

# A backward pass takes twice as long as a forward one, half of it for the weights. Whole numbers, so that what is
# counted in them is exact.
UNITS: Mapping[str, float] = {FORWARD: 1, BACKWARD: 2, INPUT: 1, WEIGHT: 1}
LOAD = "L"  # beside the passes of a recorded step: a micro-batch is loaded


@dataclass(frozen=True, kw_only=True)
class Span:
    """A pass, and when it runs, in the unit of the costs."""

    op: Op
    start: float
    end: float


def timeline(
    pipe: Pipeline, cost: Callable[[Op], float] | None = None, orders: Sequence[Sequence[Op]] | None = None
) -> list[list[Span]]:
    """The passes of each rank, each as soon as its rank is free and its inputs are there; sending takes no time.

    Args:
        pipe: The schedule.
        cost: Returns how long a pass takes; by default as in :data:`UNITS`.
        orders: Of the ranks; by default those of the schedule.
    """
    takes = cost or (lambda op: UNITS[op.kind])
    left = [list(reversed(order)) for order in (orders or pipe.orders())]
    spans: list[list[Span]] = [[] for _ in left]

    def awaited(op: Op) -> list[Op]:
        kind, part, micro_batch = op
        if kind == FORWARD:
            return [Op(FORWARD, part - 1, micro_batch)] if part else []
        if kind == WEIGHT:
            return [Op(INPUT, part, micro_batch)]
        own = [Op(FORWARD, part, micro_batch)]
        return [*own, Op(BACKWARD, part + 1, micro_batch)] if part < pipe.parts - 1 else own

    ended: dict[Op, float] = {}
    while any(left):
        before = len(ended)
        for rank, ops in enumerate(left):
            while ops and all(each in ended for each in awaited(ops[-1])):
                op = ops.pop()
                free = spans[rank][-1].end if spans[rank] else 0
                start = max([free, *(ended[each] for each in awaited(op))])
                ended[op] = start + takes(op)
                if op.kind == INPUT:  # what a rank before waits for
                    ended[op._replace(kind=BACKWARD)] = ended[op]
                spans[rank].append(Span(op=op, start=start, end=ended[op]))
        assert len(ended) > before, f"the ranks of {pipe} wait for each other"
    return spans


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """The share of the ranks' time in which they wait, from the first start to the last end."""
    busy = sum(span.end - span.start for rank in spans for span in rank)
    whole = max(rank[-1].end for rank in spans) - min(rank[0].start for rank in spans)
    return 1 - busy / (len(spans) * whole)


def counted_bubble(pipe: Pipeline) -> float:
    """The bubble of a schedule by itself: its passes in :data:`UNITS`, parts alike, messages in no time.

    Of p ranks and m micro-batches, ranks wait beside the time of all passes on one rank

    - in ``gpipe`` and ``1f1b`` (p-1)/m of it. arXiv:1811.06965, section 2.3; arXiv:2104.04473, section 2.2.1;
    - in ``interleaved`` (p-1)/(V m) of it, with V chunks. arXiv:2104.04473, section 2.2.2;
    - in ``zb-h1`` (p-1)(F+I-W), for m >= p; of fewer micro-batches (p-m) W more. arXiv:2401.10241, section 2.3;
    - in ``dualpipev`` 2(p-1)B - F, where B = 2F. Its authors' late weight gradients are not in DeepSpeed's.

    The bubble is that time as a share of both together. Counting passes one by one gives the same to the last bit.
    """
    if problem := pipe.problem():
        raise ValueError(problem)
    p, m = pipe.ranks, pipe.micro_batches
    if p == 1:
        return 0.0
    waits = {ZB_H1: p - 1 + max(0, p - m), DUALPIPEV: 4 * p - 5}.get(pipe.schedule, 3 * (p - 1))
    return waits / (3 * m * pipe.chunks + waits)


def most_held(pipe: Pipeline) -> list[int]:
    """The most activations that each rank holds at a time: of one micro-batch in one part each."""
    change = {FORWARD: 1, BACKWARD: -1, INPUT: 0, WEIGHT: -1}
    return [max(accumulate(change[op.kind] for op in order)) for order in pipe.orders()]


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """An optimizer step as it was carried out: which pass ran when on each rank, by one machine's clock."""

    pipeline: Pipeline  # what ranks were to compute in which order
    spans: tuple[tuple[Span, ...], ...]  # of each rank, as they ran; in seconds from the first start

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(rank[-1].end for rank in self.spans)

    def planned(self) -> list[list[Span]]:
        """The same schedule with passes of the median times of this step's, and messages that take no time."""
        times: dict[tuple[str, int], list[float]] = {}
        for span in (each for rank in self.spans for each in rank):
            times.setdefault((span.op.kind, span.op.part), []).append(span.end - span.start)
        medians = {passes: statistics.median(seconds) for passes, seconds in times.items()}
        return timeline(self.pipeline, lambda op: medians.get((op.kind, op.part), 0.0))


def recorded_step(pipe: Pipeline, spans: Sequence[Sequence[Span]]) -> RecordedStep | None:
    """A step of what each of its ranks has recorded by one clock; None where a rank has nothing."""
    if not all(spans):
        return None
    zero = min(own[0].start for own in spans)

    def moved(span: Span) -> Span:
        return Span(op=span.op, start=round(span.start - zero, 7), end=round(span.end - zero, 7))

    return RecordedStep(pipeline=pipe, spans=tuple(tuple(map(moved, own)) for own in spans))


class Send(NamedTuple):
    """What the pass ``op`` of this rank made goes to another ``rank``."""

    op: Op
    rank: int


class Receive(NamedTuple):
    """What the pass ``op`` of another ``rank`` made is received, before a pass that needs it."""

    op: Op
    rank: int


Step = Op | Send | Receive


@lru_cache(maxsize=256)
def steps(pipe: Pipeline, *, forward_only: bool = False) -> tuple[tuple[Step, ...], ...]:
    """The passes of each rank, or with ``forward_only`` the forward ones, with the messages between them.

    Messages are begun in the order in which the passes that make them end, on the rank that sends and on the one that
    receives, so that no message waits for one that is begun later.
    """
    spans = timeline(pipe, orders=pipe.forward_orders() if forward_only else pipe.orders())
    placed: list[list[tuple[float, int, Step]]] = [
        [(each.start, 1, each.op) for each in own] for own in spans
    ]
    for end, rank, op in sorted((span.end, rank, span.op) for rank, own in enumerate(spans) for span in own):
        taker = op.part + {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(op.kind, 0)
        if op.kind == WEIGHT or not 0 <= taker < pipe.parts or pipe.rank_of(taker) == rank:
            continue
        to = pipe.rank_of(taker)
        placed[rank].append((end, 0, Send(op, to)))
        placed[to].append((end, 0, Receive(op, rank)))
    # Messages before the passes that start when they are there. A sort is stable: they stay in the order above.
    return tuple(tuple(step for *_, step in sorted(own, key=lambda item: item[:2])) for own in placed)
