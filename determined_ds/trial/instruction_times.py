"""How long the stages of a pipeline work and wait, measured by the instructions of their schedule.

A stage works while it loads a micro-batch, runs it forward, or runs it backward. All else, from the start of a
batch's schedule to the end of its last micro-batch's last instruction, is waiting: for a neighbour, for the wire
(sending and receiving activations and gradients counts as waiting, however busy the network is), and for the host
between two instructions. What follows the micro-batches is not counted, since it is the same without a pipeline: the
reduction of gradients and the optimizer's step.

While :meth:`InstructionTimes.record` is on, the passes of each batch are kept: what ran when.

The share of waiting is the pipeline's bubble. ``pipe.timeline.counted_bubble`` is what a schedule has by itself, where
all stages take equally long and communication takes no time.

Source: ``PipelineEngine._exec_schedule`` and ``_INSTRUCTION_MAP`` in deepspeed 0.19.8's ``runtime/pipe/engine.py``.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, ONE_F_ONE_B, WEIGHT, Op, Pipeline
from determined_ds.pipe.recording import LOAD
from determined_ds.pipe.timeline import Span, counted_bubble
from determined_ds.trial.ordered_schedule import InputPass, WeightPass

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
    """Have a pipeline time its instructions in training; does nothing the second time, or with a single stage."""
    if engine.num_stages > 1 and instruction_times(engine) is None:
        setattr(engine, _ATTRIBUTE, InstructionTimes(engine))


def instruction_times(engine: Any) -> InstructionTimes | None:
    """The times of an engine; None unless it is a pipeline."""
    found: InstructionTimes | None = vars(engine).get(_ATTRIBUTE)
    return found


def pipeline_times(engines: Iterable[Any]) -> InstructionTimes | None:
    """The times of the first engine that is a pipeline, the same on every rank; None without one."""
    return next((times for engine in engines if (times := instruction_times(engine)) is not None), None)


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
    shares = []
    for ranks in pipelines:
        longest = max(span_s[rank] for rank in ranks)
        if not longest:
            return None
        shares.append(1 - sum(busy_s[rank] for rank in ranks) / len(ranks) / longest)
    return sum(shares) / len(shares)


class InstructionTimes:
    """Times the training schedules of one stage; those of ``eval_batch`` are ignored.

    On CUDA, by events on the stream of the instructions, which are waited for in :meth:`take`. On a CPU, by the clock.

    Args:
        engine: A ``PipelineEngine``; its ``_exec_schedule`` and ``_INSTRUCTION_MAP`` are replaced.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._clock: _Clock = _DeviceClock() if engine.device.type == "cuda" else _HostClock()
        self._running: _Batch | None = None
        self._finished: deque[_Batch] = deque()
        self._busy_s = self._span_s = 0.0
        self._recorded: list[list[Span]] | None = None
        engine._INSTRUCTION_MAP = {
            kind: self._timed(kind, instruction) for kind, instruction in engine._INSTRUCTION_MAP.items()
        }
        engine._exec_schedule = self._exec_schedule

    def take(self) -> tuple[float, float]:
        """What this stage has spent since the last call; waits for the GPU.

        Returns:
            Seconds of work, and seconds from the start of each batch to the end of its last micro-batch.
        """
        self._wait_and_read()
        taken = self._busy_s, self._span_s
        self._busy_s = self._span_s = 0.0
        return taken

    def record(self) -> None:
        """Keep the passes of the batches from now on."""
        self._wait_and_read()
        self._clock.set()
        self._recorded = []

    def recorded(self) -> list[list[Span]]:
        """The passes of each batch since :meth:`record`, by this machine's clock; no more are kept.

        Those of a part and a kind run in the order of their micro-batches, whatever the schedule.
        """
        self._wait_and_read()
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
        planned = getattr(self._engine.module, "pipe", None)
        if planned is None:
            return Pipeline(schedule=ONE_F_ONE_B, ranks=self._engine.num_stages, micro_batches=micro_batches)
        return replace(planned, micro_batches=micro_batches)

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
        self._running = batch = _Batch(start=self._clock.now())
        try:
            run(self._engine, pipe_schedule)
        finally:
            self._running = None
        if batch.end is None:
            batch.end = self._clock.now()
        self._finished.append(batch)

    def _timed(self, kind: type, instruction: Callable[..., None]) -> Callable[..., None]:
        def at_work(engine: Any, **kwargs: Any) -> None:
            batch = self._running
            if batch is None:
                instruction(engine, **kwargs)
                return
            start = self._clock.now()
            instruction(engine, **kwargs)
            part = kwargs.get("part", engine.stage_id)
            batch.work.append((WORK[kind], part, start, self._clock.now()))

        def afterwards(engine: Any, **kwargs: Any) -> None:
            if self._running is not None and self._running.end is None:
                self._running.end = self._clock.now()
            instruction(engine, **kwargs)

        if kind in WORK:
            return at_work
        return afterwards if issubclass(kind, AFTER_MICRO_BATCHES) else instruction

    def _wait_and_read(self) -> None:
        if self._finished:
            self._clock.wait_for(self._finished[-1].end)
        self._read()

    def _read(self) -> None:
        """Add up the batches that the device has finished, so that few are kept."""
        while self._finished and self._clock.has_passed(self._finished[0].end):
            batch = self._finished.popleft()
            self._busy_s += sum(self._clock.seconds(start, end) for _, _, start, end in batch.work)
            self._span_s += self._clock.seconds(batch.start, batch.end)
            if self._recorded is not None:
                self._recorded.append(self._spans(batch))

    def _spans(self, batch: _Batch) -> list[Span]:
        passes: Counter[tuple[str, int]] = Counter()
        spans = []
        for kind, part, start, end in batch.work:
            op = Op(kind, part, passes[kind, part])
            passes[kind, part] += 1
            spans.append(Span(op=op, start=self._clock.at(start), end=self._clock.at(end)))
        return spans


@dataclass
class _Batch:
    """The marks of one batch."""

    start: Any
    work: list[tuple[str, int, Any, Any]] = field(default_factory=list)  # kind, part, start, end
    end: Any = None


class _Clock(Protocol):
    """Marks of time, which may be read later; :meth:`at` by the machine's own clock, once it is :meth:`set`."""

    def now(self) -> Any: ...

    def has_passed(self, mark: Any) -> bool: ...

    def wait_for(self, mark: Any) -> None: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def set(self) -> None: ...

    def at(self, mark: Any) -> float: ...


class _HostClock:
    """For instructions that are over when their call returns."""

    now = staticmethod(time.perf_counter)

    def has_passed(self, mark: Any) -> bool:
        return True

    def wait_for(self, mark: Any) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def set(self) -> None:
        pass

    def at(self, mark: float) -> float:
        return mark  # CLOCK_MONOTONIC, which the processes of a machine share


class _DeviceClock:
    """Events on the current CUDA stream, passed when earlier work on it is done."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def wait_for(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000

    def set(self) -> None:
        torch.cuda.synchronize()
        self._zero, self._zero_s = self.now(), time.perf_counter()

    def at(self, mark: torch.cuda.Event) -> float:
        return self._zero_s + self.seconds(self._zero, mark)
