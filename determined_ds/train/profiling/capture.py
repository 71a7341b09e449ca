"""Some steps of a training, recorded by torch's profiler: one trace a rank.

Until the warm-up begins nothing but a count is kept, and after the last step nothing at all. Between them the ranges of
:mod:`~determined_ds.train.profiling.marks` say what a step is at, and the loop's own clock how long it took.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from determined import core
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from determined_ds.config.params import ProfiledSteps
from determined_ds.errors import ConfigError, Problem
from determined_ds.logs.tensorboard import uploaded_to
from determined_ds.memory.units import GIB, MIB
from determined_ds.rundir.profile_files import (
    DATA,
    META,
    PROFILE_DIR,
    STEP,
    CapturedStep,
    CaptureRecord,
    trace_name,
)
from determined_ds.rundir.run_dir import PARTIAL_FILE, short
from determined_ds.train.profiling.flops import FlopCount
from determined_ds.train.profiling.marks import marked
from determined_ds.train.profiling.peak_flops import peak_flops
from determined_ds.train.scripts.given_run import cluster_info

logger = logging.getLogger("determined_ds")
# What a record may add to this process's memory before it is ended early. A trace takes a tenth of it on a disk.
MOST_BYTES = 4 * GIB


class Capture:
    """Records the steps that :class:`ProfiledSteps` names; call :meth:`begin_step` and :meth:`end_step` for all.

    Args:
        steps: Which ones.
        folder: Where the trace goes.
        record: What is known of the run.
        device: Where the rank computes.
        marks: Makes the context in which the ranges of a step are there.
        flops: Counts the operations of a step that is not recorded, the second of the process or a later one.
        note: Shows a line.
        for_tensorboard: Whether the trace has a name by which files for TensorBoard are uploaded.
        kept_in: Where people find the trace; "" for the folder.
    """

    def __init__(
        self,
        steps: ProfiledSteps,
        *,
        folder: Path,
        record: CaptureRecord,
        device: torch.device,
        marks: Callable[[], contextlib.AbstractContextManager[None]],
        flops: FlopCount | None,
        note: Callable[[str], None],
        for_tensorboard: bool = False,
        kept_in: str = "",
    ) -> None:
        self._steps = steps
        self._path = folder / trace_name(record.rank, for_tensorboard=for_tensorboard)
        self._kept_in = kept_in or short(folder)
        # On a cluster a file that vanishes among those to upload fails the upload of any rank of the machine.
        self._unfinished = folder.parents[1] if for_tensorboard else folder
        self._record = replace(record, wait=steps.wait, warmup=steps.warmup)
        self._device = device
        self._marks = marks
        self._flops = flops
        self._counting = contextlib.ExitStack()
        self._note = note
        self._begun = 0
        self._profiler: Any = None
        self._range: Any = None
        self._started = 0.0
        self._seconds: float | None = None  # of the step at hand, once its work is done
        self._taken: list[CapturedStep] = []
        self._undo = contextlib.ExitStack()
        self._memory_before = 0
        self._is_over = False

    @property
    def is_recording(self) -> bool:
        """Whether a step that is recorded has begun."""
        return self._range is not None

    # ------------------------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """A step begins."""
        if self._is_over:
            return
        steps = self._steps
        if self._begun == steps.wait:
            self._start()
        if self._begun == steps.wait + steps.warmup:
            self._undo.enter_context(self._marks())
            self._memory_before = psutil.Process().memory_info().rss
            self._synchronize()  # what earlier steps have left to a GPU is theirs
        self._begun += 1
        if self._begun == steps.wait + steps.warmup > 1 and self._flops is not None:
            self._counting.enter_context(self._flops)
        if self._begun > steps.wait + steps.warmup:
            self._open()

    def begin_again(self) -> None:
        """What was done since the step has begun does not belong to it."""
        if self.is_recording:
            self._close()
            self._open()

    def stop(self) -> None:
        """The work of the step is done: what comes before :meth:`end_step` does not belong to it."""
        self._counting.close()
        if self.is_recording:
            if self._is_last:
                self._synchronize()  # what it has left to a GPU belongs to it
            self._seconds = time.perf_counter() - self._started
            self._close()

    def end_step(self, batch: int) -> None:
        """A step has ended.

        Args:
            batch: Optimizer steps since the start of training, this one included.
        """
        self._counting.close()
        if self._is_over or self._profiler is None:
            return
        self.stop()
        if self._seconds is not None:
            self._taken.append(CapturedStep(batch=batch, seconds=self._seconds))
            self._seconds = None
            if self._is_last or self._is_too_much():
                self._finish()
                return
        self._profiler.step()

    @property
    def _is_last(self) -> bool:
        return self._begun == self._steps.total

    def data(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Micro-batches, with a range around waiting for each."""
        return MarkedBatches(self, batches)

    def range(self, mark: str) -> contextlib.AbstractContextManager[Any]:
        """A range in a step that is recorded; nothing in any other."""
        return record_function(mark) if self.is_recording else contextlib.nullcontext()

    def _open(self) -> None:
        # With its number: one that has begun again is there twice.
        self._range = record_function(f"{STEP}#{len(self._taken)}")
        self._range.__enter__()
        self._started = time.perf_counter()

    def _close(self) -> None:
        self._range.__exit__(None, None, None)
        self._range = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ------------------------------------------------------------------------------------ the profiler

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        steps = self._steps
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would name each start and end, and a missing GPU
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=steps.warmup, active=steps.active, repeat=1),
        )
        self._profiler.start()

    def _is_too_much(self) -> bool:
        """Whether what is recorded takes more memory than it may."""
        grown = psutil.Process().memory_info().rss - self._memory_before
        if grown <= MOST_BYTES:
            return False
        of = f"{len(self._taken)} of {self._steps.active} steps"
        logger.warning(
            "warning: profile: ended after %s: the record takes %.1f GiB of memory. Record fewer steps (active).",
            *(of, grown / GIB),
        )
        return True

    def _finish(self) -> None:
        """Write the trace."""
        self._is_over = True
        self._undo.close()
        flops = self._flops.so_far.model if self._flops is not None else 0
        record = replace(self._record, steps=tuple(self._taken), flops=flops or None)
        # Before the end: torch gives what is added later to the next trace.
        self._profiler.add_metadata_json(META, json.dumps(record.as_json(), default=str))
        self._profiler.stop()
        try:
            write_trace(self._profiler, self._path, self._unfinished)
        except OSError as error:
            logger.warning("warning: profile: the trace cannot be written: %s", error.strerror or error)
        else:
            size = self._path.stat().st_size / MIB
            self._note(f"profile     {len(self._taken)} steps, {size:.1f} MiB a rank, in {self._kept_in}")
        self._profiler = None

    def close(self) -> None:
        """Training is over: write what is recorded of whole steps, if anything is."""
        self._counting.close()
        if self._profiler is None or self._is_over:
            return
        if self.is_recording:
            self._close()
        if self._taken:
            self._finish()
            return
        self._is_over = True
        self._undo.close()
        self._profiler.stop()
        self._note("profile     nothing was recorded: training has ended before")


