"""What is reported of a run: to the master or the run directory, to TensorBoard, and to the terminal."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from determined_ds.logs.tensorboard import upload, write_scalars
from determined_ds.pipe.timeline import counted_bubble
from determined_ds.rundir.signals import HEART
from determined_ds.train.loop.display import Progress
from determined_ds.train.loop.metrics import MetricSums
from determined_ds.train.memory import memory_metrics, peak_bytes
from determined_ds.trial.instruction_times import pipeline_times

TRAINING, VALIDATION = "training", "validation"


class Reporter:
    """Makes reports of the accumulated metrics. Only the chief sends them."""

    def __init__(self, trial: Any, context: Any, progress: Progress) -> None:
        self._context, self._core, self._progress = context, context._core, progress
        self._is_chief = context.distributed.rank == 0
        self._tokens_per_sample: float | None = getattr(trial, "tokens_per_sample", lambda: None)()
        self._training_s = 0.0
        self._num_batches = 0
        self._started: float | None = None
        self.latest: dict[str, Any] = {}
        self.memory_by_rank: tuple[int, ...] = ()

    def batch_begins(self) -> None:
        """A batch is about to be trained: from the first one on, the time until :meth:`pause` is that of training.

        Batches are not timed one by one, since a GPU works on after the call that started its work. How long it took
        is known where the host waits for it, at a report or a pause.
        """
        if self._started is None:
            self._started = time.perf_counter()
        self._num_batches += 1

    def take_back_batch(self) -> int:
        """The batch that has begun is not trained. Returns those that were, since the last report."""
        self._num_batches = max(0, self._num_batches - 1)
        return self._num_batches

    def pause(self) -> None:
        """What follows is not training: a report, a validation, a checkpoint."""
        if self._started is None:
            return
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        self._training_s += time.perf_counter() - self._started
        self._started = None

    def reduce(self, sums: MetricSums, *riders: torch.Tensor) -> tuple[dict[str, Any], list[list[float]]]:
        """The training metrics since the last report over all ranks, by one collective; and its other riders."""
        context = self._context
        times = pipeline_times(context.models)
        own = [peak_bytes(context.device), *(times.take() if times else ())]
        reduced, rows = sums.reduce(torch.tensor(own, dtype=torch.float64), *riders)
        self.pause()
        peaks, *columns = list(zip(*rows, strict=True))[: len(own)]
        self.memory_by_rank = tuple(map(int, peaks))
        metrics: dict[str, Any] = dict(reduced)
        metrics.update(context.reduce_metrics(for_training=True) or {})
        metrics.update(engine_metrics(context.models[0]))
        # Over replicas: samples are counted once, however many ranks hold a replica.
        seconds, samples = self._training_s, self._num_batches * context.resolved.batch.global_batch_size
        self._training_s, self._num_batches = 0.0, 0
        if seconds:
            metrics["samples_per_second"] = samples / seconds
            if self._tokens_per_sample:
                metrics["tokens_per_second"] = samples / seconds * self._tokens_per_sample
        metrics.update(memory_metrics(self.memory_by_rank))
        if times is not None and (measured := times.bubble(*columns)) is not None:
            metrics |= {"bubble": measured, "bubble_ideal": counted_bubble(times.pipeline)}
        self.latest = metrics
        return metrics, [row[len(own) :] for row in rows]

    def training(self, batches_trained: int, metrics: dict[str, Any], *, progress: float) -> None:
        """Send a report of training metrics."""
        if self._is_chief:
            with HEART.patiently():  # a master may not answer for a while
                self._core.train.report_training_metrics(steps_completed=batches_trained, metrics=metrics)
                self._core.train.report_progress(progress)
            self._show(TRAINING, batches_trained, metrics)

    def validation(self, batches_trained: int, metrics: dict[str, Any]) -> float | None:
        """Send a report of validation metrics."""
        if not self._is_chief:
            return None
        best_before = self._core.train.get_experiment_best_validation()
        self._core.train.report_validation_metrics(steps_completed=batches_trained, metrics=metrics)
        self._show(VALIDATION, batches_trained, metrics)
        return None if best_before is None else float(best_before)

    def _show(self, group: str, batches_trained: int, metrics: dict[str, Any]) -> None:
        if self._context.get_enable_tensorboard_logging():
            write_scalars(self._context.get_tensorboard_writer(), group, batches_trained, metrics)
        self._progress.report(group, batches_trained, metrics)

    def upload(self) -> None:
        """Flush the files for TensorBoard; on a cluster, upload them to its storage."""
        if self._context.get_enable_tensorboard_logging():
            upload(self._context)


def engine_metrics(engine: Any) -> dict[str, Any]:
    """What DeepSpeed reports of the last step: learning rate, gradient norm, loss scale, skipped steps."""
    metrics: dict[str, Any] = {}
    if rates := engine.get_lr() if engine.optimizer is not None else []:
        metrics["lr"] = float(rates[0])
    norm = engine.get_global_grad_norm()
    if norm is not None and math.isfinite(norm):  # inf where the step was skipped: no gradient was applied
        metrics["grad_norm"] = float(norm)
    if engine.fp16_enabled():
        # Optimizers without ZeRO keep it elsewhere than those with; this works for all of them.
        metrics["loss_scale"] = float(engine._get_optimizer_loss_scale())
    if engine.fp16_enabled() or engine.skipped_steps:
        metrics["skipped_steps"] = int(engine.skipped_steps)
    return metrics
