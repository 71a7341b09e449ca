"""A trace file, read: complete events by thread, and what the rank says of it.

The format is the Chrome trace event format, as torch's profiler (Kineto) writes it: times in microseconds, ``ph`` "X"
for an event with a duration, ``cat`` for its kind.

    cpu_op            an operator, on the thread that called it
    user_annotation   a range by ``record_function``; collectives of gloo, on the thread that ran them
    cuda_runtime      a call that launches something, tied to it by ``correlation``
    kernel, gpu_memcpy, gpu_memset     on a stream of a GPU (``tid``), with ``correlation``
    gpu_user_annotation                a range as seen on a stream; not read
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
from determined_ds.rundir.profile_files import META, STEP, CaptureRecord

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
BACKENDS = ("gloo:", "mpi:", "ucc:", "xccl:")  # begin the names of collectives on threads of the host
GZIPPED = b"\x1f\x8b"


class Event(NamedTuple):
    """An event with a duration.

    Args:
        name: As in the trace.
        category: Its ``cat``.
        begin: Microseconds, on the clock of the trace.
        end: The same.
        pid: The process; of an event on a GPU its number.
        tid: The thread; of an event on a GPU its stream.
        args: What the profiler says of it.
    """

    name: str
    category: str
    begin: float
    end: float
    pid: int | str
    tid: int | str
    args: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A rank's trace.

    Args:
        path: Its file.
        record: What the rank says of it.
        events: Those with a duration, in the order of their begin; of equal ones the longest first.
        main_thread: The thread that trains; None where there is no step.
    """

    path: Path
    record: CaptureRecord
    events: Sequence[Event]
    main_thread: int | str | None = None

    @property
    def steps(self) -> list[Event]:
        """The range of each step of the record, the last one where a step has begun again."""
        found = {}
        for event in self.events:
            if event.category == "user_annotation" and event.name.startswith(f"{STEP}#"):
                found[int(event.name.rpartition("#")[2])] = event
        return [found[index] for index in sorted(found) if index < len(self.record.steps)]

    @property
    def device_events(self) -> list[Event]:
        """What ran on a GPU."""
        return [event for event in self.events if event.category in ON_DEVICE]


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Args:
        path: A file, gzipped or not.

    Raises:
        ConfigError: it is not a trace of this library, or damaged.
    """
    try:
        content = path.read_bytes()
        found = json.loads(gzip.decompress(content) if content.startswith(GZIPPED) else content)
        raw = found["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise _refused(path, f"cannot be read: {error or type(error).__name__}") from error
    if not isinstance(found.get(META), dict):
        raise _refused(path, "was not written by a training of this library: its steps are not marked")
    events = [_event(each) for each in raw if each.get("ph") == "X" and "dur" in each]
    events.sort(key=lambda event: (event.begin, -event.end))
    main = next((event.tid for event in events if event.name.startswith(f"{STEP}#")), None)
    record = CaptureRecord.from_json(found[META])
    return Trace(path=path, record=record, events=events, main_thread=main)


def _event(raw: Mapping[str, Any]) -> Event:
    begin = float(raw["ts"])
    return Event(
        name=str(raw.get("name", "")),
        category=str(raw.get("cat", "")).lower(),
        begin=begin,
        end=begin + float(raw["dur"]),
        pid=raw.get("pid", ""),
        tid=raw.get("tid", ""),
        args=raw.get("args") or {},
    )


def _refused(path: Path, message: str) -> ConfigError:
    fix = "give a run directory, or a folder of traces that `det-ds profile` or `fit.profile` has written"
    return ConfigError(Problem(key="trace", value=str(path), message=message, fix=fix, code="trace"))