class MarkedBatches:
    """Micro-batches, with a range around waiting for each.

    Args:
        capture: Whether a step is recorded.
        batches: Those of the rank.
    """

    def __init__(self, capture: Capture, batches: Iterator[Any]) -> None:
        self._capture = capture
        self._batches = batches

    def __iter__(self) -> MarkedBatches:
        return self

    def __next__(self) -> Any:
        with self._capture.range(DATA):
            return next(self._batches)


def write_trace(profiler: Any, path: Path, unfinished: Path) -> None:
    """Write a trace, whole or not at all.

    Args:
        profiler: Torch's, stopped.
        path: Of the file, which is gzipped.
        unfinished: A folder for what vanishes, on the same disk.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=unfinished))
    plain, partial = folder / "plain.json", folder / PARTIAL_FILE
    try:
        profiler.export_chrome_trace(os.fspath(plain))
        with open(plain, "rb") as source, gzip.open(partial, "wb", compresslevel=3) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        partial.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def capture_of(steps: ProfiledSteps, context: Any, *, note: Callable[[str], None]) -> Capture:
    """What records the steps of a trial or of a session.

    Args:
        steps: Which ones.
        context: Its context, with the engines.
        note: Shows a line.

    Raises:
        ConfigError: the trial has set a profiler of its own, and a process has one at a time.
    """
    if context.profiler is not None:
        message = "the trial calls context.set_profiler: one profiler at a time can run in a process"
        fix = "leave one of them out"
        raise ConfigError(
            Problem(key="hyperparameters.fit.profile", message=message, fix=fix, code="profile")
        )
    engines = context.models
    resolved, device, distributed = context.resolved, context.device, context.distributed
    is_cuda = device.type == "cuda"
    record = CaptureRecord(
        rank=distributed.rank,
        ranks=distributed.size,
        host=socket.gethostname(),
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if is_cuda else "",
        zero_stage=resolved.zero_stage,
        pipe_parallel_size=resolved.topology.pipe_parallel_size,
        pipe_schedule=resolved.strategy.pipe_schedule,
        pipe_chunks=resolved.strategy.pipe_chunks,
        pipe_stage=getattr(engines[0], "stage_id", 0),
        accumulation=resolved.batch.accumulation,
        global_batch_size=resolved.batch.global_batch_size,
        ds_config=resolved.ds_config,
        peak_flops=peak_flops(device, resolved.strategy.precision),
    )
    is_compiled = resolved.torch_compile or resolved.strategy.deepcompile
    is_here = isinstance(context._core.train, core.DummyTrainContext)
    return Capture(
        steps,
        folder=folder_of_traces(context._core, context._run_dir.path if is_here else None),
        for_tensorboard=not is_here,
        kept_in="" if is_here else kept_in(),
        record=record,
        device=device,
        marks=lambda: marked(engines, mover=context._mover),
        flops=None if is_compiled else FlopCount(lambda: any(engine.module.training for engine in engines)),
        note=note,
    )


def folder_of_traces(core_context: core.Context, run_dir: Path | None) -> Path:
    """Where traces go.

    Args:
        core_context: Determined's.
        run_dir: The run directory; None on a cluster: beside the files for TensorBoard, which are uploaded.
    """
    return Path(core_context.train.get_tensorboard_path() if run_dir is None else run_dir) / PROFILE_DIR


def kept_in() -> str:
    """Where the traces of a trial on a cluster are found, once they are uploaded."""
    return f"{uploaded_to(cluster_info())}/{PROFILE_DIR}"
