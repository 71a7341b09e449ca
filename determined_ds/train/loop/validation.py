"""One pass over the validation data: every sample counts once, for any number of ranks and any micro-batch size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from determined import util
from determined.pytorch import deepspeed as det_ds

from determined_ds.callbacks import Callback
from determined_ds.errors import TrainingError
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.data.loaders import build_loader
from determined_ds.train.data.shares import CallPlan, ValidationBatches, validation_share
from determined_ds.train.data.streams import check_first_rows
from determined_ds.train.loop.custom_reducers import Reducers, plain
from determined_ds.train.loop.declared_metrics import DeclaredMetrics
from determined_ds.train.loop.metric_sums import MetricSums
from determined_ds.trial import returned
from determined_ds.trial.author import failed, method_of, metrics_source

METHODS = ("evaluate_batch", "evaluate", "loss")
# Batches of a stream that are read ahead, to ask the other ranks less often whether they have any.
AHEAD = 4


class Validator:
    """Runs a trial's ``evaluate_batch`` (or ``evaluate_full_dataset``) over its validation data.

    Args:
        trial: The trial.
        context: Its context.
        test_mode: Stop after one ``evaluate_batch``, or some where a metric is over all predictions.
        note: Shows a line to the user.

    Attributes:
        dataset: What is validated on; None where this rank loads nothing.
    """

    loader_method = "build_validation_data_loader"
    takes_full_dataset = True

    def __init__(
        self,
        trial: det_ds.DeepSpeedTrial,
        context: Any,
        *,
        test_mode: bool = False,
        note: Callable[[str], None] = print,
    ) -> None:
        self._trial = trial
        self._context = context
        self._note = note
        is_whole = util.is_overridden(trial.evaluate_full_dataset, det_ds.DeepSpeedTrial)
        self._full_dataset = is_whole and self.takes_full_dataset
        in_batches = not (self._full_dataset or context.use_pipeline_parallel)
        self._declared = DeclaredMetrics(trial, in_batches=in_batches)
        self._takes_index = util.has_param(trial.evaluate_batch, "batch_idx", 2)
        self._test_mode = test_mode
        self._checked_first = False
        self._reducers = Reducers(context)
        self._reducers.state_dict()  # a reducer that cannot be copied fails now, before anything is trained
        # Metrics of several numbers that a warning has named; only the chief's warnings are shown.
        self._warned: set[str] | None = set() if context.distributed.rank == 0 else None
        self._at_most = context.get_num_micro_batches_per_slot() if context.use_pipeline_parallel else None
        self._open_data()

    def _open_data(self) -> None:
        """Build the loader, and exchange the sizes of its batches; a collective."""
        mpu, distributed = self._context._mpu, self._context.distributed
        self.dataset: Any = None
        self._share: Any = None
        if mpu.should_build_data_loader:
            loader = build_loader(self._trial, self._context, self.loader_method, self._note)
            self.dataset = getattr(loader, "dataset", None)
            # All of it on the chief, for evaluate_full_dataset; a share of it on each replica otherwise.
            replica, replicas = mpu.data_parallel_rank, mpu.data_parallel_world_size
            place = {"replica": 0, "replicas": 1}
            if not self._full_dataset:
                place = {"replica": replica, "replicas": replicas}
            seed = self._context.get_trial_seed()
            self._share = validation_share(loader, length_of=self._batch_length, seed=seed, **place)
        speaks = self._share is not None and mpu.should_report_metrics
        sizes = self._share.sizes if self._share else []
        ranks = distributed.allgather((mpu.data_parallel_rank if speaks else None, sizes))
        # Of the ranks that hold one replica, only the last counts: all of them report the same samples.
        counting = {replica: rank for rank, (replica, _) in enumerate(ranks) if replica is not None}
        self._counts = distributed.rank in counting.values()
        self._sizes = None if any(sizes is None for _, sizes in ranks) else [sizes for _, sizes in ranks]

    def _plans(self, reading: Any) -> Iterator[CallPlan]:
        """The plan of all batches, where their number is known; otherwise of the next ones, by a collective each."""
        if self._sizes is not None:
            yield CallPlan(self._sizes, at_most=self._at_most)
            return
        while True:
            ahead = reading.ahead(max(AHEAD, self._at_most or 1)) if reading is not None else []
            first = reading.first if reading is not None else None
            ranks = self._context.distributed.allgather((ahead, first))
            if not self._checked_first:
                self._checked_first = True
                check_first_rows([row for _, row in ranks], self._note)
            plan = CallPlan([sizes for sizes, _ in ranks], at_most=self._at_most)
            if not plan.num_batches:
                return
            yield plan

    @torch.no_grad()
    def run(self, callbacks: list[Any]) -> dict[str, Any]:
        """Validate; a collective. Returns the metrics, the same on every rank."""
        for model in self._context.models:
            model.eval()
        # The reducers keep what they hold of the training since the last report.
        with self._reducers.kept(), evaluating(self._pipelines), averaged(callbacks):
            self._context.reset_reducers()
            for callback in callbacks:
                callback.on_validation_start()
            metrics = self._on_chief() if self._full_dataset else self._in_batches(callbacks)
            # Every rank takes part: a custom reducer gathers from all of them.
            metrics.update(self._context.reduce_metrics(for_training=False) or {})
        metrics = self._context.distributed.broadcast(metrics)
        self._declared.check_reported(metrics)
        for model in self._context.models:
            model.train()
        return metrics

    def _on_chief(self) -> dict[str, Any]:
        strategy = self._context.resolved.strategy
        shared = (
            strategy.expert_parallel_size,
            strategy.model_parallel_size,
            strategy.sequence_parallel_size,
        )
        if self._context.resolved.zero_stage == 3 or self._context.use_pipeline_parallel or max(shared) > 1:
            raise TrainingError(
                "evaluate_full_dataset runs on the chief alone, which hangs where ranks compute a batch together "
                "(ZeRO 3; pipeline, expert, tensor and sequence parallel): define evaluate_batch instead"
            )
        if self._context.distributed.rank != 0:
            return {}
        name = "evaluate_full_dataset"
        with HEART.patiently():
            metrics = self._trial.evaluate_full_dataset(self._share)
        return plain(returned.metrics(self._trial, metrics, name), method_of(self._trial, name))

    def _in_batches(self, callbacks: list[Any]) -> dict[str, Any]:
        for callback in callbacks:
            callback.on_validation_epoch_start()
        reading = self._share.open() if self._share is not None else None
        batches = ValidationBatches(reading, self._plans(reading), self._batch_length)
        stated = returned.evaluation_reducer(self._trial, self._trial.evaluation_reducer())
        reducers = self._declared.with_reducers(stated)
        self._declared.forget()
        source = metrics_source(self._trial, *METHODS)
        sums = MetricSums(self._context.device, reducers, source=source, warned=self._warned)
        outputs: list[Any] = []
        index = 0
        while count := batches.next_call():
            metrics, weight = self._evaluate(batches, count, index)
            metrics = self._declared.take(metrics, index, counts=weight > 0)
            sums.add(metrics, weight)
            if sum(batches.weights):
                outputs.append(metrics)
            index += 1
            HEART.beat()
            if self._test_mode and index >= self._declared.test_batches:
                break
        for callback in callbacks:
            callback.on_validation_epoch_end(outputs)
        metrics = dict(sums.reduce())
        metrics.update(
            self._declared.compute(self._context.distributed, self._context._mpu.data_parallel_rank)
        )
        if isinstance(stated, Mapping):
            self._check_reduced(stated, metrics)
        return metrics

    def _batch_length(self, batch: Any) -> int:
        return returned.batch_length(self._trial, self._trial.get_batch_length(batch))

    def _check_reduced(self, reducers: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """A reducer for a metric that is not reported has a misspelled name."""
        for name in reducers:
            if name not in metrics:
                did, fix = f"names {name!r}, which is not reported", f"use: {', '.join(metrics) or 'none'}"
                raise failed(
                    self._trial, "evaluation_reducer", name, "names of reported metrics", fix, did=did
                )

    def _evaluate(self, batches: ValidationBatches, count: int, index: int) -> tuple[dict[str, Any], int]:
        """One ``evaluate_batch`` of ``count`` micro-batches: its metrics, and the samples that they are about."""
        before = batches.taken
        for engine in self._pipelines:
            engine.micro_batches = count
        batches.start_call()
        padding = batches.exhausted
        with self._reducers.kept() if padding else contextlib.nullcontext():
            if self._takes_index:
                metrics = self._trial.evaluate_batch(batches, index)
            else:
                metrics = self._trial.evaluate_batch(batches)  # type: ignore[call-arg]
        if self._share is None:  # a pipeline's middle stage: keep step with the stages that load
            batches.skip(count)
        elif batches.taken == before:
            did, fix = "took no batch from its iterator", "call next(dataloader_iter)"
            raise failed(self._trial, METHODS[0], None, "one or more", fix, did=did)
        if not self._context._mpu.should_report_metrics:
            return {}, 0
        metrics = returned.metrics(self._trial, metrics, *METHODS)
        return metrics, sum(batches.weights) if self._counts else 0

    @property
    def _pipelines(self) -> list[Any]:
        return [model for model in self._context.models if isinstance(model, PipelineEngine)]


@contextlib.contextmanager
def averaged(callbacks: list[Any]) -> Iterator[None]:
    """What callbacks have the engines compute with while they evaluate."""
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, Callback):
                stack.enter_context(callback.validating())
        yield


@contextlib.contextmanager
def evaluating(engines: list[Any]) -> Iterator[None]:
    """Let pipelines take other numbers and sizes of micro-batches than in training.

    ``micro_batches`` is how many ``eval_batch`` takes by default, ``dynamic_shape`` sends every shape along instead of
    the first alone, ``is_data_parallel`` averages over replicas, which the loop does itself.

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
