"""The events of the host as trees: which lies in which, how long each takes by itself, and whose each is.

An operator of the forward pass belongs to the innermost module whose range it is in. One of the backward pass has the
sequence number of the forward operator that it belongs to, and so the module of that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from determined_ds.profile.trace_file import Event, Trace
from determined_ds.protocol.profile_files import BACKWARD, DATA, FORWARD, MODULE, OPTIMIZER

BACKWARD_NODE = "autograd::engine::evaluate_function: "
# Where in a step an operator runs; "recomputed": a forward pass again, within the backward pass.
PHASES = ("data", "forward", "recomputed", "backward", "optimizer", "other")
OF_MARKS = {DATA: "data", FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}


@dataclass(eq=False)
class Nested:
    """An event in its place.

    Args:
        event: The event.
        parent: The innermost event around it on its thread.
        inside_us: What the events directly in it take.
        module: The qualified name of the module that it belongs to; empty outside of modules.
        phase: One of :data:`PHASES`.
    """

    event: Event
    parent: Nested | None = None
    inside_us: float = 0.0
    module: str = ""
    phase: str = "other"

    @property
    def self_us(self) -> float:
        """How long it takes without those in it."""
        return max(0.0, self.event.end - self.event.begin - self.inside_us)


def operators_of(trace: Trace) -> list[Nested]:
    """The operators of the host in their places, in the order of their begin."""
    found, innermost = [], dict[int | str, Nested]()
    modules: dict[object, str] = {}  # sequence number -> module of the latest forward operator that has it
    for event in trace.events:
        is_operator = event.category == "cpu_op"
        if not is_operator and event.category != "user_annotation":
            continue
        around = innermost.get(event.tid)
        while around is not None and around.event.end < event.end:
            around = around.parent
        place = Nested(event, around)
        innermost[event.tid] = place
        if around is not None:
            around.inside_us += event.end - event.begin
            place.module, place.phase = around.module, around.phase
        number = event.args.get("Sequence number")
        if is_operator:
            found.append(place)
            if event.name.startswith(BACKWARD_NODE):
                place.module, place.phase = modules.get(number, ""), "backward"
            elif number is not None and place.phase not in ("backward", "optimizer"):
                modules[number] = place.module
        else:
            _enter(place)
    return found


def _enter(place: Nested) -> None:
    """What a range says of all that lies in it."""
    name = place.event.name
    if name.startswith(MODULE):
        place.module = name.removeprefix(MODULE)
        place.phase = "recomputed" if place.phase in ("backward", "recomputed") else "forward"
    elif name in OF_MARKS:
        place.phase = OF_MARKS[name]
    elif name.startswith("Optimizer.step#"):
        place.phase = "optimizer"


class StepsOf:
    """Which step of a trace a moment is in."""

    def __init__(self, steps: Sequence[Event]) -> None:
        self._steps = steps
        self._begins = [step.begin for step in steps]

    def index(self, moment: float) -> int | None:
        """The step's index; None outside of steps."""
        index = bisect_right(self._begins, moment) - 1
        return index if index >= 0 and moment < self._steps[index].end else None
