"""How long the stages of a pipeline work and wait, measured by the instructions of their schedule.

A stage works while it loads a micro-batch, runs it forward, or runs it backward. All else, from the start of a
batch's schedule to the end of its last micro-batch, is waiting, its share the pipeline's bubble; sending and receiving
too. The reduction of gradients and the optimizer's step are not counted: they are the same without a pipeline.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

from determined_ds.pipe.orders import ONE_F_ONE_B, Op, Pipeline
from determined_ds.pipe.timeline import LOAD, Span
from determined_ds.trial.pipeline_engine import PASSES, ScheduledModule

WORK = {schedule.LoadMicroBatch: LOAD, **{instruction: kind for kind, instruction in PASSES.items()}}
ATTRIBUTE = "_instruction_times"  # of a pipeline's engine


def pipeline_times(engines: Iterable[Any]) -> InstructionTimes | None:
    """The times of the first engine that is a pipeline, the same on every rank; None without one."""
    return next((vars(engine)[ATTRIBUTE] for engine in engines if ATTRIBUTE in vars(engine)), None)


@dataclass
class _Batch:
    """Marks of time: a mark is an event on the current CUDA stream; on a CPU, the machine's clock."""

    start: Any
    work: list[tuple[Op, Any, Any]] = field(default_factory=list)  # start, end
    passes: Counter[tuple[str, int]] = field(default_factory=Counter)  # so far, of a kind through a part
    end: Any = None  # of the last micro-batch


class InstructionTimes:
    """Times the training schedules of one stage, by replacing methods of its ``PipelineEngine``."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.stage = engine, int(engine.stage_id)  # which of the pipeline's ranks this is
        topology = engine.grid.topology()
        replicas = range(topology.get_dim("data"))  # the ranks of each:
        self.pipelines: list[list[int]] = [topology.get_axis_list("data", index) for index in replicas]
        self._on_gpu = engine.device.type == "cuda"
        self._zero: tuple[Any, float] = 0.0, 0.0  # a mark, and the machine's clock then
        self._batch: _Batch | None = None  # that is trained now
        self._finished: deque[_Batch] = deque()
        self._busy_s = self._span_s = 0.0
        self._recorded: list[list[Span]] | None = None
        run = engine._INSTRUCTION_MAP
        timed = {
            kind: self._timed(kind, run[kind]) for kind in (*WORK, schedule.ReduceTiedGrads) if kind in run
        }
        engine._INSTRUCTION_MAP, engine._exec_schedule = {**run, **timed}, self._exec_schedule

    @property
    def pipeline(self) -> Pipeline:
        """What the ranks compute in which order."""
        module, micro_batches = self._engine.module, self._engine.gradient_accumulation_steps()
        if isinstance(module, ScheduledModule):
            return replace(module.pipe, micro_batches=micro_batches)
        return Pipeline(schedule=ONE_F_ONE_B, ranks=self._engine.num_stages, micro_batches=micro_batches)

    def take(self) -> tuple[float, float]:
        """Seconds of work, and from the start of each batch to its end, since the last call; waits for the GPU."""
        self._read(wait=True)
        taken = self._busy_s, self._span_s
        self._busy_s = self._span_s = 0.0
        return taken

    def bubble(self, busy_s: Sequence[float], span_s: Sequence[float]) -> float | None:
        """The share of the time that stages wait, by what :meth:`take` returned on each rank; None of no training."""
        shares = []
        for ranks in self.pipelines:
            if not (longest := max(span_s[rank] for rank in ranks)):
                return None
            shares.append(1 - sum(busy_s[rank] for rank in ranks) / len(ranks) / longest)
        return sum(shares) / len(shares)

    def record(self) -> None:
        """Keep the passes of the batches from now on."""
        self._read(wait=True)
        if self._on_gpu:
            torch.cuda.synchronize()
            self._zero = self._mark(), time.perf_counter()
        self._recorded = []

    def recorded(self) -> list[list[Span]]:
        """The passes of each batch since :meth:`record`, by this machine's clock; no more are kept."""
        self._read(wait=True)
        found, self._recorded = self._recorded or [], None
        return found

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        batch = None
        if torch.is_grad_enabled():  # else it evaluates
            self._read()
            self._batch = batch = _Batch(self._mark())
        type(self._engine)._exec_schedule(self._engine, pipe_schedule)
        self._batch = None
        if batch is not None:
            self._finished.append(batch)

    def _timed(self, kind: type, instruction: Callable[..., None]) -> Callable[..., None]:
        """An instruction, which notes its time; that of the first one after all micro-batches is the batch's end."""

        def run(engine: Any, **kwargs: Any) -> None:
            start = None if self._batch is None else self._mark()
            instruction(engine, **kwargs)
            if (batch := self._batch) is None:
                return
            if kind not in WORK:
                batch.end = start
                return
            passes = WORK[kind], kwargs.get("part", engine.stage_id)
            batch.work.append((Op(*passes, batch.passes[passes]), start, self._mark()))
            batch.passes[passes] += 1  # by micro-batch, whatever the schedule

        return run

    def _read(self, wait: bool = False) -> None:
        """Add up the batches that the device has finished, so that few are kept; all of them, after a ``wait``."""
        if wait and self._on_gpu and self._finished:
            self._finished[-1].end.synchronize()
        while self._finished and (not self._on_gpu or self._finished[0].end.query()):
            batch = self._finished.popleft()
            self._busy_s += sum(self._seconds(start, end) for _, start, end in batch.work)
            self._span_s += self._seconds(batch.start, batch.end)
            if self._recorded is not None:
                (zero, since), spans = self._zero, []
                for op, start, end in batch.work:
                    at = since + self._seconds(zero, start)
                    spans.append(Span(op=op, start=at, end=at + self._seconds(start, end)))
                self._recorded.append(spans)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()  # CLOCK_MONOTONIC, which the processes of a machine share
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self._on_gpu else end - start
