"""What the host is at, by the ranges of ours on the thread that trains: the innermost one that is open."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from determined_ds.profile.intervals import Span, difference, union
from determined_ds.profile.trace_file import Event, Trace
from determined_ds.protocol.profile_files import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    PIPELINE,
)

PHASES = {
    DATA: "data",
    FORWARD: "forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    COMMUNICATION: "communication",
    PIPELINE: "pipeline",
}
# Ranges of torch that say the same where no engine of DeepSpeed does.
OF_TORCH = {"Optimizer.step#": "optimizer", "DistributedDataParallel.forward": "forward"}


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Phase -> when the host is in it; disjoint."""

    spans: dict[str, list[Span]]

    def of(self, phase: str) -> list[Span]:
        """When the host is in a phase."""
        return self.spans.get(phase, [])

    def at(self, moments: Sequence[float]) -> list[str]:
        """The phase at each moment; "" where there is none."""
        pieces = sorted((begin, end, phase) for phase, spans in self.spans.items() for begin, end in spans)
        begins = [piece[0] for piece in pieces]
        found = []
        for moment in moments:
            index = bisect_right(begins, moment) - 1
            found.append(pieces[index][2] if index >= 0 and moment < pieces[index][1] else "")
        return found


def phases_of(trace: Trace) -> Phases:
    """The phases of the thread that trains, over the whole trace.

    What lies between a forward pass and the backward pass that follows it is the computation of the loss, in the code
    of the trial: it belongs to the forward pass.
    """
    ranges = [(event, phase) for event in trace.events if (phase := _phase(event, trace))]
    spans: dict[str, list[Span]] = {}
    for event, phase in _innermost(ranges):
        spans.setdefault(phase, []).append(event)
    found = {phase: union(each) for phase, each in spans.items()}
    found["forward"] = union([*found.get("forward", ()), *_losses(found, trace)])
    return Phases(spans=found)


def _phase(event: Event, trace: Trace) -> str:
    if event.category != "user_annotation" or event.tid != trace.main_thread:
        return ""
    if event.name in PHASES:
        return PHASES[event.name]
    return next((phase for start, phase in OF_TORCH.items() if event.name.startswith(start)), "")


def _innermost(ranges: Iterable[tuple[Event, str]]) -> list[tuple[Span, str]]:
    """Pieces of ranges in which no inner range is open. Ranges of one thread are nested, and come by their begin."""
    pieces: list[tuple[Span, str]] = []
    stack: list[tuple[float, str]] = []  # end, phase
    at = 0.0

    def advance(to: float) -> None:
        nonlocal at
        while stack and stack[-1][0] <= to:
            end, phase = stack.pop()
            if end > at:
                pieces.append(((at, end), phase))
                at = end
        if stack and to > at:
            pieces.append(((at, to), stack[-1][1]))
        at = max(at, to)

    for event, phase in ranges:
        advance(event.begin)
        end = min(event.end, stack[-1][0]) if stack else event.end
        stack.append((end, phase))
    advance(float("inf"))
    return pieces


def _losses(found: dict[str, list[Span]], trace: Trace) -> list[Span]:
    """Between a forward pass and the next backward pass, where nothing else is in between, within a step."""
    pieces = sorted((begin, end, phase) for phase, spans in found.items() for begin, end in spans)
    gaps = [
        (left[1], right[0])
        for left, right in itertools.pairwise(pieces)
        if left[2] == "forward" and right[2] == "backward"
    ]
    outside = difference(union(gaps), union((step.begin, step.end) for step in trace.steps))
    return difference(union(gaps), outside)
