"""Calls in the user's code that wait: for a GPU, or for the other ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from determined_ds.profile.nesting import StepsOf
from determined_ds.profile.trace_file import Trace
from determined_ds.protocol.profile_files import DATA, WAIT


@dataclass(frozen=True, kw_only=True)
class WaitingCall:
    """A line of the user's code that waits.

    Args:
        function: That it calls, e.g. ``item`` or ``barrier``; of several, the one that takes longest.
        place: File and line: ``model_def.py:88``.
        seconds: In a mean step, of all of them.
        calls: Of the function, in a mean step.
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
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in trace.events:
        if not event.name.startswith(WAIT) or steps.index(event.begin) is None:
            continue
        if any(each.begin <= event.begin < each.end for each in data):
            continue
        function, _, place = event.name.removeprefix(WAIT).partition(" ")
        found[place][function].append((event.end - event.begin) / 1e6)
    calls = []
    for place, by_function in found.items():
        function = max(by_function, key=lambda name: sum(by_function[name]))
        seconds = sum(sum(each) for each in by_function.values()) / num_steps
        num_calls = len(by_function[function]) / num_steps
        calls.append(WaitingCall(function=function, place=place, seconds=seconds, calls=num_calls))
    return sorted(calls, key=lambda call: -call.seconds)
