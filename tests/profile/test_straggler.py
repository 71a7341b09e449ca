"""The rank that the others wait for."""

from __future__ import annotations

from determined_ds.profile.arrivals import arrivals_of
from determined_ds.profile.step_parts import PARTS, RankProfile, StepParts
from determined_ds.profile.straggler import find_straggler
from tests.profile.made import Made


def rank_of(
    rank: int, arrivals: list[list[float]], *, host: str = "a", clock: float = 0, **parts: float
) -> RankProfile:
    """A rank that comes to the collectives of each step of 100 ms at these times; each ends when all have come."""
    made = Made(rank=rank, ranks=2)
    for index, of_step in enumerate(arrivals):
        made.step(clock + 100 * index, clock + 100 * (index + 1))
        for each, end in zip(of_step, ENDS, strict=False):
            made.collective("all_reduce", clock + 100 * index + each, clock + 100 * index + end)
    step = StepParts(
        batch=1, begin_us=0, end_us=1e5, clock_s=None, seconds={**dict.fromkeys(PARTS, 0.0), **parts}
    )
    return RankProfile(
        rank=rank,
        trace="",
        trace_bytes=0,
        host=host,
        steps=[step] * len(arrivals),
        arrivals=arrivals_of(made.trace),
    )


ENDS = (51, 91)


def test_the_last_to_come_in_every_step_is_named_with_the_part_that_is_longer() -> None:
    late = rank_of(1, [[50, 90]] * 4, forward=0.05, data=0.01)
    found = find_straggler([rank_of(0, [[20, 89]] * 4, forward=0.02, data=0.01), late])
    assert found is not None
    assert (found.rank, found.steps, found.of_steps) == (1, 4, 4)
    assert round(found.seconds, 6) == 0.03
    assert (found.part, round(found.part_seconds, 6)) == ("forward", 0.03)


def test_one_that_is_late_without_working_longer_is_none() -> None:
    """The system woke it late."""
    late = rank_of(1, [[50, 90]] * 4, forward=0.03)
    assert find_straggler([rank_of(0, [[20, 89]] * 4, forward=0.02), late]) is None


def test_ranks_that_are_late_by_turns_are_none() -> None:
    early, late = [20.0, 90.0], [50.0, 90.0]
    assert find_straggler([rank_of(0, [early, late] * 2), rank_of(1, [late, early] * 2)]) is None


def test_one_that_is_late_by_chance_is_none() -> None:
    """Always the last, but now by much, now by little."""
    ranks = [rank_of(0, [[49, 89], [30, 89], [10, 89]]), rank_of(1, [[50, 90]] * 3)]
    assert find_straggler(ranks) is None


def test_two_steps_are_too_few() -> None:
    assert find_straggler([rank_of(0, [[20, 89]] * 2), rank_of(1, [[50, 90]] * 2)]) is None


def test_clocks_of_machines_are_set_by_the_ends_of_collectives() -> None:
    """The second machine's clock is ten seconds ahead."""
    late = rank_of(0, [[50, 90]] * 3, forward=0.05)
    found = find_straggler([late, rank_of(1, [[20, 89]] * 3, host="b", clock=10_000)])
    assert found is not None
    assert found.rank == 0


def test_stages_of_a_pipeline_are_not_compared() -> None:
    ranks = [rank_of(0, [[20, 89]] * 3), rank_of(1, [[50, 90]] * 3)]
    assert find_straggler([ranks[0], RankProfile(**{**vars(ranks[1]), "pipe_stage": 1})]) is None


def test_collectives_know_their_bytes_and_sends_are_none() -> None:
    made = Made().step(0, 100).collective("all_reduce", 1, 2, num_floats=250).collective("send", 3, 4)
    [found] = arrivals_of(made.trace)
    assert (found.kind, found.num_bytes, found.step) == ("all_reduce", 1000, 0)
