"""One start of a variant, measured; the kinds of numbers that ``results.json`` may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from determined_ds.pipe.recording import RecordedStep
from determined_ds.rundir.strict_json import Integer, Real, one_of

# What a step's time goes into, in the order of pictures; as profile.step_parts has them.
PARTS = ("data", "forward", "backward", "communication", "optimizer", "pipeline", "idle", "other")

# What a file may hold.
Count = Annotated[Integer, Field(ge=1)]
Number = Annotated[Integer, Field(ge=0)]
Seconds = Annotated[Real, Field(ge=0, allow_inf_nan=False)]
StepSeconds = Annotated[Real, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[Real, Field(ge=0, le=1)]
PartName = Annotated[str, one_of(PARTS)]
KNOWN_KEYS = ConfigDict(extra="forbid")  # and no others


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One fresh start of a variant.

    Args:
        run_dir: Its run directory, relative to the results' folder.
        step_seconds: Of each step after the warm-up.
        losses: Of every step, the warm-up's too: means over the global batch.
        warmup: Steps before ``step_seconds`` begins.
        start_seconds: From the process's start to its first step.
        peak_memory_bytes_by_rank: Device memory on CUDA; resident memory on a CPU.
        model_state_bytes_by_rank: Parameters, gradients and optimizer states that were found in the engine, on the
            device.
        bubble: Share of a pipeline's time that its stages wait, 0 to 1; None where there is no pipeline.
        bubble_ideal: The same by the schedule alone, counted; None where there is no pipeline.
        pipeline_step: What each rank of a pipeline computed when, in the median step; None where not recorded.
        parts: Name of :data:`PARTS` -> seconds of a step under torch's profiler, the mean over ranks; None where none
            was recorded. The step that they add up to is longer than those that were timed.
    """

    __pydantic_config__ = KNOWN_KEYS

    run_dir: str
    step_seconds: tuple[StepSeconds, ...]
    losses: tuple[Real, ...]
    warmup: Number
    start_seconds: Seconds
    peak_memory_bytes_by_rank: tuple[Number, ...]
    model_state_bytes_by_rank: tuple[Number, ...]
    bubble: Share | None = None
    bubble_ideal: Share | None = None
    pipeline_step: RecordedStep | None = None
    parts: dict[PartName, Seconds] | None = None
