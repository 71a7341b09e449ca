"""How long the stages of a pipeline work and wait, measured by the instructions of their schedule.

A stage works while it loads a micro-batch, runs it forward, or runs it backward. All else, from the start of a
batch's schedule to the end of its last micro-batch, is waiting, its share the pipeline's bubble: for a neighbour, for
the wire (sending and receiving counts as waiting), and for the host between two instructions. The reduction of
gradients and the optimizer's step are not counted: they are the same without a pipeline.

Source: ``PipelineEngine._exec_schedule`` and ``_INSTRUCTION_MAP`` in deepspeed 0.19.8's ``runtime/pipe/engine.py``.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.pipe import schedule

from determined_ds.pipe.orders import ONE_F_ONE_B, Op, Pipeline
from determined_ds.pipe.timeline import LOAD, Span
from determined_ds.trial.pipeline_engine import PASSES

WORK = {schedule.LoadMicroBatch: LOAD, **{instruction: kind for kind, instruction in PASSES.items()}}
AFTER_MICRO_BATCHES = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
ATTRIBUTE = "_instruction_times"  # of a pipeline's engine


def pipeline_times(engines: Iterable[Any]) -> InstructionTimes | None:
    """The times of the first engine that is a pipeline, the same on every rank; None without one."""
    return next((vars(engine)[ATTRIBUTE] for engine in engines if ATTRIBUTE in vars(engine)), None)


class _Batch(NamedTuple):
    start: Any
    work: list[tuple[str, int, Any, Any]]  # kind, part, start, end
    end: list[Any]  # of the last micro-batch, once it is there


class InstructionTimes:
    """Times the training schedules of one stage; those of ``eval_batch`` are ignored.

    A mark of time is an event on the current CUDA stream, read in :meth:`take`; on a CPU, the machine's clock.

    Args:
        engine: A ``PipelineEngine``; its ``_exec_schedule`` and ``_INSTRUCTION_MAP`` are replaced.

    Attributes:
        stage: Which of the pipeline's ranks this is.
        pipelines: The ranks of each replica.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.stage = int(engine.stage_id)
        topology = engine.grid.topology()
        replicas = range(topology.get_dim("data"))
        self.pipelines: list[list[int]] = [topology.get_axis_list("data", index) for index in replicas]
        self._on_gpu = engine.device.type == "cuda"
        self._zero: tuple[Any, float] = 0.0, 0.0  # a mark, and the machine's clock then
        self._now_runs: _Batch | None = None
        self._finished: deque[_Batch] = deque()
        self._busy_s = self._span_s = 0.0
        self._recorded: list[list[Span]] | None = None
        instructions = engine._INSTRUCTION_MAP.items()
        engine._INSTRUCTION_MAP = {kind: self._timed(kind, run) for kind, run in instructions}
        engine._exec_schedule = self._exec_schedule

    def take(self) -> tuple[float, float]:
        """Seconds of work, and from the start of each batch to its end, since the last call; waits for the GPU."""
        self._read(wait=True)
        taken = self._busy_s, self._span_s
        self._busy_s = self._span_s = 0.0
        return taken

    def bubble(self, busy_s: Sequence[float], span_s: Sequence[float]) -> float | None:
        """The share of the time that stages wait, the mean over replicas; None where none was trained.

        Args:
            busy_s: Of each rank, what :meth:`take` returned first.
            span_s: Of each rank, what it returned second.
        """
        shares = []
        for ranks in self.pipelines:
            longest = max(span_s[rank] for rank in ranks)
            if not longest:
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

    @property
    def pipeline(self) -> Pipeline:
        """What the ranks compute in which order."""
        own = Pipeline(schedule=ONE_F_ONE_B, ranks=self._engine.num_stages, micro_batches=1)
        known = getattr(self._engine.module, "pipe", None)
        found = known if isinstance(known, Pipeline) else own
        return replace(found, micro_batches=self._engine.gradient_accumulation_steps())

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        run = type(self._engine)._exec_schedule
        if not torch.is_grad_enabled():  # of an evaluation
            run(self._engine, pipe_schedule)
            return
        self._read()
        self._now_runs = batch = _Batch(self._mark(), [], [])
        try:
            run(self._engine, pipe_schedule)
            batch.end.append(self._mark())  # unless an instruction that comes after has marked it
            self._finished.append(batch)
        finally:
            self._now_runs = None

    def _timed(self, kind: type, instruction: Callable[..., None]) -> Callable[..., None]:
        is_after = issubclass(kind, AFTER_MICRO_BATCHES)
        if kind not in WORK and not is_after:
            return instruction

        def run(engine: Any, **kwargs: Any) -> None:
            if (batch := self._now_runs) is None:
                instruction(engine, **kwargs)
                return
            start = self._mark()
            if is_after:
                batch.end.append(start)
            instruction(engine, **kwargs)
            if not is_after:
                batch.work.append((WORK[kind], kwargs.get("part", engine.stage_id), start, self._mark()))

        return run

    def _read(self, wait: bool = False) -> None:
        """Add up the batches that the device has finished, so that few are kept; all of them, after a ``wait``."""
        if wait and self._on_gpu and self._finished:
            self._finished[-1].end[0].synchronize()
        while self._finished and (not self._on_gpu or self._finished[0].end[0].query()):
            batch = self._finished.popleft()
            self._busy_s += sum(self._seconds(start, end) for _, _, start, end in batch.work)
            self._span_s += self._seconds(batch.start, batch.end[0])
            if self._recorded is None:
                continue
            passes: Counter[tuple[str, int]] = Counter()  # by micro-batch, whatever the schedule
            zero, zero_s = self._zero
            self._recorded.append([])
            for kind, part, *marks in batch.work:
                start, end = (zero_s + self._seconds(zero, mark) for mark in marks)
                self._recorded[-1].append(Span(op=Op(kind, part, passes[kind, part]), start=start, end=end))
                passes[kind, part] += 1

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()  # CLOCK_MONOTONIC, which the processes of a machine share
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self._on_gpu else end - start
