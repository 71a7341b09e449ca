"""Which rank the others wait for, from the moments at which each comes to a collective.

The same collective is found in the traces of all ranks: the n-th of its kind and size in a step. The last one
is waited for. Ranks of one machine have one clock; those of others are set by the ends of collectives, which are the
same everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from determined_ds.profile.arrivals import Arrival
from determined_ds.profile.step_parts import RankProfile

# Of a step's work. What is waited for is not what a rank does by itself.
WORK = ("data", "forward", "backward", "optimizer", "idle", "other")
# A noisy machine delays now this rank, now that one, and now more, now less. The straggler is the last in so many
# steps, in this share of all, and in as many by at least a quarter of what it is in the middle.
LEAST_STEPS = 3
SHARE = 0.8
ALIKE = 0.25
# Of the delay that its own work explains: the rest is the system's, which wakes a process late.
EXPLAINED = 0.5


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for.

    Args:
        rank: Its number.
        seconds: Of a median step: how long the others wait for it, beyond what it waits for them; no more than it
            works longer than they do.
        steps: In how many of the recorded steps it is this rank.
        of_steps: How many there are.
        part: Of a step, in which it takes longer than the others, and longest.
        part_seconds: How much longer, in a mean step.
    """

    rank: int
    seconds: float
    steps: int
    of_steps: int
    part: str
    part_seconds: float


def find_straggler(ranks: Sequence[RankProfile]) -> Straggler | None:
    """The rank that the others wait for in most steps; None where that is now this one, now that one.

    Of a pipeline, ranks of the same stage are compared: stages wait for each other by design.

    Args:
        ranks: Of all ranks that left a trace.
    """
    found = []
    for stage in sorted({rank.pipe_stage for rank in ranks}):
        alike = [rank for rank in ranks if rank.pipe_stage == stage]
        if len(alike) > 1 and (one := _among(alike)):
            found.append(one)
    return max(found, key=lambda each: each.seconds, default=None)


def waits_of(ranks: Sequence[RankProfile]) -> dict[int, dict[int, float]]:
    """Rank -> index of a step -> seconds that it waits for the last rank to come to its collectives.

    Args:
        ranks: Which take part in the same collectives.
    """
    offsets = _offsets(ranks)
    waited: dict[int, dict[int, float]] = {rank.rank: defaultdict(float) for rank in ranks}
    for same in _matched(ranks):
        arrivals = {number: one.begin_us + offsets[number] for number, one in same.items()}
        last = max(arrivals.values())
        for number, one in same.items():
            wait_us = min(last - arrivals[number], one.end_us - one.begin_us)
            waited[number][one.step] += max(0.0, wait_us) / 1e6
    return waited


def _among(ranks: Sequence[RankProfile]) -> Straggler | None:
    waited = waits_of(ranks)
    steps = sorted({step for of_rank in waited.values() for step in of_rank})
    if not steps:
        return None
    by_rank: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        least = sorted((of_rank.get(step, 0.0), number) for number, of_rank in waited.items())
        (own, rank), (others, _) = least[0], least[1]
        by_rank[rank].append(others - own)
    rank, ahead = max(by_rank.items(), key=lambda item: len(item[1]))
    delay = median(ahead)
    clear = sum(each >= ALIKE * delay for each in ahead)
    if len(steps) < LEAST_STEPS or clear < SHARE * len(steps):
        return None
    more = _more_work(rank, ranks)
    if sum(more.values()) < EXPLAINED * delay:
        return None
    part = max(more, key=lambda name: more[name])
    return Straggler(
        rank=rank,
        seconds=min(delay, sum(more.values())),
        steps=len(ahead),
        of_steps=len(steps),
        part=part,
        part_seconds=more[part],
    )


def _more_work(rank: int, ranks: Sequence[RankProfile]) -> dict[str, float]:
    """Part of a step -> how much longer a rank works there than the others do; less than 0 where it works less."""
    own = next(each.seconds for each in ranks if each.rank == rank)
    others = [each.seconds for each in ranks if each.rank != rank]
    return {part: own[part] - median(each[part] for each in others) for part in WORK}


def _matched(ranks: Sequence[RankProfile]) -> Iterator[Mapping[int, Arrival]]:
    """Each collective that all ranks take part in: rank -> it."""
    found: dict[tuple[int, str, int], dict[int, list[Arrival]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for one in rank.arrivals:
            found[one.step, one.kind, one.num_bytes][rank.rank].append(one)
    for by_rank in found.values():
        if len(by_rank) == len(ranks) and len({len(each) for each in by_rank.values()}) == 1:
            for same in zip(*by_rank.values(), strict=True):
                yield dict(zip(by_rank, same, strict=True))


def _offsets(ranks: Sequence[RankProfile]) -> dict[int, float]:
    """Rank -> microseconds to add to its times, so that they are by the clock of the first rank's machine."""
    first = ranks[0]
    offsets = {rank.rank: 0.0 for rank in ranks}
    if all(rank.host == first.host for rank in ranks):
        return offsets
    differences: dict[int, list[float]] = defaultdict(list)
    for same in _matched(ranks):
        for number, one in same.items():
            differences[number].append(same[first.rank].end_us - one.end_us)
    by_host: dict[str, list[float]] = defaultdict(list)
    for rank in ranks:
        by_host[rank.host] += differences[rank.rank]
    return {
        rank.rank: 0.0 if rank.host == first.host else median(by_host[rank.host] or [0.0]) for rank in ranks
    }
