"""A recorded step: the clocks of several machines are aligned, and it is compared with what its schedule plans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.package import recorded_step
from tests.pipe.steps import DUALPIPEV, INTERLEAVED, SCHEDULES, Op, Spans, Step, simulated


def of(schedule: str, ranks: int = 4) -> Step:
    return Step(schedule, ranks, 8, 2 if schedule in (INTERLEAVED, DUALPIPEV) else 1)


def shifted(spans: Spans, by: list[float]) -> Spans:
    return [[(op, a + own, b + own) for op, a, b in rank] for rank, own in zip(spans, by, strict=True)]


@given(st.sampled_from(SCHEDULES), st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=2))
def test_clocks_are_aligned_by_what_passes_wait_for(schedule: str, offsets: list[float]) -> None:
    """Ranks 0 and 1 on one machine, the others each on their own, in a step where messages take no time.

    A schedule that never waits for one of the two directions leaves some play.
    """
    step = of(schedule)
    spans = simulated(step)
    for by, machines, play in (([1000.25] * 4, "aaaa", 0), ([0, 0, *offsets], "aabc", 1.1)):
        found = recorded_step(step, shifted(spans, by), machines)
        assert found["machines"] == len(set(machines))
        for own, expected in zip(found["spans"], spans, strict=True):
            assert [op for op, *_ in own] == [op for op, *_ in expected]
            assert all(abs(a[1] - b[1]) <= play + 1e-6 for a, b in zip(own, expected, strict=True))


def test_uneven_parts_are_planned_as_long_as_they_were() -> None:
    """The second rank's passes take twice the time; one of them, once, ten times. Loading is work, and not planned."""
    step = of("1f1b", 2)

    def cost(op: Op) -> float:
        return (1 + op[1]) * (1 if op[0] == "F" else 2)

    late = simulated(step, lambda op: 20 if op == ("F", 1, 3) else cost(op))
    first = late[0][0][1]
    late[0].insert(0, (("L", 0, 0), first - 1, first))
    found = recorded_step(step, late, "aa")
    assert found["spans"][0][0] == (("L", 0, 0), 0, 1)
    assert found["planned"] == simulated(step, cost)
    assert recorded_step(step, [late[0], []], "aa") == {}
