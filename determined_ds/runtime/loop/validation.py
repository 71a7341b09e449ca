"""One pass over the validation data: every sample counts once, whatever the ranks and the micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from determined import util
from determined.pytorch import deepspeed as det_ds

from determined_ds.errors import TrainingError
from determined_ds.protocol.heartbeat import HEART
from determined_ds.runtime.data.first_rows import check_first_rows
from determined_ds.runtime.data.taken_over import build_loader
from determined_ds.runtime.data.validation_data import CallPlan, ValidationBatches, validation_share
from determined_ds.runtime.loop.metrics import MetricSums
from determined_ds.runtime.loop.plain_metrics import plain
from determined_ds.runtime.loop.progress import silent
from determined_ds.runtime.loop.reducers import Reducers
from determined_ds.trial import returned
from determined_ds.trial.author import method_of, metrics_source, wrong

METHODS = ("evaluate_batch", "evaluate", "loss")
# Batches of a stream that are read ahead, to ask the other ranks less often whether they have any.
AHEAD = 4


class Validator:
    """Runs a trial's ``evaluate_batch`` (or ``evaluate_full_dataset``) over its validation data.

    Args:
        trial: The trial.
        context: Its context.
        test_mode: Stop after one ``evaluate_batch``.
        note: Says something to the user.

    Attributes:
        dataset: What is validated on; None where this rank loads nothing.
    """

    def __init__(
        self,
        trial: det_ds.DeepSpeedTrial,
        context: Any,
        *,
        test_mode: bool = False,
        note: Callable[[str], None] = silent,
    ) -> None:
        self._trial = trial
        self._context = context
        self._note = note
        self._full_dataset = util.is_overridden(trial.evaluate_full_dataset, det_ds.DeepSpeedTrial)
        self._takes_index = util.has_param(trial.evaluate_batch, "batch_idx", 2)
        self._test_mode = test_mode
        self._checked_first = False
        self._reducers = Reducers(context)
        self._reducers.state_dict()  # a reducer that cannot be copied is refused now, before anything is trained
        # Metrics of several numbers that a warning has named; the chief's alone are shown.
        self._said: set[str] | None = set() if context.distributed.rank == 0 else None
        self.dataset: Any = None
        self._share: Any = None
        mpu = context._mpu
        if mpu.should_build_data_loader:
            loader = build_loader(trial, context, "build_validation_data_loader", note)
            self.dataset = getattr(loader, "dataset", None)
            # All of it on the chief, for evaluate_full_dataset; a share of it on each replica otherwise.
            replica, replicas = (
                (0, 1) if self._full_dataset else (mpu.data_parallel_rank, mpu.data_parallel_world_size)
            )
            seed = context.get_trial_seed()
            self._share = validation_share(
                loader, replica=replica, replicas=replicas, seed=seed, length_of=self._batch_length
            )
        speaks = self._share is not None and mpu.should_report_metrics
        sizes = self._share.sizes if self._share else []
        ranks = context.distributed.allgather((mpu.data_parallel_rank if speaks else None, sizes))
        # Of the ranks that hold one replica, the last one counts: all of them report the same samples.
        counting = {replica: rank for rank, (replica, _) in enumerate(ranks) if replica is not None}
        self._counts = context.distributed.rank in counting.values()
        self._at_most = context.get_num_micro_batches_per_slot() if context.use_pipeline_parallel else None
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
        name = "evaluate_full_dataset"
        with HEART.patiently():
            metrics = self._trial.evaluate_full_dataset(self._share)
        return plain(returned.metrics(self._trial, metrics, name), method_of(self._trial, name))

    def _in_batches(self, callbacks: list[Any]) -> dict[str, Any]:
        for callback in callbacks:
            callback.on_validation_epoch_start()
        reading = self._share.open() if self._share is not None else None
        batches = ValidationBatches(reading, self._plans(reading), self._batch_length)
        reducers = returned.evaluation_reducer(self._trial, self._trial.evaluation_reducer())
        source = metrics_source(self._trial, *METHODS)
        sums = MetricSums(self._context.device, reducers, source=source, said=self._said)
        outputs: list[Any] = []
        index = 0
        while count := batches.next_call():
            metrics, weight = self._evaluate(batches, count, index)
            sums.add(metrics, weight)
            if sum(batches.weights):
                outputs.append(metrics)
            index += 1
            HEART.beat()
            if self._test_mode:
                break
        for callback in callbacks:
            callback.on_validation_epoch_end(outputs)
        metrics = dict(sums.reduce())
        if isinstance(reducers, Mapping):
            self._check_reduced(reducers, metrics)
        return metrics

    def _batch_length(self, batch: Any) -> int:
        return returned.batch_length(self._trial, self._trial.get_batch_length(batch))

    def _check_reduced(self, reducers: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """A reducer of a metric that is not reported is a name that was misspelt."""
        for name in reducers:
            if name not in metrics:
                did = f"names {name!r}, which is not reported"
                known = ", ".join(metrics) or "none"
                problem = wrong(
                    self._trial, "evaluation_reducer", name, "names of metrics", f"use: {known}", did=did
                )
                raise TrainingError(str(problem))

    def _evaluate(self, batches: ValidationBatches, count: int, index: int) -> tuple[dict[str, Any], int]:
        """One ``evaluate_batch`` of so many micro-batches, and the samples that it was about."""
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
            raise TrainingError(str(wrong(self._trial, METHODS[0], None, "one or more", fix, did=did)))
        if not self._context._mpu.should_report_metrics:
            return {}, 0
        metrics = returned.metrics(self._trial, metrics, *METHODS)
        return metrics, sum(batches.weights) if self._counts else 0

    @property
    def _pipelines(self) -> list[Any]:
        return [model for model in self._context.models if isinstance(model, PipelineEngine)]


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
