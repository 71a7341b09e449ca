"""Some steps of a training, recorded by torch's profiler: one trace a rank.

Until the warm-up begins nothing but a count is kept, and after the last step nothing at all. Between them the ranges of
:mod:`~determined_ds.profile.marks` say what a step is at, and the loop's own clock how long it took.
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
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from determined_ds.config.params import ProfiledSteps
from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.units import GIB, MIB
from determined_ds.profile.marks import marked
from determined_ds.profile.mfu import FlopCount, peak_flops
from determined_ds.profile.record import DATA, META, STEP, CapturedStep, CaptureRecord, Load, trace_name
from determined_ds.rundir.run_dir import PARTIAL_FILE, short

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
        kept_in: Where people find the trace once Determined has uploaded it with the files for TensorBoard, of which
            ``folder`` is one; "" where it stays in the folder.
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
        kept_in: str = "",
    ) -> None:
        self._steps = steps
        self._path = folder / trace_name(record.rank, for_tensorboard=bool(kept_in))
        self._kept_in = kept_in or short(folder)
        # On a cluster a file that vanishes among those to upload fails the upload of any rank of the machine.
        self._unfinished = folder.parents[1] if kept_in else folder
        self._record = record.model_copy(update={"wait": steps.wait, "warmup": steps.warmup})
        self._device = device
        self._marks = marks
        self._flops = flops
        self._note = note
        self._counting, self._undo = contextlib.ExitStack(), contextlib.ExitStack()
        self._begun = self._memory_before = 0
        self._profiler: Any = None
        self._range: Any = None  # of the step that is recorded now
        self._started = 0.0
        self._seconds: float | None = None  # of the step at hand, once its work is done
        self._taken: list[CapturedStep] = []
        self._busy_before = (0.0, 0.0, 0.0)
        self._is_over = False

    def begin_step(self) -> None:
        """A step begins."""
        if self._is_over:
            return
        untouched, recorded_from = self._steps.wait, self._steps.wait + self._steps.warmup
        if self._begun == untouched:
            self._start()
        if self._begun == recorded_from:
            self._undo.enter_context(self._marks())
            self._memory_before, self._busy_before = psutil.Process().memory_info().rss, _processor_seconds()
            self._synchronize()  # what earlier steps have left to a GPU is theirs
        self._begun += 1
        if self._begun == recorded_from > 1 and self._flops is not None:
            self._counting.enter_context(self._flops)
        if self._begun > recorded_from:
            self._open()

    def stop(self) -> None:
        """The work of the step is done: what comes before :meth:`end_step` does not belong to it."""
        self._counting.close()
        if self._range is not None:
            if self._begun == self._steps.total:
                self._synchronize()  # what the last one has left to a GPU belongs to it
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
            if self._begun == self._steps.total or self._is_too_much():
                self._finish()
                return
        self._profiler.step()

    def close(self) -> None:
        """Training is over: write what is recorded of whole steps, if anything is."""
        self._counting.close()
        if self._profiler is None or self._is_over:
            return
        if self._range is not None:
            self._close()
        if self._taken:
            self._finish()
            return
        self._is_over = True
        self._undo.close()
        self._profiler.stop()
        self._note("profile     nothing was recorded: training has ended before")

    def data(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Micro-batches, with a range around waiting for each."""
        while True:
            with self.range(DATA):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def range(self, mark: str) -> contextlib.AbstractContextManager[Any]:
        """A range in a step that is recorded; nothing in any other."""
        return record_function(mark) if self._range is not None else contextlib.nullcontext()

    def _open(self) -> None:
        self._range = record_function(f"{STEP}#{len(self._taken)}")
        self._range.__enter__()
        self._started = time.perf_counter()

    def _close(self) -> None:
        self._range.__exit__(None, None, None)
        self._range = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would name each start and end, and a missing GPU
        phases = schedule(wait=0, warmup=self._steps.warmup, active=self._steps.active, repeat=1)
        self._profiler = profile(activities=activities, schedule=phases)
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
        flops = self._flops.model if self._flops is not None else 0
        whole, machine, own = (
            max(0.0, now - before)
            for now, before in zip(_processor_seconds(), self._busy_before, strict=True)
        )
        load = Load(machine=machine / whole, own=own / whole) if whole else None
        measured = {"steps": tuple(self._taken), "flops": flops or None, "load": load}
        record = self._record.model_copy(update=measured)
        # Before the end: torch gives what is added later to the next trace.
        self._profiler.add_metadata_json(META, json.dumps(record.model_dump(), default=str))
        self._profiler.stop()
        try:
            self._write()
        except OSError as error:
            logger.warning("warning: profile: the trace cannot be written: %s", error.strerror or error)
        else:
            size = self._path.stat().st_size / MIB
            self._note(f"profile     {len(self._taken)} steps, {size:.1f} MiB a rank, in {self._kept_in}")
        self._profiler = None

    def _write(self) -> None:
        """Write the trace gzipped, whole or not at all."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=self._unfinished))
        plain, partial = folder / "plain.json", folder / PARTIAL_FILE
        try:
            self._profiler.export_chrome_trace(os.fspath(plain))
            with open(plain, "rb") as source, gzip.open(partial, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            partial.replace(self._path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _processor_seconds() -> tuple[float, float, float]:
    """Seconds of this machine's processors so far: in all, those in use, and those of this process and its workers."""
    times, this = psutil.cpu_times(), psutil.Process()
    idle = times.idle + getattr(times, "iowait", 0.0)
    own = 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            used = process.cpu_times()
            own += used.user + used.system
    return sum(times[:8]), sum(times[:8]) - idle, own


def capture_of(
    steps: ProfiledSteps, context: Any, *, folder: Path, note: Callable[[str], None], kept_in: str = ""
) -> Capture:
    """What records the steps of a trial or of a session.

    Args:
        steps: Which ones.
        context: Its context, with the engines.
        folder: As of :class:`Capture`.
        note: The same.
        kept_in: The same.

    Raises:
        ConfigError: the trial has set a profiler of its own, and a process has one at a time.
    """
    if context.profiler is not None:
        message = "the trial calls context.set_profiler: one profiler at a time can run in a process"
        fix = "leave one of them out"
        raise ConfigError(
            Problem(key="hyperparameters.fit.profile", message=message, fix=fix, code="profile")
        )
    engines, resolved, device = context.models, context.resolved, context.device
    record = CaptureRecord(
        rank=context.distributed.rank,
        ranks=context.distributed.size,
        host=socket.gethostname(),
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
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
    return Capture(
        steps,
        folder=folder,
        kept_in=kept_in,
        record=record,
        device=device,
        marks=lambda: marked(engines, mover=context._mover),
        flops=None if is_compiled else FlopCount(lambda: any(engine.module.training for engine in engines)),
        note=note,
    )
