"""Some steps of a trial, measured: the same loop, with numbers as its only result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from determined import pytorch

from determined_ds.config.params import ProfiledSteps
from determined_ds.errors import ConfigError, Problem
from determined_ds.pipe.recording import RecordedStep
from determined_ds.profile.median_step import median_step, record_passes
from determined_ds.report.results import Row
from determined_ds.rundir.run_dir import STEP_GROUP
from determined_ds.train.local_core import LocalTrainContext
from determined_ds.train.loop.boundaries import Due
from determined_ds.train.loop.chief_display import make_progress
from determined_ds.train.loop.loop import TrainingLoop
from determined_ds.train.loop.settings import LoopOptions, section_of
from determined_ds.train.loop.step_measure import StepMeasure, reported
from determined_ds.train.scripts.given_run import Measurement
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.ddp import engine_name


def measure_throughput(
    trial: Any,
    context: Any,
    *,
    steps: int = 30,
    warmup: int = 5,
    profiles: bool = False,
    parts: int = 0,
    validation_period: pytorch.TrainUnit | None = None,
) -> Row:
    """Train some steps, and measure their speed, memory and loss.

    The weights change; nothing is validated or saved. A collective: every rank calls it, and gets the same.

    Args:
        trial: A ``DeepSpeedTrial`` whose engines are wrapped.
        context: From :func:`determined_ds.open_context`.
        steps: Optimizer steps to measure, >= 1.
        warmup: Steps before them, whose time does not count, >= 0.
        profiles: Whether torch's profiler records them.
        parts: Further steps that torch's profiler records, one trace a rank in the run directory; their time does not
            count.
        validation_period: How often the numbers so far are reported as validation metrics, for a search to go by;
            at the end, if None.

    Returns:
        What was measured, with one repetition; a step's time is that of the slowest rank. Its status says whether the
        measurement was stopped.
    """
    if not isinstance(trial, ReconciledTrial):  # else its engines are made of the configuration
        fix = (
            "initialize the engine with args=AttrDict(context.get_hparams()), or with context.overwrite(...)"
        )
        check_strategy(context, made_by=type(trial).__name__, fix=fix)
    length = Measurement(steps=steps, warmup=warmup, profiles=profiles, parts=parts)
    loop = Measuring(trial, context, length=length, validation_period=validation_period)
    loop.run(None)
    return loop.measured()


class Measuring(TrainingLoop):
    """A loop that measures its steps and reports what was measured; nothing is validated or saved.

    Args:
        trial: As of :class:`TrainingLoop`.
        context: The same.
        length: What is measured.
        validation_period: As of :func:`measure_throughput`.
        more: Further arguments of the loop that measures.
    """

    def __init__(
        self,
        trial: Any,
        context: Any,
        *more: Any,
        length: Measurement,
        validation_period: pytorch.TrainUnit | None = None,
    ) -> None:
        lengths = {
            "max_length": pytorch.Batch(length.total),
            "validation_period": validation_period,
            "checkpoint_period": None,
            "reporting_period": None,
        }
        time_metric = str(section_of(context, "searcher").get("time_metric") or "")
        options = LoopOptions(
            lengths=lengths,
            checkpoint_policy="none",
            asynchronous_checkpoints=False,
            time_metric=time_metric,
            profile=length.profile,
        )
        super().__init__(trial, context, options, make_progress(False), *more)
        self._measure = StepMeasure(
            context.models,
            device=context.device,
            distributed=context.distributed,
            length=length,
            note=self._note_step,
        )
        self._metrics: dict[str, Any] = {}
        self._pipeline_step: RecordedStep | None = None
        self._done: Row | None = None

    def begin_step(self) -> None:
        if self._measure.steps == self._measure.length.warmup and not self._measure.is_done:
            record_passes(self._context.models)
        self._measure.begin()
        super().begin_step()

    def _count_step(self) -> None:
        if self._capture is not None:
            self._measure.stop()  # the trace is written at the end of the last one
        super()._count_step()
        loss, weight = self._sums.running("loss"), self._sums.weight("loss")
        self._measure.end(loss, weight)
        self._sums.clear()
        if self._measure.steps == self._measure.length.warmup:
            self._reduced()  # forgets what the warm-up was like; here, where no rank is in a pipeline's step
        elif self._measure.is_done and self._pipeline_step is None:
            self._pipeline_step = median_step(self._context.models, self._context.distributed)
            if self._measure.length.parts and self._done is None:
                self._metrics = self._reduced()
                self._done = self.measured()  # before the profiler takes memory

    def _record(self, steps: ProfiledSteps, batches: Iterator[Any] | None) -> Iterator[Any] | None:
        """As of the loop; of a trial with a profiler of its own nothing is recorded beside the steps that count."""
        if self._measure.length.parts and self._context.profiler is not None:
            return batches
        return super()._record(steps, batches)

    def _note_step(self, step: int, seconds: float) -> None:
        train = self._core.train
        if self._is_chief and isinstance(train, LocalTrainContext):
            train.report_metrics(STEP_GROUP, step, {"step_seconds": seconds})

    def _do(self, due: Due) -> None:
        """Report to a search; nothing is saved."""
        self._check_loss()
        self._metrics = self._reduced()
        if not self._measure.has_timed:
            return
        row, done = self.measured(), self._state.batches_trained
        self._reporter.training(done, self._metrics, progress=done / self._schedule.num_batches)
        self._reporter.validation(done, {**self._position(), **reported(row)})

    def _checkpoint(self, *, waits: bool) -> None:
        """There is nothing to keep."""

    def _reduced(self) -> dict[str, Any]:
        device = self._context.device
        return self._reporter.reduce(self._sums, torch.zeros(0, dtype=torch.float64, device=device))[0]

    def measured(self) -> Row:
        """What has been measured so far; a collective."""
        return self._done or self._measure.row(
            self._context.resolved,
            engine=engine_name(self._context.models[0]),
            peak_memory_bytes_by_rank=[each.peak_bytes for each in self._reporter.memory_by_rank],
            tokens_per_sample=getattr(self._trial, "tokens_per_sample", lambda: None)(),
            bubble=self._metrics.get("bubble"),
            bubble_ideal=self._metrics.get("bubble_ideal"),
            pipeline_step=self._pipeline_step,
        )


def check_strategy(context: Any, *, made_by: str, fix: str) -> None:
    """Refuse to measure engines, made by the author, of another strategy than the row will be named by.

    Args:
        context: Whose engines they are.
        made_by: The trial, or the script.
        fix: How to make them of the configuration.

    Raises:
        ConfigError: no engine has the ZeRO stage and the precision of the configuration.
    """
    decided = context.decided_before or context.resolved
    expected = (decided.zero_stage, decided.strategy.precision)
    found = [(engine.zero_optimization_stage(), _precision(engine)) for engine in context.models]
    if expected in found:
        return
    has = " and ".join(f"ZeRO {zero_stage} in {precision}" for zero_stage, precision in found)
    asked = f"ZeRO {expected[0]} in {expected[1]}"
    message = f"{made_by} makes an engine of {has}; the configuration is {asked}"
    problem = Problem(key="engine", value=has, message=message, fix=fix, code="engine-config")
    raise ConfigError(problem)


def _precision(engine: Any) -> str:
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"
