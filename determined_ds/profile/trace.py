"""A trace file, read: complete events by thread, and what the rank says of it.

The format is the Chrome trace event format, as torch's profiler (Kineto) writes it: times in microseconds, ``ph`` "X"
for an event with a duration, ``cat`` for its kind.

    cpu_op            an operator, on the thread that called it
    user_annotation   a range by ``record_function``; collectives of gloo, on the thread that ran them
    cuda_runtime      a call that launches something, tied to it by ``correlation``
    kernel, gpu_memcpy, gpu_memset     on a stream of a GPU (``tid``), with ``correlation``
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from determined_ds.errors import ConfigError, Problem
from determined_ds.profile.record import META, STEP, CaptureRecord

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
GZIPPED = b"\x1f\x8b"


class Event(NamedTuple):
    """An event: its times in microseconds on the clock of the trace, its thread (on a GPU: its stream)."""

    name: str
    category: str
    begin: float
    end: float
    tid: int | str
    args: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A rank's trace.

    Args:
        record: What the rank says of it.
        events: In the order of their begin; of equal ones the longest first.
        main_thread: The thread that trains; None where there is no step.
        steps: The range of each step of the record, the last one where a step has begun again.
        device_events: Those that ran on a GPU.
    """

    record: CaptureRecord
    events: Sequence[Event]
    main_thread: int | str | None
    steps: Sequence[Event]
    device_events: Sequence[Event]


def read_trace(path: Path) -> Trace:
    """Read a trace, gzipped or not.

    Raises:
        ConfigError: it is not a trace of this library, or damaged.
    """
    fix = "give a run directory, or a folder of traces that `det-ds profile` or `fit.profile` has written"

    def refused(message: str) -> ConfigError:
        return ConfigError(Problem(key="trace", value=str(path), message=message, fix=fix, code="trace"))

    try:
        content = path.read_bytes()
        found = json.loads(gzip.decompress(content) if content.startswith(GZIPPED) else content)
        raw, meta = found["traceEvents"], found.get(META)
        record = CaptureRecord.model_validate(meta) if meta is not None else None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise refused(f"cannot be read: {error or type(error).__name__}") from error
    if record is None:
        raise refused("was not written by a training of this library: its steps are not marked")
    events = [
        Event(
            name=str(each.get("name", "")),
            category=str(each.get("cat", "")).lower(),
            begin=float(each["ts"]),
            end=float(each["ts"]) + float(each["dur"]),
            tid=each.get("tid", ""),
            args=each.get("args") or {},
        )
        for each in raw
        if each.get("ph") == "X" and "dur" in each
    ]
    events.sort(key=lambda event: (event.begin, -event.end))
    steps = {
        int(event.name.rpartition("#")[2]): event
        for event in events
        if event.category == "user_annotation" and event.name.startswith(f"{STEP}#")
    }
    return Trace(
        record=record,
        events=events,
        main_thread=next((steps[index].tid for index in sorted(steps)), None),
        steps=[steps[index] for index in sorted(steps) if index < len(record.steps)],
        device_events=[event for event in events if event.category in ON_DEVICE],
    )
