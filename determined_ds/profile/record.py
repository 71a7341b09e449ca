"""What a rank that is profiled leaves, as it is written and as it is read.

A rank writes one trace in the Chrome trace event format, as torch's profiler (Kineto) exports it: times in
microseconds, ``ph`` "X" for an event with a duration, ``cat`` for its kind. Ranges of ours in it are on the thread that
trains. Under :data:`META` the file holds a :class:`CaptureRecord`.

    cpu_op            an operator, on the thread that called it
    user_annotation   a range by ``record_function``; collectives of gloo, on the thread that ran them
    cuda_runtime      a call that launches something, tied to it by ``correlation``
    kernel, gpu_memcpy, gpu_memset     on a stream of a GPU (``tid``), with ``correlation``
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from determined_ds.errors import ConfigError, Problem
from determined_ds.pipe.orders import ONE_F_ONE_B
from determined_ds.report.results import PROFILE_DIR

META = "determined_ds"  # top-level key of a trace
RANGE = "determined_ds."  # begins the names of our ranges
STEP = f"{RANGE}step"  # a whole training step, "#" and its index in the record after it
# Within it. Of data: waiting for the loader, and moving what it gave to the device. Not all collectives are marked, and
# those of the optimizer are in its range. Of a pipeline: exchange with a neighbouring stage, waiting for it included.
PHASES = ("data", "forward", "backward", "optimizer", "communication", "pipeline")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class CapturedStep(BaseModel, frozen=True):
    """A step by the loop's own clock: optimizer steps so far, this one included, and its seconds on the host."""

    batch: int
    seconds: float


class CaptureRecord(BaseModel, frozen=True):
    """What a rank says of its trace; keys of other versions are ignored."""

    rank: int
    ranks: int
    host: str = ""
    device: str = "cpu"
    device_name: str = ""  # of a GPU
    zero_stage: int | None = None
    pipe_parallel_size: int = 1
    pipe_schedule: str = ONE_F_ONE_B
    pipe_chunks: int = 1  # parts of the model that each stage holds
    pipe_stage: int = 0  # the rank's
    accumulation: int = 1
    global_batch_size: int = 0
    steps: tuple[CapturedStep, ...] = ()
    ds_config: dict[str, Any] | None = None
    flops: int | None = None  # of the model, that the rank does in a step; None where they were not counted
    peak_flops: float | None = None  # the most that it does in a second, measured
    # Shares of the machine's processors in the recorded steps: in use, and by this rank and its workers.
    machine_load: float | None = None
    own_load: float | None = None


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
    """A rank's trace: events by their begin, of equal ones the longest first; ``steps`` are the ranges of its steps."""

    record: CaptureRecord
    events: Sequence[Event]
    main_thread: int | str | None  # the one that trains; None where there is no step
    steps: Sequence[Event]


def trace_name(rank: int, *, for_tensorboard: bool = False) -> str:
    """The name of a rank's trace; ``for_tensorboard``: among the files that Determined uploads for TensorBoard."""
    # Source: ``tb_file_types`` in determined 0.38.1's ``tensorboard/util.py``.
    return f"rank{rank}{'.pt.trace' if for_tensorboard else ''}.json.gz"


def rank_of_trace(path: Path) -> int | None:
    """Whose trace a file is, by its name; None for any other file."""
    match = re.match(r"rank(\d+)[.#].*json(\.gz)?$", path.name)
    return None if match is None else int(match[1])


def traces_in(folder: Path) -> list[Path]:
    """The traces of a folder, one a rank, in their order; they may be gzipped or not.

    Args:
        folder: A run directory, its ``profile``, or a folder that traces were copied to.
    """
    inner = folder / PROFILE_DIR
    paths = sorted((inner if inner.is_dir() else folder).glob("rank*"), reverse=True)
    found = {rank: path for path in paths if (rank := rank_of_trace(path)) is not None}
    return [found[rank] for rank in sorted(found)]


def read_trace(path: Path) -> Trace:
    """Read a trace, gzipped or not; one that is damaged, or another program's, is refused."""
    try:
        content = path.read_bytes()
        found = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
        raw, record = found["traceEvents"], CaptureRecord.model_validate(found[META])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        message = f"is not a whole trace of a training of this library: {error or type(error).__name__}"
        fix = "give a run directory, or a folder of traces that `det-ds profile` or `fit.profile` has written"
        raise ConfigError(
            Problem(key="trace", value=str(path), message=message, fix=fix, code="trace")
        ) from error
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
    # Of a step that has begun again, the last range.
    ranges = {
        int(event.name.rpartition("#")[2]): event
        for event in events
        if event.category == "user_annotation" and event.name.startswith(f"{STEP}#")
    }
    steps = [ranges[index] for index in sorted(ranges) if index < len(record.steps)]
    main_thread = next((event.tid for event in ranges.values()), None)
    return Trace(record=record, events=events, main_thread=main_thread, steps=steps)
