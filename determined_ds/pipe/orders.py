"""What each rank of a pipeline computes, in order: one list a rank, for each schedule.

A model is cut into ``ranks * chunks`` parts, and a rank holds ``chunks`` of them. ``looped`` schedules give part ``i``
to rank ``i % ranks``; ``dualpipev`` folds the parts into a V, so that rank 0 holds the first and the last one.

- ``gpipe``: all forward passes, then all backward passes. arXiv:1811.06965
- ``1f1b``: a forward and a backward pass in turns. arXiv:2104.04473, figure 4
- ``interleaved``: the same over several parts a rank. There, section 2.2
- ``zb-h1``: a backward pass for the input, which the rank before waits for, and later one for the weights.
  arXiv:2401.10241, section 2
- ``dualpipev``: two parts a rank, in a V; forward passes of one half with backward passes of the other.
  github.com/deepseek-ai/DualPipe; DeepSpeed 0.19.8's ``DualPipeVSchedule``
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"  # a backward pass whole
INPUT, WEIGHT = "I", "W"  # or in two
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, DUALPIPEV = "gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev"


class Op(NamedTuple):
    """A pass of a micro-batch through a part."""

    kind: str  # F, B, I or W
    part: int  # of the model, from 0
    micro_batch: int  # from 0


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A schedule of one optimizer step."""

    schedule: str  # its name
    ranks: int  # of one replica, >= 1
    micro_batches: int  # of a step, >= 1
    chunks: int = 1  # parts of a rank, >= 1; 2 of ``dualpipev``, 1 of the others but ``interleaved``

    @property
    def parts(self) -> int:
        """Of the whole model."""
        return self.ranks * self.chunks

    def rank_of(self, part: int) -> int:
        """The rank that holds a part."""
        if self.schedule == DUALPIPEV:
            return min(part, self.parts - 1 - part)
        return part % self.ranks

    def orders(self) -> list[list[Op]]:
        """What each rank computes, in order, where there is no :meth:`problem`."""
        return [list(_ORDERS[self.schedule](self, rank)) for rank in range(self.ranks)]

    def forward_orders(self) -> list[list[Op]]:
        """What each rank computes where nothing is trained: any number of micro-batches, each as early as it can be."""
        batches = range(self.micro_batches)
        passes = [Op(FORWARD, part, batch) for part in range(self.parts) for batch in batches]
        passes.sort(key=lambda op: (op.part + op.micro_batch, op.part))
        return [[op for op in passes if self.rank_of(op.part) == rank] for rank in range(self.ranks)]

    def problem(self) -> str:
        """Why there is no order of these numbers; "" where there is one."""
        ranks, micro_batches = self.ranks, self.micro_batches
        if self.schedule == DUALPIPEV and micro_batches < 2 * ranks:
            return f"dualpipev needs 2 micro-batches a rank: at least {2 * ranks}, not {micro_batches}"
        if self.schedule == INTERLEAVED and self.chunks > 1 and micro_batches % ranks:
            return f"{self.chunks} chunks need a multiple of {ranks} micro-batches, not {micro_batches}"
        return chunks_problem(self.schedule, self.chunks)


def _one_f_one_b(pipe: Pipeline, rank: int) -> Iterator[Op]:
    """Forward passes until the first backward pass can come, then both in turns, then the backward passes left.

    Several chunks go by rounds: as many micro-batches as there are ranks through the first, then the second, and so on.
    """
    ranks, chunks, total = pipe.ranks, pipe.chunks, pipe.micro_batches * pipe.chunks
    ahead = min(total, ranks - 1 - rank if chunks == 1 else (chunks + 1) * ranks - 2 * (1 + rank))

    def op(kind: str, index: int) -> Op:
        if chunks == 1:
            return Op(kind, rank, index)
        turn, place = divmod(index, ranks * chunks)
        chunk, micro_batch = divmod(place, ranks)
        chunk = chunk if kind == FORWARD else chunks - 1 - chunk
        return Op(kind, chunk * ranks + rank, turn * ranks + micro_batch)

    for index in range(total + ahead):
        if index < total:
            yield op(FORWARD, index)
        if index >= ahead:
            yield op(BACKWARD, index - ahead)


def _zb_h1(pipe: Pipeline, rank: int) -> Iterator[Op]:
    """The order of 1F1B. The weights' part of a backward pass is late by as many micro-batches as the rank's number."""
    for op in _one_f_one_b(pipe, rank):
        if op.kind == FORWARD:
            yield op
            continue
        yield op._replace(kind=INPUT)
        if op.micro_batch >= rank:
            yield Op(WEIGHT, rank, op.micro_batch - rank)
    for micro_batch in range(max(0, pipe.micro_batches - rank), pipe.micro_batches):
        yield Op(WEIGHT, rank, micro_batch)


def _dualpipev(pipe: Pipeline, rank: int) -> Iterator[Op]:
    """In the eight steps of DualPipeV, without its late weight gradients, as DeepSpeed has them."""
    first, last = rank, pipe.parts - 1 - rank
    below = pipe.ranks - 1 - rank  # ranks between this one and the turn of the V
    f0, f1, b0, b1 = (FORWARD, first), (FORWARD, last), (BACKWARD, first), (BACKWARD, last)
    done: Counter[tuple[str, int]] = Counter()
    for times, passes in (
        (2 * below, (f0,)),
        (rank + 1, (f0, f1)),
        (below, (b1, f1)),
        (pipe.micro_batches - 2 * pipe.ranks + rank + 1, (f0, b1, f1, b0)),
        (below, (b1, f1, b0)),
        (rank + 1, (b1, b0)),
        (below, (b0,)),
    ):
        for each in passes * times:
            yield Op(*each, done[each])
            done[each] += 1


_ORDERS: dict[str, Callable[[Pipeline, int], Iterator[Op]]] = {
    ONE_F_ONE_B: _one_f_one_b,
    INTERLEAVED: _one_f_one_b,
    DUALPIPEV: _dualpipev,
    ZB_H1: _zb_h1,
    GPIPE: lambda pipe, rank: (
        Op(kind, rank, batch) for kind in (FORWARD, BACKWARD) for batch in range(pipe.micro_batches)
    ),
}
SCHEDULES = tuple(_ORDERS)


def default_chunks(schedule: str) -> int:
    """Parts of a rank where none are stated."""
    return 2 if schedule in (INTERLEAVED, DUALPIPEV) else 1


def chunks_problem(schedule: str, chunks: int) -> str:
    """Why a schedule cannot have so many parts a rank; "" where it can."""
    if schedule not in _ORDERS:
        return f"{schedule} must be one of {', '.join(_ORDERS)}"
    if schedule == DUALPIPEV and chunks != 2:
        return f"dualpipev has 2 chunks a rank, not {chunks}"
    if schedule not in (DUALPIPEV, INTERLEAVED) and chunks != 1:
        return f"{schedule} has 1 chunk a rank, not {chunks}"
    return ""
