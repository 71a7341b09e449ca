"""One pass over the validation data: every sample counts once, whatever the ranks and the micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from determined import util
from determined.pytorch import deepspeed as det_ds

from determined_ds.errors import TrainingError
from determined_ds.runtime.data import ValidationBatches, ValidationLoader
from determined_ds.runtime.metrics import MetricSums
from determined_ds.runtime.reducers import Reducers


class Validator:
    """Runs a trial's ``evaluate_batch`` (or ``evaluate_full_dataset``) over its validation data.

    Args:
        trial: The trial.
        context: Its context.
        test_mode: Stop after one ``evaluate_batch``.
    """

    def __init__(self, trial: det_ds.DeepSpeedTrial, context: Any, *, test_mode: bool = False) -> None:
        self._trial = trial
        self._context = context
        self._full_dataset = util.is_overridden(trial.evaluate_full_dataset, det_ds.DeepSpeedTrial)
        self._takes_index = util.has_param(trial.evaluate_batch, "batch_idx", 2)
        self._test_mode = test_mode
        self._reducers = Reducers(context)
        self._loader: Any = None
        mpu = context._mpu
        if mpu.should_build_data_loader:
            loader = trial.build_validation_data_loader()
            # All of it on the chief, for evaluate_full_dataset; a share of it on each replica otherwise.
            replica, replicas = (
                (0, 1) if self._full_dataset else (mpu.data_parallel_rank, mpu.data_parallel_world_size)
            )
            self._loader = ValidationLoader(loader, replica=replica, replicas=replicas)
        speaks = self._loader is not None and mpu.should_report_metrics
        sizes = self._loader.sizes if self._loader else []
        ranks = context.distributed.allgather((mpu.data_parallel_rank if speaks else None, sizes))
        # Of the ranks that hold one replica, the last one counts: all of them report the same samples.
        counting = {replica: rank for rank, (replica, _) in enumerate(ranks) if replica is not None}
        self._counts = context.distributed.rank in counting.values()
        self._calls = CallPlan(
            [sizes for _, sizes in ranks],
            at_most=context.get_num_micro_batches_per_slot() if context.use_pipeline_parallel else None,
        )

    @torch.no_grad()
    def run(self, callbacks: list[Any]) -> dict[str, Any]:
        """Validate; a collective.

        Returns:
            The metrics, the same on every rank.
        """
        for model in self._context.models:
            model.eval()
        # What the reducers hold of the training since the last report, they hold after it too.
        with self._reducers.kept(), _evaluating(self._pipelines):
            self._context.reset_reducers()
            for callback in callbacks:
                callback.on_validation_start()
            metrics = self._on_chief() if self._full_dataset else self._in_batches(callbacks)
            # Every rank takes part: a custom reducer gathers from all of them.
            metrics.update(self._context.reduce_metrics(for_training=False) or {})
        metrics = self._context.distributed.broadcast(metrics)
        for model in self._context.models:
            model.train()
        return metrics

    def _on_chief(self) -> dict[str, Any]:
        if self._context.resolved.zero_stage == 3 or self._context.use_pipeline_parallel:
            raise TrainingError(
                "evaluate_full_dataset runs on the chief alone, which hangs where the model is spread over "
                "ranks (ZeRO 3, pipelines): define evaluate_batch instead"
            )
        if self._context.distributed.rank != 0:
            return {}
        metrics = self._trial.evaluate_full_dataset(self._loader._loader)
        if not isinstance(metrics, dict):
            raise TrainingError(
                f"evaluate_full_dataset returned {type(metrics).__name__}, not a dict of metrics"
            )
        return dict(metrics)

    def _in_batches(self, callbacks: list[Any]) -> dict[str, Any]:
        for callback in callbacks:
            callback.on_validation_epoch_start()
        batches = ValidationBatches(self._loader, self._calls.num_batches, self._trial.get_batch_length)
        sums = MetricSums(self._context.device, self._trial.evaluation_reducer())
        outputs: list[Any] = []
        index = 0
        while batches.remaining > 0:
            metrics, weight = self._evaluate(batches, index)
            sums.add(metrics, weight)
            if sum(batches.weights):
                outputs.append(metrics)
            index += 1
            if self._test_mode:
                break
        for callback in callbacks:
            callback.on_validation_epoch_end(outputs)
        return dict(sums.reduce())

    def _evaluate(self, batches: ValidationBatches, index: int) -> tuple[dict[str, Any], int]:
        """One ``evaluate_batch``, and the samples that it was about."""
        before = batches.remaining
        count = self._calls.next(before)
        for engine in self._pipelines:
            engine.micro_batches = count
        batches.start_call()
        padding = batches.exhausted
        with self._reducers.kept() if padding else contextlib.nullcontext():
            if self._takes_index:
                metrics = self._trial.evaluate_batch(batches, index)
            else:
                metrics = self._trial.evaluate_batch(batches)  # type: ignore[call-arg]
        if isinstance(metrics, torch.Tensor):
            metrics = {"loss": metrics}
        if not isinstance(metrics, dict):
            raise TrainingError(f"evaluate_batch returned {type(metrics).__name__}, not a dict of metrics")
        if self._loader is None:  # a pipeline's middle stage: keep step with the stages that load
            batches.skip(count)
        elif batches.remaining == before:
            raise TrainingError("evaluate_batch took no batch from its iterator: call next(dataloader_iter)")
        if not self._context._mpu.should_report_metrics:
            return {}, 0
        return metrics, sum(batches.weights) if self._counts else 0

    @property
    def _pipelines(self) -> list[Any]:
        return [model for model in self._context.models if isinstance(model, PipelineEngine)]


class CallPlan:
    """How many micro-batches each ``evaluate_batch`` of a pipeline takes.

    An engine averages over the micro-batches that it takes at once. So it never takes at once what does not
    weigh the same: the last one, which may be smaller, goes by itself, and so does a replica's padding.

    Args:
        sizes: Of each rank, the samples in each of its batches; empty where it has no data loader.
        at_most: Micro-batches that an engine takes at once; None where there is no pipeline.
    """

    def __init__(self, sizes: list[list[int]], *, at_most: int | None) -> None:
        self.num_batches = max(len(own) for own in sizes)
        weights = [
            tuple(own[index] if index < len(own) else 0 for own in sizes if own)
            for index in range(self.num_batches)
        ]
        self._left: dict[int, int] = {}  # batches left -> micro-batches of the call that begins there
        start = 0
        while start < self.num_batches:
            end = start + 1
            while end < self.num_batches and end - start < (at_most or 1) and weights[end] == weights[start]:
                end += 1
            for index in range(start, end):
                self._left[self.num_batches - index] = end - index
            start = end

    def next(self, left: int) -> int:
        """Micro-batches that the next call takes, with ``left`` yet to come."""
        return self._left[left]


@contextlib.contextmanager
def _evaluating(engines: list[Any]) -> Iterator[None]:
    """Pipelines that take micro-batches of other numbers and other sizes than in training.

    ``micro_batches`` is what ``eval_batch`` takes unless it is told, ``dynamic_shape`` sends every shape
    along instead of the first alone, ``is_data_parallel`` averages over replicas, which is ours.

    Source: ``PipelineEngine`` in deepspeed 0.19.8's ``runtime/pipe/engine.py``.
    """
    names = ("micro_batches", "dynamic_shape", "is_data_parallel")
    saved = [[getattr(engine, name) for name in names] for engine in engines]
    for engine in engines:
        engine.dynamic_shape, engine.is_data_parallel = True, False
    try:
        yield
    finally:
        for engine, values in zip(engines, saved, strict=True):
            for name, value in zip(names, values, strict=True):
                setattr(engine, name, value)
            engine.reset_activation_shape()
