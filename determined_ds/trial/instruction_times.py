"""How long the stages of a pipeline work and wait, measured by the instructions of their schedule.

A stage works while it loads a micro-batch, runs it forward, or runs it backward. All else, from the start of a
batch's schedule to the end of its last micro-batch's last instruction, is waiting: for a neighbour, for the wire
(sending and receiving counts as waiting, however busy the network is), and for the host between two instructions. The
reduction of gradients and the optimizer's step follow, and are not counted: they are the same without a pipeline.

The share of waiting is the pipeline's bubble. ``pipe.timeline.counted_bubble`` is what a schedule has by itself, where
all stages take equally long and communication takes no time.

Source: ``PipelineEngine._exec_schedule`` and ``_INSTRUCTION_MAP`` in deepspeed 0.19.8's ``runtime/pipe/engine.py``.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, ONE_F_ONE_B, WEIGHT, Op, Pipeline
from determined_ds.pipe.recording import LOAD
from determined_ds.pipe.timeline import Span, counted_bubble
from determined_ds.trial.pipeline_engine import InputPass, WeightPass

WORK = {
    schedule.LoadMicroBatch: LOAD,
    schedule.ForwardPass: FORWARD,
    schedule.BackwardPass: BACKWARD,
    InputPass: INPUT,
    WeightPass: WEIGHT,
}
AFTER_MICRO_BATCHES = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
_ATTRIBUTE = "_instruction_times"


def time_instructions(engine: Any) -> None:
    """Have a pipeline time its instructions in training; does nothing with a single stage."""
    if engine.num_stages > 1:
        setattr(engine, _ATTRIBUTE, InstructionTimes(engine))


def pipeline_times(engines: Iterable[Any]) -> InstructionTimes | None:
    """The times of the first engine that is a pipeline, the same on every rank; None without one."""
    return next((vars(engine)[_ATTRIBUTE] for engine in engines if _ATTRIBUTE in vars(engine)), None)


def bubble(
    busy_s: Sequence[float], span_s: Sequence[float], pipelines: Sequence[Sequence[int]]
) -> float | None:
    """The share of the time that the stages of a pipeline wait.

    Args:
        busy_s: Of each rank, what :meth:`InstructionTimes.take` returned first.
        span_s: Of each rank, what it returned second.
        pipelines: The ranks of each replica.

    Returns:
        1 - mean busy / longest span, of the ranks of one replica; over replicas, the mean. None where no batch was
        trained.
    """
    longest = [max(span_s[rank] for rank in ranks) for ranks in pipelines]
    if not all(longest):
        return None
    busy = [sum(busy_s[rank] for rank in ranks) / len(ranks) for ranks in pipelines]
    return sum(1 - own / whole for own, whole in zip(busy, longest, strict=True)) / len(longest)


class InstructionTimes:
    """Times the training schedules of one stage; those of ``eval_batch`` are ignored.

    A mark of time is an event on the current CUDA stream, read in :meth:`take`; on a CPU, the machine's clock.

    Args:
        engine: A ``PipelineEngine``; its ``_exec_schedule`` and ``_INSTRUCTION_MAP`` are replaced.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._on_gpu = engine.device.type == "cuda"
        self._zero: tuple[Any, float] = None, 0.0  # a mark, and the machine's clock then
        self._work: list[tuple[str, int, Any, Any]] | None = (
            None  # of the batch that runs: kind, part, start, end
        )
        self._end: Any = None  # of its last micro-batch
        self._finished: deque[tuple[Any, Any, list[tuple[str, int, Any, Any]]]] = deque()  # start, end, work
        self._busy_s = self._span_s = 0.0
        self._recorded: list[list[Span]] | None = None
        instructions = engine._INSTRUCTION_MAP.items()
        engine._INSTRUCTION_MAP = {kind: self._timed(kind, run) for kind, run in instructions}
        engine._exec_schedule = self._exec_schedule

    def take(self) -> tuple[float, float]:
        """What this stage has spent since the last call; waits for the GPU.

        Returns:
            Seconds of work, and seconds from the start of each batch to the end of its last micro-batch.
        """
        self._read(wait=True)
        taken = self._busy_s, self._span_s
        self._busy_s = self._span_s = 0.0
        return taken

    def record(self) -> None:
        """Keep the passes of the batches from now on."""
        self._read(wait=True)
        if self._on_gpu:
            torch.cuda.synchronize()
            self._zero = self._now(), time.perf_counter()
        self._recorded = []

    def recorded(self) -> list[list[Span]]:
        """The passes of each batch since :meth:`record`, by this machine's clock; no more are kept.

        Those of a part and a kind run in the order of their micro-batches, whatever the schedule.
        """
        self._read(wait=True)
        found, self._recorded = self._recorded or [], None
        return found

    @property
    def stage(self) -> int:
        """Which of the pipeline's ranks this is."""
        return int(self._engine.stage_id)

    @property
    def ideal_bubble(self) -> float:
        """By the schedule, where all parts take equally long and messages no time."""
        return counted_bubble(self.pipeline)

    @property
    def pipeline(self) -> Pipeline:
        """What the ranks compute in which order."""
        micro_batches = self._engine.gradient_accumulation_steps()
        known = getattr(self._engine.module, "pipe", None)
        if isinstance(known, Pipeline):
            return replace(known, micro_batches=micro_batches)
        return Pipeline(schedule=ONE_F_ONE_B, ranks=self._engine.num_stages, micro_batches=micro_batches)

    @property
    def pipelines(self) -> list[list[int]]:
        """The ranks of each replica."""
        topology = self._engine.grid.topology()
        return [topology.get_axis_list("data", index) for index in range(topology.get_dim("data"))]

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        run = type(self._engine)._exec_schedule
        if not torch.is_grad_enabled():  # of an evaluation
            run(self._engine, pipe_schedule)
            return
        self._read()
        start, self._end, self._work = self._now(), None, []
        try:
            run(self._engine, pipe_schedule)
            self._finished.append((start, self._end or self._now(), self._work))
        finally:
            self._work = None

    def _timed(self, kind: type, instruction: Callable[..., None]) -> Callable[..., None]:
        def at_work(engine: Any, **kwargs: Any) -> None:
            start = None if self._work is None else self._now()
            instruction(engine, **kwargs)
            if self._work is not None:
                self._work.append((WORK[kind], kwargs.get("part", engine.stage_id), start, self._now()))

        def afterwards(engine: Any, **kwargs: Any) -> None:
            if self._work is not None and self._end is None:
                self._end = self._now()
            instruction(engine, **kwargs)

        if kind in WORK:
            return at_work
        return afterwards if issubclass(kind, AFTER_MICRO_BATCHES) else instruction

    def _read(self, wait: bool = False) -> None:
        """Add up the batches that the device has finished, so that few are kept; all of them, after a ``wait``."""
        if wait and self._on_gpu and self._finished:
            self._finished[-1][1].synchronize()
        while self._finished and (not self._on_gpu or self._finished[0][1].query()):
            begin, finish, work = self._finished.popleft()
            self._busy_s += sum(self._seconds(start, end) for _, _, start, end in work)
            self._span_s += self._seconds(begin, finish)
            if self._recorded is None:
                continue
            passes: Counter[tuple[str, int]] = Counter()
            zero, zero_s = self._zero if self._on_gpu else (0.0, 0.0)
            self._recorded.append([])
            for kind, part, *marks in work:
                start, end = (zero_s + self._seconds(zero, mark) for mark in marks)
                self._recorded[-1].append(Span(op=Op(kind, part, passes[kind, part]), start=start, end=end))
                passes[kind, part] += 1

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()  # CLOCK_MONOTONIC, which the processes of a machine share
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000 if self._on_gpu else end - start
