"""Some steps of a trial, measured: the same loop, with numbers as its only result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from determined import pytorch

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.units import GIB
from determined_ds.protocol.run_dir import STEP_GROUP
from determined_ds.report.results import MEASURED, STOPPED, Repetition, Row
from determined_ds.runtime.checkpoints.state_bytes import watch
from determined_ds.runtime.group.collectives import reduce_over_ranks
from determined_ds.runtime.local_core import LocalTrainContext
from determined_ds.runtime.loop.boundaries import Due
from determined_ds.runtime.loop.fit import section_of
from determined_ds.runtime.loop.loop import TrainingLoop
from determined_ds.runtime.loop.progress import make_progress
from determined_ds.runtime.loop.settings import LoopOptions
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.ddp import DDP, engine_name


def measure_throughput(
    trial: Any,
    context: Any,
    *,
    steps: int = 30,
    warmup: int = 5,
    validation_period: pytorch.TrainUnit | None = None,
) -> Row:
    """Train some steps, and measure their speed, memory and loss.

    The weights change; nothing is validated or saved. A collective: every rank calls it, and gets the same.

    Args:
        trial: A ``DeepSpeedTrial`` whose engines are wrapped.
        context: From :func:`determined_ds.open_context`.
        steps: Optimizer steps to measure, >= 1.
        warmup: Steps before them, whose time does not count, >= 0.
        validation_period: How often the numbers so far are reported as validation metrics, for a search to go by;
            at the end, if None.

    Returns:
        What was measured, with one repetition; a step's time is that of the slowest rank. Its status says whether the
        measurement was stopped.
    """
    loop = MeasuredLoop(trial, context, steps=steps, warmup=warmup, validation_period=validation_period)
    loop.run(None)
    return loop.measured()


class MeasuredLoop(TrainingLoop):
    """Trains and measures; the arguments are those of :func:`measure_throughput`."""

    def __init__(
        self,
        trial: Any,
        context: Any,
        *,
        steps: int,
        warmup: int,
        validation_period: pytorch.TrainUnit | None,
    ) -> None:
        lengths = {
            "max_length": pytorch.Batch(warmup + steps),
            "validation_period": validation_period,
            "checkpoint_period": None,
            "reporting_period": None,
        }
        check_strategy(trial, context)
        time_metric = str(section_of(context, "searcher").get("time_metric") or "")
        options = LoopOptions(lengths=lengths, checkpoint_policy="none", time_metric=time_metric)
        super().__init__(trial, context, options, make_progress(False))
        self._warmup = warmup
        self._start_seconds = 0.0
        self._seconds: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._weights: list[float] = []
        self._state_bytes = [0 for _ in context.models]
        self._let_go: list[Callable[[], None]] = []
        self._metrics: dict[str, Any] = {}

    def _train_one(self) -> None:
        step = self._state.batches_trained
        if step == 0:
            self._start_seconds = time.time() - psutil.Process().create_time()
        if step == self._warmup:
            self._reduced()  # forgets what the warm-up was like
        # As late in the warm-up as can be, and not in the first step, which makes the optimizer's states.
        if step == min(max(1, self._warmup - 1), self._schedule.num_batches - 1):
            self._watch_states()
        self._synchronize()
        started = time.perf_counter()
        super()._train_one()
        self._synchronize()
        self._seconds.append(time.perf_counter() - started)
        while self._let_go:
            self._let_go.pop()()
        self._keep_loss()
        train = self._core.train
        if self._is_chief and isinstance(train, LocalTrainContext):
            train.report_metrics(STEP_GROUP, step + 1, {"step_seconds": self._seconds[-1]})

    def _do(self, due: Due) -> None:
        """Report to a search; nothing is saved."""
        self._check_loss()
        self._metrics = self._reduced()
        if len(self._seconds) <= self._warmup:
            return
        row, done = self.measured(), self._state.batches_trained
        self._reporter.training(done, self._metrics, progress=done / self._schedule.num_batches)
        self._reporter.validation(done, {**self._position(), **reported(row)})

    def _checkpoint(self) -> None:
        """There is nothing to keep."""

    def _reduced(self) -> dict[str, Any]:
        device = self._context.device
        return self._reporter.reduce(self._sums, torch.zeros(0, dtype=torch.float64, device=device))[0]

    def _watch_states(self) -> None:
        for index, engine in enumerate(self._context.models):

            def note(found: dict[str, int], index: int = index) -> None:
                self._state_bytes[index] = max(self._state_bytes[index], sum(found.values()))

            self._let_go.append(watch(engine, note))

    def _keep_loss(self) -> None:
        loss, weight = self._sums.running("loss"), self._sums.weight("loss")
        self._losses.append(torch.zeros((), device=self._context.device) if loss is None else loss.clone())
        self._weights.append(weight)
        self._sums.clear()

    def _synchronize(self) -> None:
        """Work that a GPU has yet to do belongs to the step that asked for it."""
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)

    def measured(self) -> Row:
        """What has been measured so far; a collective."""
        context = self._context
        resolved, strategy = context.resolved, context.resolved.strategy
        seconds = torch.tensor(self._seconds, dtype=torch.float64, device=context.device)
        reduce_over_ranks(seconds, dist.ReduceOp.MAX)
        losses = torch.stack([loss.double() for loss in self._losses])
        sums = torch.stack([losses, torch.tensor(self._weights, dtype=torch.float64, device=context.device)])
        reduce_over_ranks(sums)
        states = context.distributed.allgather(sum(self._state_bytes))
        tokens = getattr(self._trial, "tokens_per_sample", lambda: None)()
        engine = engine_name(context.models[0])
        repetition = Repetition(
            run_dir="",
            step_seconds=tuple(seconds.tolist()[self._warmup :]),
            losses=tuple((sums[0] / sums[1]).tolist()) if sums[1].all() else (),
            warmup=self._warmup,
            start_seconds=self._start_seconds,
            peak_memory_bytes_by_rank=self._reporter.peak_memory_bytes_by_rank,
            model_state_bytes_by_rank=tuple(states),
            bubble=self._metrics.get("bubble"),
            bubble_ideal=self._metrics.get("bubble_ideal"),
        )
        done, total = self._state.batches_trained, self._schedule.num_batches
        return Row(
            name=DDP if engine == DDP else strategy.name,
            engine=engine,
            slots=resolved.topology.slots,
            status=MEASURED if done == total else STOPPED,
            reason="" if done == total else f"stopped after {done} of {total} steps",
            zero_stage=resolved.zero_stage,
            micro_batch_size=resolved.batch.micro_batch_size,
            accumulation=resolved.batch.accumulation,
            replicas=resolved.batch.replicas,
            pipe_parallel_size=resolved.topology.pipe_parallel_size,
            precision=strategy.precision,
            samples_per_step=resolved.batch.global_batch_size,
            tokens_per_sample=tokens,
            estimated_model_state_bytes=None,
            repetitions=(repetition,),
        )


def check_strategy(trial: Any, context: Any) -> None:
    """Refuse to measure a trial whose engines, made by itself, have another strategy than the row will be named by.

    Raises:
        ConfigError: no engine has the ZeRO stage and the precision of the configuration.
    """
    if isinstance(trial, ReconciledTrial):
        return  # its engines are made of the configuration
    decided = context.decided_before or context.resolved
    expected = (decided.zero_stage, decided.strategy.precision)
    found = [(engine.zero_optimization_stage(), _precision(engine)) for engine in context.models]
    if expected in found:
        return
    has = " and ".join(f"ZeRO {zero_stage} in {precision}" for zero_stage, precision in found)
    asked = f"ZeRO {expected[0]} in {expected[1]}"
    message = f"{type(trial).__name__} makes an engine of {has}; the configuration is {asked}"
    fix = "initialize the engine with args=AttrDict(context.get_hparams()), or with context.overwrite(...)"
    problem = Problem(key="engine", value=has, message=message, fix=fix, code="engine-config")
    raise ConfigError(problem)


def _precision(engine: Any) -> str:
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"


def reported(row: Row) -> dict[str, Any]:
    """The numbers of a row, by the names that a search may go by."""
    metrics = {
        "samples_per_second": row.samples_per_second,
        "tokens_per_second": row.tokens_per_second,
        "step_seconds": row.median_step_seconds,
        "peak_memory_gib": None if row.peak_memory_bytes is None else row.peak_memory_bytes / GIB,
        "loss": row.loss,
    }
    return {name: value for name, value in metrics.items() if value is not None}
