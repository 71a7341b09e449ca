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
PIPELINE = "determined_ds.pipeline"  # exchange with a neighbouring stage, waiting for it included


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
    wait: int = 0  # steps before the warm-up of the profiler
    warmup: int = 0
    steps: tuple[CapturedStep, ...] = ()
    ds_config: dict[str, Any] | None = None
    flops: int | None = None  # of the model, that the rank does in a step; None where they were not counted
    peak_flops: float | None = None  # the most that it does in a second, measured
    # Shares of the time of all processors of the machine meanwhile: by all processes, and by the rank and its workers.
    machine_load: float | None = None
    own_load: float | None = None


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
