"""What a rank that is profiled leaves, and what its trace means: agreed by those who write it and those who read it.

A rank writes one trace in the Chrome trace format, as torch's profiler exports it, gzipped. Ranges of ours in it are on
the thread that trains. Under :data:`META` the file holds a :class:`CaptureRecord` as JSON.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from determined_ds.pipe.orders import ONE_F_ONE_B
from determined_ds.report.results import PROFILE_DIR

META = "determined_ds"  # top-level key of a trace
# Names of ranges: a whole training step, "#" and its index in the record after it; those below are within it.
STEP = "determined_ds.step"
DATA = "determined_ds.data"  # waiting for the loader, and moving what it gave to the device
FORWARD = "determined_ds.forward"
BACKWARD = "determined_ds.backward"
OPTIMIZER = "determined_ds.optimizer"  # with the communication of the optimizer, which has events of its own
COMMUNICATION = "determined_ds.communication"  # a collective that is waited for; not all are marked
PIPELINE = (
    "determined_ds.pipeline"  # sends to and receives from neighbouring stages, waiting for them included
)
MODULE = "determined_ds.module."  # and the qualified name of a module: its forward pass


class CapturedStep(BaseModel, frozen=True):
    """A step by the loop's own clock.

    Args:
        batch: Optimizer steps since the start of training, this one included.
        seconds: From its start to its end, on the host.
    """

    batch: int
    seconds: float


class Load(BaseModel, frozen=True):
    """How busy a rank's machine was while steps were recorded, as shares of all its processors' time.

    Args:
        machine: By all processes.
        own: By the rank and its workers.
    """

    machine: float
    own: float


class CaptureRecord(BaseModel, frozen=True):
    """What a rank says of its trace; keys of later versions are ignored.

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
        load: Of the processors meanwhile; None where it was not measured.
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
    ds_config: dict[str, Any] | None = None
    flops: int | None = None
    peak_flops: float | None = None
    load: Load | None = None


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
    folder = inner if inner.is_dir() else folder
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("rank*")):
        if (rank := rank_of_trace(path)) is not None:
            found.setdefault(rank, path)
    return [found[rank] for rank in sorted(found)]
