"""When a rank comes to each collective of its steps, when that is over, and how many bytes it moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from determined_ds.profile.nesting import StepsOf
from determined_ds.profile.trace_file import BACKENDS, Event, Trace

# Bytes of a number, by the names of types that profilers write.
ITEM_BYTES = {
    "float": 4,
    "int": 4,
    "double": 8,
    "long int": 8,
    "c10::half": 2,
    "c10::bfloat16": 2,
    "half": 2,
    "bfloat16": 2,
    "bool": 1,
    "unsigned char": 1,
    "byte": 1,
    "char": 1,
    "long": 8,
}
NCCL = ("ncclDevKernel", "ncclKernel")
POINT_TO_POINT = ("send", "recv", "sendrecv")


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A rank at a collective.

    Args:
        step: Index of the recorded step.
        kind: E.g. ``all_reduce``.
        num_bytes: Of this rank's tensors; 0 where the trace does not say.
        begin_us: When the rank came to it, on the clock of the trace.
        end_us: When it was over.
    """

    step: int
    kind: str
    num_bytes: int
    begin_us: float
    end_us: float


def arrivals_of(trace: Trace) -> list[Arrival]:
    """The collectives of the recorded steps, in the order of time; sends and receives are none.

    Args:
        trace: Of a rank.
    """
    found, steps = [], StepsOf(trace.steps)
    for event in trace.events:
        kind = _kind(event)
        index = steps.index(event.begin) if kind and kind not in POINT_TO_POINT else None
        if index is not None:
            times = {"begin_us": event.begin, "end_us": event.end}
            found.append(Arrival(step=index, kind=kind, num_bytes=_bytes(event), **times))
    return found


def _kind(event: Event) -> str:
    """``all_reduce`` and its like; "" for any other event."""
    if event.category == "user_annotation" and event.name.startswith(BACKENDS):
        return event.name.partition(":")[2]
    if event.category == "kernel" and event.name.startswith(NCCL):
        return str(event.args.get("Collective name") or event.name.split("_")[1]).lower().removeprefix("_")
    return ""


def _bytes(event: Event) -> int:
    args = event.args
    if "In msg nelems" in args:
        size = ITEM_BYTES.get(str(args.get("dtype", "")).lower(), 4)
        return int(args["In msg nelems"]) * size
    num_bytes = 0
    for shape, kind in zip(args.get("Input Dims") or (), args.get("Input type") or (), strict=False):
        size = ITEM_BYTES.get(str(kind).lower(), 0)
        if size and all(isinstance(length, int) for length in shape):
            num_bytes += math.prod(shape) * size
    return num_bytes
