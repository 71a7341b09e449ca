"""Some steps of a training, recorded by torch's profiler: one trace a rank.

Until the warm-up begins nothing but a count is kept, and after the last step nothing at all. Between them ranges of
ours say what the host is at, put around methods of DeepSpeed's engines and of torch; the loop's own clock says how long
a step took.

Source: ``DeepSpeedEngine`` in deepspeed 0.19.8's ``runtime/engine.py``, ``PipelineEngine._INSTRUCTION_MAP`` in
``runtime/pipe/engine.py``; ``Tensor.backward`` in torch 2.13's ``_tensor.py``, which calls ``torch.autograd.backward``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule as pipe
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from determined_ds.config.params import ProfiledSteps
from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.units import MIB
from determined_ds.profile.mfu import FlopCount, peak_flops
from determined_ds.profile.record import META, RANGE, STEP, CapturedStep, CaptureRecord, trace_name
from determined_ds.rundir.run_dir import PARTIAL_FILE, short
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.pipeline_engine import AwaitMessage, InputPass, WeightPass

logger = logging.getLogger("determined_ds")
METHODS = {"forward": "forward", "backward": "backward", "step": "optimizer"}
INSTRUCTIONS = {
    pipe.LoadMicroBatch: "data",
    pipe.ForwardPass: "forward",
    pipe.OptimizerStep: "optimizer",
    **dict.fromkeys((pipe.BackwardPass, InputPass, WeightPass), "backward"),
    **dict.fromkeys((pipe.ReduceGrads, pipe.ReduceTiedGrads), "communication"),
    **dict.fromkeys((pipe.SendActivation, pipe.RecvActivation, pipe.SendGrad, pipe.RecvGrad), "pipeline"),
    AwaitMessage: "pipeline",
}


@contextlib.contextmanager
def marked(context: Any) -> Iterator[None]:
    """Put the ranges of :mod:`~determined_ds.profile.record` around what is called in this block.

    Args:
        context: Of the engines that train; pipelines' instructions are marked.
    """

    def within(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            with record_function(RANGE + phase):
                return function(*args, **kwargs)

        return ranged

    replaced = [
        (kind, name, phase) for kind in (DeepSpeedEngine, DDPEngine) for name, phase in METHODS.items()
    ]
    replaced += [(torch.autograd, "backward", "backward"), (context, "to_device", "data")]
    with contextlib.ExitStack() as stack:
        for engine in context.models:
            if not isinstance(engine, PipelineEngine):
                continue
            if engine.num_stages > 1:  # the loss of a batch is known once the last stage is done
                replaced.append((engine, "_aggregate_total_loss", "pipeline"))
            carried_out = {
                kind: within(run, INSTRUCTIONS[kind]) if kind in INSTRUCTIONS else run
                for kind, run in engine._INSTRUCTION_MAP.items()
            }
            stack.enter_context(mock.patch.object(engine, "_INSTRUCTION_MAP", carried_out))
        for owner, name, phase in replaced:
            stack.enter_context(mock.patch.object(owner, name, within(getattr(owner, name), phase)))
        yield


class Capture:
    """Records the steps that :class:`ProfiledSteps` names; call :meth:`begin_step` and :meth:`end_step` for all.

    Args:
        steps: Which ones.
        context: Of the trial or the session, with its engines.
        folder: Where the trace goes.
        note: Shows a line.
        kept_in: Where people find the trace once Determined has uploaded it with the files for TensorBoard, of which
            ``folder`` is one; "" where it stays in the folder.

    Raises:
        ConfigError: the trial has set a profiler of its own, and a process has one at a time.
    """

    def __init__(
        self,
        steps: ProfiledSteps,
        context: Any,
        *,
        folder: Path,
        note: Callable[[str], None],
        kept_in: str = "",
    ) -> None:
        if context.profiler is not None:
            message = "the trial calls context.set_profiler: one profiler at a time can run in a process"
            problem = {"key": "hyperparameters.fit.profile", "fix": "leave one of them out"}
            raise ConfigError(Problem(message=message, code="profile", **problem))
        engines, resolved, device = context.models, context.resolved, context.device
        self._context, self._peak_flops = context, peak_flops(device, resolved.strategy.precision)
        self._steps, self._device, self._note = steps, device, note
        self._path = folder / trace_name(context.distributed.rank, for_tensorboard=bool(kept_in))
        self._kept_in = kept_in or short(folder)
        # On a cluster a file that vanishes among those to upload fails the upload of any rank of the machine.
        self._unfinished = folder.parents[1] if kept_in else folder
        self._flops = FlopCount(lambda: any(engine.module.training for engine in engines))
        self._can_count = not (resolved.torch_compile or resolved.strategy.deepcompile)
        self._counting, self._undo = contextlib.ExitStack(), contextlib.ExitStack()
        self._begun = 0
        self._profiler: Any = None
        self._range: Any = None  # of the step that is recorded now
        self._started = 0.0
        self._seconds: float | None = None  # of the step at hand, once its work is done
        self._taken: list[CapturedStep] = []
        self._processors = (0.0, 0.0, 0.0)
        self._is_over = False

    def begin_step(self) -> None:
        """A step begins."""
        if self._is_over:
            return
        recorded_from = self._steps.wait + self._steps.warmup
        if self._begun == self._steps.wait:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would name each start and end
            phases = schedule(wait=0, warmup=self._steps.warmup, active=self._steps.active, repeat=1)
            self._profiler = profile(activities=activities, schedule=phases)
            self._profiler.start()
        if self._begun == recorded_from:
            self._undo.enter_context(marked(self._context))
            self._synchronize()  # what earlier steps have left to a GPU is theirs
            self._processors = _processor_seconds()
        self._begun += 1
        if self._can_count and self._begun == recorded_from > 1:  # in a step that is not recorded
            self._counting.enter_context(self._flops)
        if self._begun > recorded_from:
            self._range = record_function(f"{STEP}#{len(self._taken)}")
            self._range.__enter__()
            self._started = time.perf_counter()

    def stop(self) -> None:
        """The work of the step is done: what comes before :meth:`end_step` does not belong to it."""
        self._counting.close()
        if self._range is not None:
            if self._begun == self._steps.total:
                self._synchronize()  # what the last one has left to a GPU belongs to it
            self._seconds = time.perf_counter() - self._started
            self._range.__exit__(None, None, None)
            self._range = None

    def end_step(self, batch: int) -> None:
        """A step has ended.

        Args:
            batch: Optimizer steps since the start of training, this one included.
        """
        self.stop()
        if self._is_over or self._profiler is None:
            return
        if self._seconds is not None:
            self._taken.append(CapturedStep(batch=batch, seconds=self._seconds))
            self._seconds = None
        if self._begun == self._steps.total:
            self.close()
        else:
            self._profiler.step()

    def data(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Micro-batches, with a range around waiting for each."""
        while True:
            with contextlib.nullcontext() if self._range is None else record_function(f"{RANGE}data"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def close(self) -> None:
        """All steps are recorded, or training is over: write the trace of whole steps, gzipped, whole or not at all."""
        self.stop()
        if self._profiler is None or self._is_over:
            return
        self._is_over = True
        self._undo.close()
        if not self._taken:
            self._profiler.stop()
            self._note("profile     nothing was recorded: training has ended before")
            return
        pairs = zip(_processor_seconds(), self._processors, strict=True)
        whole, machine, own = (max(1e-9, now - before) for now, before in pairs)
        context, resolved, device = self._context, self._context.resolved, self._device
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
            pipe_stage=getattr(context.models[0], "stage_id", 0),
            accumulation=resolved.batch.accumulation,
            global_batch_size=resolved.batch.global_batch_size,
            ds_config=resolved.ds_config,
            steps=tuple(self._taken),
            flops=self._flops.model or None,
            peak_flops=self._peak_flops,
            machine_load=machine / whole,
            own_load=own / whole,
        )
        # Before the end: torch gives what is added later to the next trace.
        self._profiler.add_metadata_json(META, json.dumps(record.model_dump(), default=str))
        self._profiler.stop()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._unfinished) as folder:
                partial = Path(folder) / f"{PARTIAL_FILE}.gz"  # which torch compresses
                self._profiler.export_chrome_trace(os.fspath(partial))
                partial.replace(self._path)
        except OSError as error:
            logger.warning("warning: profile: the trace cannot be written: %s", error.strerror or error)
        else:
            size = self._path.stat().st_size / MIB
            self._note(f"profile     {len(self._taken)} steps, {size:.1f} MiB a rank, in {self._kept_in}")
        self._profiler = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _processor_seconds() -> tuple[float, float, float]:
    """Seconds of this machine's processors so far: in all, those in use, and those of this process and its workers."""
    times, this, own = psutil.cpu_times(), psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            own += sum(process.cpu_times()[:2])
    whole = sum(times[:8])
    return whole, whole - times.idle - getattr(times, "iowait", 0.0), own
