"""The steps of a rank that computes on a CPU, taken apart.

The thread that trains is at one thing at a time, and our ranges say at what. Collectives run in threads of gloo: while
one does and the training thread computes nothing, it waits for it; while it computes, the collective is hidden.

Source: ``ProcessGroupGloo::AsyncWork`` in torch 2.13's ``ProcessGroupGloo.cpp``, whose event lasts from the start of
the work on its thread to its end.
"""

from __future__ import annotations

import itertools

from determined_ds.profile.intervals import Span, difference, intersection, length, shared_out, union
from determined_ds.profile.phases import Phases
from determined_ds.profile.step_parts import PARTS, StepParts
from determined_ds.profile.trace_file import BACKENDS, Event, Trace

CALLS = ("c10d::", "_c10d_functional::")
US_PER_S = 1e6


def host_steps(trace: Trace, phases: Phases) -> list[StepParts]:
    """Each step that was recorded, by the host's time."""
    collectives, computing = collectives_of(trace), computing_of(trace)
    found = []
    for step, captured in zip(trace.steps, trace.record.steps, strict=False):
        whole = (step.begin, step.end)
        running = intersection([whole], collectives)
        waiting = difference(running, computing)
        claims = (
            ("pipeline", phases.of("pipeline")),
            ("data", phases.of("data")),
            ("communication", waiting),
            *((phase, phases.of(phase)) for phase in ("communication", "forward", "backward", "optimizer")),
        )
        shares = shared_out(whole, claims, "other")
        hidden = difference(running, [*shares["communication"]])
        hidden = difference(hidden, union([*shares["pipeline"], *shares["data"]]))
        found.append(
            StepParts(
                batch=captured.batch,
                begin_us=step.begin,
                end_us=step.end,
                clock_s=captured.seconds,
                seconds={part: length(shares.get(part, ())) / US_PER_S for part in PARTS},
                overlapped_s=length(hidden) / US_PER_S,
            )
        )
    return found


def collectives_of(trace: Trace) -> list[Span]:
    """When a collective is under way, on whatever thread of the host."""
    return union((event.begin, event.end) for event in trace.events if _is_collective(event))


def _is_collective(event: Event) -> bool:
    if event.category == "cpu_op":
        return event.name.startswith(CALLS)
    return event.category == "user_annotation" and event.name.startswith(BACKENDS)


def computing_of(trace: Trace) -> list[Span]:
    """When the training thread computes: in operators of torch, or in others that call no further ones.

    Operators that wrap others are left out. In ``AccumulateGrad``'s, for one, hooks wait for collectives.
    """
    operators = [
        event for event in trace.events if event.category == "cpu_op" and event.tid == trace.main_thread
    ]
    leaves = []
    for event, following in itertools.zip_longest(operators, operators[1:]):
        is_leaf = following is None or following.begin >= event.end
        if event.name.startswith("aten::") or (is_leaf and not event.name.startswith(CALLS)):
            leaves.append((event.begin, event.end))
    return union(leaves)
