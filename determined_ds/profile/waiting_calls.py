"""Calls in the user's code that wait: for a GPU, or for the other ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from determined_ds.profile.nesting import StepsOf
from determined_ds.profile.trace_file import Trace
from determined_ds.protocol.profile_files import DATA, WAIT


@dataclass(frozen=True, kw_only=True)
class WaitingCall:
    """A call at a line of the user's code.

    Args:
        function: E.g. ``item`` or ``barrier``.
        place: File and line: ``model_def.py:88``.
        seconds: In a mean step.
        calls: In a mean step.
    """

    function: str
    place: str
    seconds: float
    calls: float


def waiting_calls_of(trace: Trace) -> list[WaitingCall]:
    """The waiting calls of the recorded steps, those that take longest first; what a data loader does is not theirs.

    Args:
        trace: Of a rank.
    """
    data = [event for event in trace.events if event.name == DATA]
    steps, num_steps = StepsOf(trace.steps), len(trace.steps)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for event in trace.events:
        if not event.name.startswith(WAIT) or steps.index(event.begin) is None:
            continue
        if any(each.begin <= event.begin < each.end for each in data):
            continue
        function, _, place = event.name.removeprefix(WAIT).partition(" ")
        seconds[function, place] += (event.end - event.begin) / 1e6
        calls[function, place] += 1
    found = [
        WaitingCall(
            function=function,
            place=place,
            seconds=total / num_steps,
            calls=calls[function, place] / num_steps,
        )
        for (function, place), total in seconds.items()
    ]
    return sorted(found, key=lambda call: -call.seconds)
