"""The steps of a rank taken apart: seconds by part, which are disjoint and add up to the step.

On a CPU the thread that trains is at one thing at a time, and our ranges say at what. Collectives run in threads of
gloo: while one does and the training thread computes nothing, it waits for it; while it computes, the collective is
hidden.

On a GPU a kernel belongs to the phase in which the host launched it, whatever thread did. While a kernel computes, the
step is at that kernel's phase; a collective's kernel beside it is hidden. A collective's kernel alone is waited for.
Where nothing runs, the device waits for the host: for data or for a neighbouring stage, if the host does; else it is
idle. The host is ahead of the device, so a step ends with the last kernel that it has launched, or with the host where
that is later; there the next one begins. The first one begins, and the last one ends, where the host waits for the
device: all of them together take what they take by the host's clock.

Source: ``ProcessGroupGloo::AsyncWork`` in torch 2.13's ``ProcessGroupGloo.cpp``, whose event lasts from the start of
the work on its thread to its end; the categories ``kernel``, ``gpu_memcpy`` and ``gpu_memset``, and ``correlation``,
which ties them to the call that launched them, as Kineto of torch 2.13 writes them (``libkineto/src/output_json.cpp``);
names of NCCL 2.29's kernels.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from determined_ds.profile.record import ON_DEVICE, PHASES, RANGE, Event, Trace
from determined_ds.report.results import PARTS

CALLS = ("c10d::", "_c10d_functional::")
BACKENDS = ("gloo:", "mpi:", "ucc:", "xccl:")  # begin the names of collectives on threads of the host
LAUNCHES = ("cuda_runtime", "cuda_driver", "runtime", "driver")
# Where kernels of two phases run at once, the first one has the time.
COMPUTE = ("backward", "forward", "optimizer", "data", "other")
US_PER_S = 1e6
Span = tuple[float, float]  # begin, end
Spans = Sequence[Span]  # sorted, disjoint, each with a length above 0
Claims = list[tuple[str, Spans]]  # parts and when they may be; each has what those before it leave


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """One step of one rank."""

    batch: int  # optimizer steps since the start of training, this one included
    begin_us: float  # on the clock of the trace
    end_us: float
    clock_s: float  # how long it took by the loop's own clock
    seconds: Mapping[str, float]  # by part; disjoint, all parts are there
    overlapped_s: float  # communication that computation hid: within the other parts, and not one of them


def steps_of(trace: Trace) -> list[StepParts]:
    """Each step that was recorded: by the device's time where the trace has any of it, else by the host's."""
    phases = _phases(trace)
    collectives = union(
        (event.begin, event.end)
        for event in trace.events
        if (event.category == "cpu_op" and event.name.startswith(CALLS))
        or (event.category == "user_annotation" and event.name.startswith(BACKENDS))
    )
    on_device = [event for event in trace.events if event.category in ON_DEVICE]
    if on_device:
        wholes, claims, hidden = _on_device(trace, on_device, phases, collectives)
        claims.append(("idle", wholes))
    else:
        wholes = [(step.begin, step.end) for step in trace.steps]
        claims, hidden = _on_host(trace, phases, collectives)
        claims.append(("other", wholes))
    found = []
    for whole, captured in zip(wholes, trace.record.steps, strict=False):
        left, seconds = union([whole]), dict.fromkeys(PARTS, 0.0)
        for part, spans in claims:
            seconds[part] += length(intersection(left, spans)) / US_PER_S
            left = difference(left, spans)
        found.append(
            StepParts(
                batch=captured.batch,
                begin_us=whole[0],
                end_us=whole[1],
                clock_s=captured.seconds,
                seconds=seconds,
                overlapped_s=length(intersection([whole], hidden)) / US_PER_S,
            )
        )
    return found


def _on_host(trace: Trace, phases: Mapping[str, Spans], collectives: Spans) -> tuple[Claims, Spans]:
    """What takes the time of the training thread, and communication that is hidden."""
    # The training thread computes in operators of torch, and in others that call no further ones. Operators that wrap
    # others do not count: in ``AccumulateGrad``'s, for one, hooks wait for collectives.
    own = [event for event in trace.events if event.category == "cpu_op" and event.tid == trace.main_thread]
    computing = union(
        (event.begin, event.end)
        for event, following in itertools.zip_longest(own, own[1:])
        if event.name.startswith("aten::")
        or ((following is None or following.begin >= event.end) and not event.name.startswith(CALLS))
    )
    waiting = union([*phases["pipeline"], *phases["data"]])
    waited = difference(collectives, computing)
    claims: Claims = [(part, phases[part]) for part in ("pipeline", "data")]
    claims += [("communication", waited), ("communication", phases["communication"])]
    claims += [(part, phases[part]) for part in ("forward", "backward", "optimizer")]
    hidden = difference(difference(intersection(collectives, computing), waiting), phases["communication"])
    return claims, hidden


def _on_device(
    trace: Trace, on_device: Sequence[Event], phases: Mapping[str, Spans], collectives: Spans
) -> tuple[list[Span], Claims, Spans]:
    """Where each step is on the device, what takes its time, and communication that is hidden."""
    launches = {
        event.args["correlation"]: event.begin
        for event in trace.events
        if event.category in LAUNCHES and event.args.get("correlation")
    }
    pieces = _pieces(phases)
    begins = [piece[0] for piece in pieces]
    computing: dict[str, list[Span]] = {part: [] for part in COMPUTE}
    sending: dict[str, list[Span]] = {"communication": [], "pipeline": []}
    ends: list[tuple[float, float]] = []  # of each kernel: when it was launched, when it ended
    for event in on_device:
        span = event.begin, event.end
        launched = launches.get(event.args.get("correlation"), event.begin)
        index, name = bisect_right(begins, launched) - 1, event.name.lower()
        phase = pieces[index][2] if index >= 0 and launched < pieces[index][1] else ""
        if event.category == "kernel" and ("nccl" in name or "rccl" in name):
            sending["pipeline" if phase == "pipeline" else "communication"].append(span)
        else:
            to_device = "data" if name.startswith("memcpy htod") else "other"
            computing[phase if phase in COMPUTE else to_device].append(span)
        ends.append((launched, event.end))
    claims: Claims = [(part, union(spans)) for part, spans in (*computing.items(), *sending.items())]
    claims += [("data", phases["data"]), ("pipeline", phases["pipeline"]), ("communication", collectives)]
    zero: Any = (trace.record.ds_config or {}).get("zero_optimization")
    offloaded = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    if isinstance(offloaded, dict) and offloaded.get("device") in ("cpu", "nvme"):  # the host computes it
        claims.append(("optimizer", phases["optimizer"]))
    hidden = intersection(
        union(itertools.chain(*sending.values())), union(itertools.chain(*computing.values()))
    )
    # Without gaps, unless the host was at something else and the device at rest.
    wholes, at = [], float("-inf")
    for step in trace.steps:
        begin = max([at, step.begin, *(end for launched, end in ends if launched < step.begin)])
        at = max([begin, step.end, *(end for launched, end in ends if launched < step.end)])
        wholes.append((begin, at))
    return wholes, claims, hidden


def _phases(trace: Trace) -> dict[str, list[Span]]:
    """Phase -> when the thread that trains is in it, over the whole trace; disjoint: the innermost open range counts.

    What lies between a forward pass and the backward pass that follows it is the computation of the loss, in the code
    of the trial: it belongs to the forward pass.
    """
    spans: dict[str, list[Span]] = defaultdict(list)
    stack: list[tuple[float, str]] = []  # end, phase
    at = 0.0

    def advance(to: float) -> None:
        nonlocal at
        while stack and stack[-1][0] <= to:
            end, phase = stack.pop()
            spans[phase].append((at, end))
            at = max(at, end)
        if stack:
            spans[stack[-1][1]].append((at, to))
        at = max(at, to)

    for event in trace.events:  # ranges of one thread are nested, and come by their begin
        phase = event.name.removeprefix(RANGE)
        is_ours = event.category == "user_annotation" and event.name.startswith(RANGE) and phase in PHASES
        if is_ours and event.tid == trace.main_thread:
            advance(event.begin)
            stack.append((min(event.end, stack[-1][0]) if stack else event.end, phase))
    advance(float("inf"))
    found = {phase: union(spans[phase]) for phase in PHASES}
    losses = union(
        (left[1], right[0])
        for left, right in itertools.pairwise(_pieces(found))
        if left[2] == "forward" and right[2] == "backward"
    )
    in_steps = intersection(losses, union((step.begin, step.end) for step in trace.steps))
    return {**found, "forward": union([*found["forward"], *in_steps])}


def _pieces(phases: Mapping[str, Spans]) -> list[tuple[float, float, str]]:
    return sorted((begin, end, phase) for phase, spans in phases.items() for begin, end in spans)


# ------------------------------------------------------------------------------------------- arithmetic of spans


def union(spans: Iterable[Span]) -> list[Span]:
    """What at least one of them covers; they may overlap, in any order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif begin < end:
            found.append((begin, end))
    return found


def intersection(left: Spans, right: Spans) -> list[Span]:
    """What both cover."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(left: Spans, right: Spans) -> list[Span]:
    """What ``left`` covers and ``right`` does not."""
    edges = [float("-inf"), *itertools.chain(*right), float("inf")]
    return intersection(left, list(zip(edges[::2], edges[1::2], strict=True)))


def length(spans: Spans) -> float:
    """Of all of them."""
    return sum(end - begin for begin, end in spans)
