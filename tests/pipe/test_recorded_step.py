"""A recorded step is compared with what its schedule plans."""

from __future__ import annotations

from tests.package import recorded_step
from tests.pipe.steps import Op, Step, simulated


def test_uneven_parts_are_planned_as_long_as_they_were() -> None:
    """The second rank's passes take twice the time; one of them, once, ten times. Loading is work, and not planned."""
    step = Step("1f1b", 2, 8)

    def cost(op: Op) -> float:
        return (1 + op[1]) * (1 if op[0] == "F" else 2)

    late = simulated(step, lambda op: 20 if op == ("F", 1, 3) else cost(op))
    first = late[0][0][1]
    late[0].insert(0, (("L", 0, 0), first - 1, first))
    found = recorded_step(step, late)
    assert found["spans"][0][0] == (("L", 0, 0), 0, 1)
    assert found["planned"] == simulated(step, cost)
    assert recorded_step(step, [late[0], []]) == {}
