"""What a rank that is profiled leaves, and what its trace means: agreed by those who write it and those who read it.

A rank writes one trace in the Chrome trace format, as torch's profiler exports it, gzipped. Ranges of ours in it have
the names of :data:`MARKS`, on the thread that trains. Under :data:`META` the file holds a :class:`CaptureRecord` as
JSON, with the time of each step by the loop's own clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from determined_ds.pipe.orders import ONE_F_ONE_B

PROFILE_DIR = "profile"  # in a run directory
PROFILE_JSON = "profile.json"  # in it: what was read from the traces
PROFILE_PNG = "profile.png"
SCHEDULE_PNG = "schedule.png"  # of a pipeline, from pipeline_step.json of the run directory
META = "determined_ds"  # top-level key of a trace

PREFIX = "determined_ds."
STEP = (
    PREFIX + "step"
)  # and "#" and its index in the record: a whole training step; those below are within it
DATA = PREFIX + "data"  # waiting for the loader, and moving what it gave to the device
FORWARD = PREFIX + "forward"
BACKWARD = PREFIX + "backward"
OPTIMIZER = PREFIX + "optimizer"  # with the communication of the optimizer, which has events of its own
COMMUNICATION = PREFIX + "communication"  # a collective that is waited for; not all are marked
PIPELINE = PREFIX + "pipeline"  # sends to and receives from neighbouring stages, waiting for them included
MODULE = PREFIX + "module."  # and the qualified name of a module: its forward pass
MARKS = (STEP, DATA, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, PIPELINE)


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """A step by the loop's own clock.

    Args:
        batch: Optimizer steps since the start of training, this one included.
        seconds: From its start to its end, on the host.
    """

    batch: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CaptureRecord:
    """What a rank says of its trace.

    Args:
        rank: Whose trace it is.
        ranks: How many there are.
        host: The machine's name.
        device: ``cpu`` or ``cuda``.
        device_name: Of the GPU; empty on a CPU.
        zero_stage: Of the strategy; None where no ZeRO engine trains.
        pipe_parallel_size: Stages of the pipeline.
        pipe_schedule: What they compute in which order.
        pipe_chunks: Parts of the model that each of them holds.
        pipe_stage: Which of them the rank is.
        accumulation: Micro-batches of a rank in a step.
        global_batch_size: Samples in a step.
        wait: Steps that were trained before the warm-up.
        warmup: Steps that the profiler ran for without a record.
        steps: Those that are recorded.
        ds_config: What DeepSpeed was given.
        flops: Floating-point operations of the model that the rank does in a step; None where they were not counted.
        peak_flops: The most that it does in a second, measured.
    """

    rank: int
    ranks: int
    host: str = ""
    device: str = "cpu"
    device_name: str = ""
    zero_stage: int | None = None
    pipe_parallel_size: int = 1
    pipe_schedule: str = ONE_F_ONE_B
    pipe_chunks: int = 1
    pipe_stage: int = 0
    accumulation: int = 1
    global_batch_size: int = 0
    wait: int = 0
    warmup: int = 0
    steps: tuple[CapturedStep, ...] = ()
    ds_config: Mapping[str, Any] | None = None
    flops: int | None = None
    peak_flops: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For the trace."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> CaptureRecord:
        """From a trace; keys of later versions are left out."""
        known = {key: value for key, value in found.items() if key in cls.__dataclass_fields__}
        steps = tuple(CapturedStep(batch=s["batch"], seconds=s["seconds"]) for s in known.pop("steps", ()))
        return cls(**known, steps=steps)


def trace_name(rank: int, *, for_tensorboard: bool = False) -> str:
    """The name of a rank's trace in :data:`PROFILE_DIR`.

    Args:
        rank: Its number.
        for_tensorboard: Whether it must be among those that Determined uploads for TensorBoard.

    Source: ``tb_file_types`` in determined 0.38.1's ``tensorboard/util.py``.
    """
    return f"rank{rank}{'.pt.trace' if for_tensorboard else ''}.json.gz"


def traces_in(folder: Path) -> list[Path]:
    """The traces of a folder, one a rank, in their order; of a run directory, too. They may be gzipped or not.

    Args:
        folder: A run directory, its ``profile``, or a folder that traces were copied to.
    """
    inner = folder / PROFILE_DIR
    folder = inner if inner.is_dir() else folder
    found = [
        (rank, path.name, path) for path in folder.glob("rank*") if (rank := rank_of_trace(path)) is not None
    ]
    first = {rank: path for rank, _, path in sorted(found, reverse=True)}
    return [first[rank] for rank in sorted(first)]


def rank_of_trace(path: Path) -> int | None:
    """Whose trace a file is, by its name; None for any other file."""
    match = re.match(r"rank(\d+)[.#].*json(\.gz)?$", path.name)
    return None if match is None else int(match[1])
