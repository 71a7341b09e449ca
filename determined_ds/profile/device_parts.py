"""The steps of a rank that computes on a GPU, taken apart: by what runs on its streams.

A kernel belongs to the phase in which the host launched it, whatever thread did. While a kernel computes, the step is
at that kernel's phase; a collective's kernel beside it is hidden. A collective's kernel alone is waited for. Where
nothing runs, the device waits for the host: for data or for a neighbouring stage, if the host does; else it is idle.

The host is ahead of the device, so a step ends with the last kernel that it has launched, or with the host where that
is later; there the next one begins. The first one begins, and the last one ends, where the host waits for the device:
all of them together take what they take by the host's clock.

Source: the categories ``kernel``, ``gpu_memcpy`` and ``gpu_memset``, and ``correlation``, which ties them to the call
that launched them, as Kineto of torch 2.13 writes them (``libkineto/src/output_json.cpp``); names of NCCL 2.29's
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from determined_ds.profile.host_parts import US_PER_S, collectives_of
from determined_ds.profile.intervals import Span, intersection, length, shared_out, union
from determined_ds.profile.phases import Phases
from determined_ds.profile.step_parts import PARTS, StepParts
from determined_ds.profile.trace_file import Event, Trace

LAUNCHES = ("cuda_runtime", "cuda_driver", "runtime", "driver")
TO_DEVICE = "Memcpy HtoD"
# Where kernels of two phases run at once, the first one has the time.
COMPUTE = ("backward", "forward", "optimizer", "data", "other")
OFFLOADED = ("zero_optimization", "offload_optimizer")


@dataclass(frozen=True, kw_only=True)
class _OnDevice:
    """An event on a GPU.

    Args:
        span: When it ran.
        phase: In which the host launched it; "" where it was in none.
        launched: When that was; its own begin where the trace does not say.
        communicates: Whether it is a collective's, or a send or a receive.
        copies: Whether it copies from the host.
    """

    span: Span
    phase: str
    launched: float
    communicates: bool
    copies: bool


def device_steps(trace: Trace, phases: Phases) -> list[StepParts]:
    """Each step that was recorded, by the device's time."""
    events = _on_device(trace, phases)
    spans = list(_steps(trace, events))
    streams = _streams(events)
    waiting = {phase: phases.of(phase) for phase in ("data", "pipeline")}
    waiting["communication"] = collectives_of(trace)
    offloaded: Any = trace.record.ds_config or {}
    for key in OFFLOADED:
        offloaded = (offloaded.get(key) if isinstance(offloaded, dict) else None) or {}
    if offloaded.get("device") in ("cpu", "nvme"):  # then the host computes it
        waiting["optimizer"] = phases.of("optimizer")
    found = []
    for whole, captured in zip(spans, trace.record.steps, strict=False):
        computing = [(part, streams[part]) for part in COMPUTE]
        sending = [(part, streams[f"{part} communication"]) for part in ("communication", "pipeline")]
        shares = shared_out(whole, [*computing, *sending, *waiting.items()], "idle")
        communicating = union([*sending[0][1], *sending[1][1]])
        compute = union(span for _, each in computing for span in each)
        hidden = intersection(intersection([whole], communicating), compute)
        found.append(
            StepParts(
                batch=captured.batch,
                begin_us=whole[0],
                end_us=whole[1],
                clock_s=captured.seconds,
                seconds={part: length(shares.get(part, ())) / US_PER_S for part in PARTS},
                overlapped_s=length(hidden) / US_PER_S,
            )
        )
    return found


def _on_device(trace: Trace, phases: Phases) -> list[_OnDevice]:
    launches = {
        event.args["correlation"]: event.begin
        for event in trace.events
        if event.category in LAUNCHES and event.args.get("correlation")
    }
    events = trace.device_events
    launched = [launches.get(event.args.get("correlation"), event.begin) for event in events]
    return [
        _OnDevice(
            span=(event.begin, event.end),
            phase=phase,
            launched=at,
            communicates=communicates(event),
            copies=event.name.startswith(TO_DEVICE),
        )
        for event, at, phase in zip(events, launched, phases.at(launched), strict=True)
    ]


def communicates(event: Event) -> bool:
    """Whether what ran on a GPU is of NCCL or RCCL: a collective, a send or a receive."""
    return event.category == "kernel" and ("nccl" in event.name.lower() or "rccl" in event.name.lower())


def _streams(events: Sequence[_OnDevice]) -> dict[str, list[Span]]:
    """Part of :data:`COMPUTE` -> when kernels compute for it; and when communication of either kind runs."""
    found: dict[str, list[Span]] = {part: [] for part in COMPUTE}
    found |= {"communication communication": [], "pipeline communication": []}
    for event in events:
        if event.communicates:
            part = "pipeline" if event.phase == "pipeline" else "communication"
            found[f"{part} communication"].append(event.span)
        else:
            part = event.phase if event.phase in COMPUTE else "data" if event.copies else "other"
            found[part].append(event.span)
    return {part: union(spans) for part, spans in found.items()}


def _steps(trace: Trace, events: Sequence[_OnDevice]) -> Iterator[Span]:
    """Where each step is on the device; without gaps, unless the host was at something else and the device at rest."""
    ordered = sorted(events, key=lambda event: event.launched)
    index, at = 0, float("-inf")
    for step in trace.steps:
        while index < len(ordered) and ordered[index].launched < step.begin:  # between steps: a report, say
            at = max(at, ordered[index].span[1])
            index += 1
        begin = max(at, step.begin)
        end = max(begin, step.end)
        while index < len(ordered) and ordered[index].launched < step.end:
            end = max(end, ordered[index].span[1])
            index += 1
        yield begin, end
        at = end
