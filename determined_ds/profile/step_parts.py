"""A training step taken apart, for each rank and for all of them: what the analysis of traces finds.

    Profile
      RankProfile   one rank: its trace, its steps
        StepParts   one step: its seconds by part, which are disjoint and add up to the step

Results of other analyses of the same traces are further fields of :class:`RankProfile` and :class:`Profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from determined_ds.pipe.orders import ONE_F_ONE_B
from determined_ds.profile.arrivals import Arrival
from determined_ds.profile.memory_of_step import MemoryOfStep
from determined_ds.profile.operators import OperatorCosts
from determined_ds.profile.waiting_calls import WaitingCall

if TYPE_CHECKING:
    from determined_ds.profile.lost_time import LostTime
    from determined_ds.profile.straggler import Straggler

VERSION = 1  # of profile.json: raised where a key changes its meaning

# Part of a step -> what it is. The order is that of tables and pictures.
PARTS = {
    "data": "waiting for the loader, moving batches to the device",
    "forward": "computing the forward pass",
    "backward": "computing the backward pass",
    "communication": "waiting for collectives: not hidden by computation",
    "optimizer": "computing the optimizer's step",
    "pipeline": "waiting for a neighbouring stage of the pipeline",
    "idle": "a GPU without work, while the host is not at one of the above",
    "other": "the rest: the loop, callbacks, what has no mark",
}


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """One step of one rank.

    Args:
        batch: Optimizer steps since the start of training, this one included.
        begin_us: On the clock of the trace.
        end_us: On the same.
        clock_s: How long it took by the loop's own clock; None where the trace does not say.
        seconds: Name of :data:`PARTS` -> seconds; disjoint, all of them are there.
        overlapped_s: Communication that was hidden by computation: within the other parts, and not one of them.
    """

    batch: int
    begin_us: float
    end_us: float
    clock_s: float | None
    seconds: Mapping[str, float]
    overlapped_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum of its parts."""
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank.

    Args:
        rank: Its number.
        trace: The name of its trace's file.
        trace_bytes: Of that file.
        host: The machine.
        device: ``cpu`` or ``cuda``.
        device_name: Of the GPU; empty on a CPU.
        pipe_stage: Of the pipeline; 0 without one.
        steps: Those that were recorded.
        operators: What they cost.
        memory: Of the last step; None where the trace has no allocations.
        arrivals: At the collectives of all steps.
        waiting_calls: Of the user's code.
        flops: Floating-point operations of the model that the rank does in a step; None where they were not counted.
        peak_flops: The most that it does in a second, measured.
    """

    rank: int
    trace: str
    trace_bytes: int
    host: str = ""
    device: str = "cpu"
    device_name: str = ""
    pipe_stage: int = 0
    steps: Sequence[StepParts] = ()
    operators: OperatorCosts = field(default_factory=OperatorCosts)
    memory: MemoryOfStep | None = None
    arrivals: Sequence[Arrival] = ()
    waiting_calls: Sequence[WaitingCall] = ()
    flops: int | None = None
    peak_flops: float | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Of a mean step: part -> seconds."""
        return mean_parts([step.seconds for step in self.steps])

    @property
    def overlapped_s(self) -> float:
        """Of a mean step."""
        return fmean([step.overlapped_s for step in self.steps] or [0.0])

    @property
    def step_s(self) -> float:
        """A mean step: what its parts add up to."""
        return sum(self.seconds.values())

    @property
    def clock_s(self) -> float | None:
        """A mean step by the loop's own clock; None where the trace does not say."""
        found = [step.clock_s for step in self.steps if step.clock_s is not None]
        return fmean(found) if found else None

    @property
    def median_s(self) -> float:
        """The median step."""
        return median([step.total_s for step in self.steps] or [0.0])


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All ranks.

    Args:
        ranks: In their order. Where traces are missing, those that are there.
        num_ranks: Of the run.
        zero_stage: Of the strategy; None where no ZeRO engine trains.
        pipe_parallel_size: Stages of the pipeline.
        pipe_schedule: What they compute in which order.
        pipe_chunks: Parts of the model that each of them holds.
        accumulation: Micro-batches of a rank in a step.
        global_batch_size: Samples in a step; 0 where the traces do not say.
        wait: Steps that were trained before the warm-up.
        warmup: Steps that the profiler ran for without a record.
        ds_config: What DeepSpeed was given; empty where the traces do not say.
        straggler: The rank that the others wait for; None where there is none.
        findings: What could be faster, by the time that it could save at most.
        warnings: What is missing or odd in the traces, as sentences.
    """

    ranks: Sequence[RankProfile]
    num_ranks: int = 1
    zero_stage: int | None = None
    pipe_parallel_size: int = 1
    pipe_schedule: str = ONE_F_ONE_B
    pipe_chunks: int = 1
    accumulation: int = 1
    global_batch_size: int = 0
    wait: int = 0
    warmup: int = 0
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    straggler: Straggler | None = None
    findings: Sequence[LostTime] = ()
    warnings: Sequence[str] = ()

    @property
    def seconds(self) -> dict[str, float]:
        """Of a mean step, the mean over ranks: part -> seconds."""
        return mean_parts([rank.seconds for rank in self.ranks])

    @property
    def overlapped_s(self) -> float:
        """Of a mean step, the mean over ranks."""
        return fmean([rank.overlapped_s for rank in self.ranks] or [0.0])

    @property
    def step_s(self) -> float:
        """A mean step, the mean over ranks."""
        return sum(self.seconds.values())

    @property
    def tflops_per_rank(self) -> float | None:
        """Floating-point operations of the model that a rank does in a second of a mean step, in 10^12."""
        counted = [rank.flops for rank in self.ranks if rank.flops is not None]
        if len(counted) < len(self.ranks) or not self.step_s:
            return None
        return fmean(counted) / self.step_s / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the same as a share of the peak of the ranks."""
        peaks = [rank.peak_flops for rank in self.ranks if rank.peak_flops]
        if self.tflops_per_rank is None or len(peaks) < len(self.ranks):
            return None
        return self.tflops_per_rank * 1e12 / fmean(peaks)


def mean_parts(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part, 0 where there is nothing."""
    return {part: fmean([seconds[part] for seconds in found] or [0.0]) for part in PARTS}
