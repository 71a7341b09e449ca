"""Some steps of a training, measured: their seconds, losses, model states and memory, whatever takes them."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections import Counter
from functools import partial
from typing import Any

import torch

from determined_ds.config.params import FitOptions, Length, ProfiledSteps
from determined_ds.pipe.timeline import RecordedStep, recorded_step
from determined_ds.report.results import MEASURED, STOPPED, Repetition, Row, write_row
from determined_ds.train.group.process_group import gather_rows
from determined_ds.train.loop.trainer import Trainer
from determined_ds.train.memory import watch
from determined_ds.train.rank import Measurement, Run
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.ddp import DDP, engine_name
from determined_ds.trial.instruction_times import pipeline_times
from determined_ds.trial.returned import refused


def measure_throughput(
    trial: Any, context: Any, *, steps: int = 30, warmup: int = 5, profiles: bool = False
) -> Row:
    """Train some steps, and measure their speed, memory and loss.

    The weights change; nothing is validated or saved. A collective: every rank calls it, and gets the same.

    Args:
        trial: A ``DeepSpeedTrial`` whose engines are wrapped.
        context: From :func:`determined_ds.open_context`.
        steps: Optimizer steps to measure, >= 1.
        warmup: Steps before them, whose time does not count, >= 0.
        profiles: Whether torch's profiler records them, one trace a rank in the run directory.

    Returns:
        What was measured, with one repetition; a step's time is that of the slowest rank. Its status says whether the
        measurement was stopped.
    """
    if not isinstance(trial, ReconciledTrial):  # else its engines are made of the configuration
        fix = "initialize it with args=AttrDict(context.get_hparams()), or with config=context.resolved.ds_config"
        check_strategy(context, made_by=type(trial).__name__, fix=fix)
    measuring = Measuring(trial, context, Measurement(steps, warmup, profiles))
    measuring.training.train(None)
    return measuring.row()


class Measuring:
    """Observes the steps of a :class:`Trainer`, which saves and validates nothing."""

    def __init__(self, trial: Any, context: Any, length: Measurement, *, source: str = "") -> None:
        self._context, self._length = context, length
        self._started = 0.0
        self._taken: float | None = None  # of the step at hand, once its work is done
        self._steps: list[tuple[float, Any, float]] = []  # seconds; sum of the loss and its weight
        self._state_bytes = Counter[int]()  # of each engine
        self._let_go = contextlib.ExitStack()
        self._pipeline_step: RecordedStep | None = None
        self._total, warmup = length.warmup + length.steps, min(2, length.warmup)
        recorded = ProfiledSteps(wait=length.warmup - warmup, warmup=warmup, active=length.steps)
        fit = FitOptions(
            max_length=Length(unit="batches", value=self._total),
            # The first report forgets the warm-up, here, where no rank is in a pipeline's step.
            reporting_period=Length(unit="batches", value=(length.warmup,)) if length.warmup else None,
            checkpoint_policy="none",
            asynchronous_checkpoints=False,
            profile=recorded if length.profiles else None,
        )
        self.training = Trainer(trial, context).prepare(fit, source=source, measuring=self)

    def begin_step(self) -> None:
        """A step begins."""
        steps, length = len(self._steps), self._length
        if steps == length.warmup and (times := pipeline_times(self._context.models)) is not None:
            times.record()
        # As late in the warm-up as can be, and not in the first step, which makes the optimizer's states.
        if steps == min(max(1, length.warmup - 1), self._total - 1):
            for index, engine in enumerate(self._context.models):
                self._let_go.callback(watch(engine, partial(self._note_states, index)))
        self._started, self._taken = self._now(), None

    def _note_states(self, index: int, found: int) -> None:
        self._state_bytes[index] = max(self._state_bytes[index], found)

    def stop(self) -> None:
        """The work of the step is done: what comes before :meth:`end_step` is not its time."""
        if self._taken is None:
            self._taken = self._now() - self._started

    def _now(self) -> float:
        # Work that a GPU has yet to do belongs to the step that asked for it; in a profile it stays as it is.
        if self._context.device.type == "cuda" and not self._length.profiles:
            torch.cuda.synchronize(self._context.device)
        return time.perf_counter()

    def end_step(self, _batches_trained: int) -> None:
        """A step has ended; a collective after the last one that counts."""
        sums = self.training.sums
        assert self._taken is not None
        self._let_go.close()
        self._steps.append((self._taken, *sums.running("loss")))
        sums.clear()
        if self.is_pending:
            self._pipeline_step = self._median_step()

    @property
    def is_pending(self) -> bool:
        """Whether all steps have ended."""
        return len(self._steps) == self._total

    def add(self, metrics: Any, weight: float) -> None:
        """What a script reports of its own validation is not looked at."""

    def row(self) -> Row:
        """What has been measured so far; a collective. A step's time is that of the slowest rank."""
        context, length, done = self._context, self._length, len(self._steps)
        resolved, reporter, engine = context.resolved, self.training.reporter, engine_name(context.models[0])
        own = [(taken, 0.0 if loss is None else float(loss), weight) for taken, loss, weight in self._steps]
        rows = gather_rows(torch.tensor(own, dtype=torch.float64, device=context.device).flatten())
        rows = rows.reshape(len(rows), done, 3)
        seconds, losses, weights = rows[..., 0].amax(0), rows[..., 1].sum(0), rows[..., 2].sum(0)
        repetition = Repetition(
            run_dir="",
            step_seconds=tuple(seconds.tolist()[length.warmup :]),
            losses=tuple((losses / weights).tolist()) if weights.all() else (),
            warmup=length.warmup,
            peak_memory_bytes_by_rank=reporter.memory_by_rank,
            model_state_bytes_by_rank=tuple(context.distributed.allgather(self._state_bytes.total())),
            bubble=reporter.latest.get("bubble"),
            bubble_ideal=reporter.latest.get("bubble_ideal"),
            pipeline_step=self._pipeline_step,
        )
        return Row(
            name=DDP if engine == DDP else resolved.strategy.name,
            engine=engine,
            slots=resolved.topology.slots,
            status=MEASURED if self.is_pending else STOPPED,
            reason="" if self.is_pending else f"stopped after {done} of {self._total} steps",
            zero_stage=resolved.zero_stage,
            micro_batch_size=resolved.batch.micro_batch_size,
            accumulation=resolved.batch.accumulation,
            replicas=resolved.batch.replicas,
            pipe_parallel_size=resolved.topology.pipe_parallel_size,
            precision=resolved.strategy.precision,
            samples_per_step=resolved.batch.global_batch_size,
            tokens_per_sample=reporter.tokens_per_sample,
            repetitions=(repetition,),
        )

    def _median_step(self) -> RecordedStep | None:
        """The recorded step of a pipeline that has the median length, of the first replica; a collective.

        The same on every rank; None without a pipeline, where no step was recorded, or where the pipeline lies on
        several machines, whose clocks differ.
        """
        if (times := pipeline_times(self._context.models)) is None:
            return None
        own = (times.stage, socket.gethostname(), [step for step in times.recorded() if step])
        gathered = self._context.distributed.allgather(own)
        ranks = [gathered[rank] for rank in times.pipelines[0]]
        of_stage = {stage: steps for stage, _, steps in ranks}  # slices of a stage run alike
        steps = list(zip(*(of_stage[stage] for stage in sorted(of_stage)), strict=False))
        if not steps or len({machine for _, machine, _ in ranks}) > 1:
            return None
        lengths = [max(spans[-1].end - spans[0].start for spans in step) for step in steps]
        return recorded_step(times.pipeline, steps[lengths.index(statistics.median_low(lengths))])


def check_strategy(context: Any, *, made_by: str, fix: str) -> None:
    """Refuse to measure engines, made by the author, of another strategy than the row will be named by."""
    decided = context.decided_before or context.resolved
    expected, found = (decided.zero_stage, decided.strategy.precision), []
    for engine in context.models:
        precision = "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"
        found.append((engine.zero_optimization_stage(), precision))
    if expected not in found:
        has = " and ".join(f"ZeRO {stage} in {kind}" for stage, kind in found)
        said = f"the configuration is ZeRO {expected[0]} in {expected[1]}"
        raise refused(
            "engine", f"{made_by} makes an engine of {has}; {said}", fix, "engine-config", value=has
        )


def keep_row(run: Run, row: Row, *, is_chief: bool, was_stopped: bool) -> None:
    """Write what was measured of a script."""
    if row.status == STOPPED and not was_stopped:
        message = f"the script trains only {row.reason.removeprefix('stopped after ')}"
        fix = "measure fewer steps (--steps, --warmup), or have the script train longer"
        raise refused("--measure", message, fix, "measure")
    run.is_measured = True
    if is_chief:
        write_row(row, run.there.measured)
