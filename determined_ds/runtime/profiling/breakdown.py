"""``fit.breakdown``: the parts of a step, read from DeepSpeed's instruments on every rank, as metrics of each report.

The timers of the engines run from batch to batch. Before a batch what they have seen of a validation or a checkpoint is
forgotten; after it what they have seen is added up. A report divides the sums by the batches, and takes the rank that
has most. Nothing grows, and nothing is printed.

Each part is of the time on the clock of its rank, communication included: a part of a step may wait for other ranks.
``communication_s`` lies within the other parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from deepspeed.comm import comm
from deepspeed.runtime.engine import DeepSpeedEngine

from determined_ds.runtime.profiling.flops import FlopCount
from determined_ds.runtime.profiling.peak_flops import known_peak_flops
from determined_ds.runtime.rank_memory import GB
from determined_ds.trial.comms_logger import CommunicationMeter
from determined_ds.trial.step_timers import TIMERS, StepTimer, read_timers, stop_reading

SECONDS = ("forward_s", "backward_s", "optimizer_s")  # in the order of TIMERS
COMMUNICATION = ("communication_s", "communication_bytes")
MEMORY = ("memory_after_forward_gb", "memory_after_backward_gb", "memory_after_optimizer_gb")
FLOPS = ("flops", "peak_flops")  # of a step, and the most that this rank's device does in a second
COLUMNS = (*SECONDS, *COMMUNICATION, *MEMORY, *FLOPS)
UNKNOWN = math.nan
COUNTED_BATCH = (
    2  # of this process: in the first one loaders start their workers, and engines set themselves up
)


class Breakdown:
    """Reads the instruments of a trial's engines.

    Args:
        engines: All of them.
        device: Of this rank.
        switched_on: The instruments that only the loop reads: DeepSpeed prints the others.
        peak_flops: Floating-point operations a second that this rank reaches at most.
        counts_flops: Whether a step's floating-point operations can be counted: not those of a compiled model.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        *,
        device: torch.device,
        switched_on: frozenset[str],
        peak_flops: float,
        counts_flops: bool,
    ) -> None:
        self._engines = engines
        self._device = device
        self._peak_flops = peak_flops
        self._process = psutil.Process()
        self._batches = 0
        self._flops = UNKNOWN
        self._mode = FlopCount(self._is_training) if counts_flops else None
        self._entered = contextlib.ExitStack()
        self._is_within = False
        prints = comm.comms_logger.enabled and "comms_logger" not in switched_on
        self._meter = CommunicationMeter(device, prints=prints)
        self._meter.attach()
        self._timers = [timers for engine in engines if (timers := self._read(engine, switched_on))]
        self._clear()

    def _read(self, engine: Any, switched_on: frozenset[str]) -> dict[str, StepTimer]:
        if not isinstance(engine, DeepSpeedEngine):
            return {}
        if "memory_breakdown" in switched_on:
            engine._config.memory_breakdown = (
                False  # it would print, and collect garbage; the same is read here
            )
        prints = engine.wall_clock_breakdown() and "wall_clock_breakdown" not in switched_on
        return read_timers(engine, self._part_ends, prints=prints)

    # ------------------------------------------------------------------------------------ a batch

    def begin_batch(self) -> None:
        """What the instruments have seen until now is not of a training step."""
        self._forget()
        self._is_within = True
        self._batches += 1
        if self._mode is not None and self._batches == COUNTED_BATCH:
            self._entered.enter_context(self._mode)

    def end_batch(self) -> None:
        """A training step is done."""
        if not self._is_within:
            return
        self._is_within = False
        for timers in self._timers:
            for part, timer in timers.items():
                self._sums[part] += timer.take_s()
        seconds, num_bytes = self._meter.take()
        self._communication[0] += seconds
        self._communication[1] += num_bytes
        self._end_count()

    def drop_batch(self) -> None:
        """The batch that has begun is not trained."""
        self._is_within = False
        self._entered.close()
        self._batches -= 1

    def _end_count(self) -> None:
        if self._mode is not None and self._batches == COUNTED_BATCH:
            self._entered.close()
            self._flops = float(self._mode.so_far.model)

    def _is_training(self) -> bool:
        return any(engine.module.training for engine in self._engines)

    def _part_ends(self, part: str) -> None:
        if self._is_within:
            self._memory[part] = max(self._memory[part], self._held_bytes())

    def _held_bytes(self) -> int:
        """The ``allocated_bytes`` of :func:`~determined_ds.runtime.rank_memory.rank_memory`, at less cost."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return int(self._process.memory_info().rss)

    def _forget(self) -> None:
        for engine in self._engines:
            if isinstance(engine, DeepSpeedEngine):
                engine.timers.forget()
        for timers in self._timers:
            for timer in timers.values():
                timer.take_s()
        self._meter.take()

    # ------------------------------------------------------------------------------------ a report

    def _clear(self) -> None:
        self._sums = dict.fromkeys(TIMERS, 0.0)
        self._communication = [0.0, 0.0]
        self._memory = dict.fromkeys(TIMERS, 0)

    def take(self, num_batches: int) -> list[float]:
        """This rank's numbers for a report, in the order of :data:`COLUMNS`; the sums begin anew.

        Args:
            num_batches: Since the last report.
        """
        batches = max(1, num_batches)
        is_deepspeeds = bool(self._timers)
        communication = self._communication if is_deepspeeds else [UNKNOWN, UNKNOWN]
        row = [*(seconds / batches for seconds in self._sums.values())]
        row += [number / batches for number in communication]
        row += [number / GB for number in self._memory.values()]
        row += [self._flops, self._peak_flops]
        self._clear()
        return row

    def close(self) -> None:
        """End the measurement."""
        self._is_within = False
        self._entered.close()
        self._meter.detach()
        for engine in self._engines:
            if isinstance(engine, DeepSpeedEngine):
                stop_reading(engine)


def breakdown_of(context: Any) -> Breakdown:
    """The instruments of a trial's engines, which run from now on; a collective.

    Args:
        context: The trial's.
    """
    resolved = context.resolved
    peak = known_peak_flops(context.device, resolved.strategy.precision, context.distributed.local_size)
    context.distributed.allgather(None)  # who is late would have the others wait in their first step
    return Breakdown(
        context.models,
        device=context.device,
        switched_on=resolved.switched_on,
        peak_flops=peak,
        counts_flops=not (resolved.torch_compile or resolved.strategy.deepcompile),
    )


def part_metrics(
    columns: Sequence[Sequence[float]], samples_per_second: float | None, samples: int
) -> dict[str, float]:
    """The metrics of a report.

    Args:
        columns: Of each of :data:`COLUMNS` the number of every rank.
        samples_per_second: Of all ranks together; None where no time has passed.
        samples: In a step.
    """
    by_name: Mapping[str, Sequence[float]] = dict(zip(COLUMNS, columns, strict=True))
    found = {name: _most(by_name[name]) for name in (*SECONDS, *COMMUNICATION, *MEMORY)}
    if samples_per_second:
        step_s = samples / samples_per_second
        flops_per_s, peak = sum(by_name["flops"]) / step_s, sum(by_name["peak_flops"])
        found["tflops_per_rank"] = flops_per_s / len(by_name["flops"]) / 1e12
        found["mfu"] = flops_per_s / peak if peak else UNKNOWN
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _most(numbers: Sequence[float]) -> float:
    return max(numbers) if all(map(math.isfinite, numbers)) else UNKNOWN
