"""One pass over the validation data: every sample counts once, whatever the ranks and the micro-batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from determined import util
from determined.pytorch import deepspeed as det_ds

from determined_ds.errors import TrainingError
from determined_ds.runtime.data import ValidationBatches, ValidationLoader
from determined_ds.runtime.metrics import MetricSums


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
        self._loader: Any = None
        mpu = context._mpu
        if mpu.should_build_data_loader:
            loader = trial.build_validation_data_loader()
            # The whole of it on the chief, for evaluate_full_dataset; a share of it on each replica otherwise.
            replica, replicas = (
                (0, 1) if self._full_dataset else (mpu.data_parallel_rank, mpu.data_parallel_world_size)
            )
            self._loader = ValidationLoader(loader, replica=replica, replicas=replicas)
        lengths = context.distributed.allgather(self._loader.num_batches if self._loader else 0)
        self._num_batches = max(lengths)

    @torch.no_grad()
    def run(self, callbacks: list[Any]) -> dict[str, Any]:
        """Validate; a collective.

        Returns:
            The metrics, the same on every rank.
        """
        for model in self._context.models:
            model.eval()
        with self._reducers_kept():  # what they hold of the training since the last report
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
            raise TrainingError(f"evaluate_full_dataset returned {type(metrics).__name__}, not a dict of metrics")
        return dict(metrics)

    def _in_batches(self, callbacks: list[Any]) -> dict[str, Any]:
        for callback in callbacks:
            callback.on_validation_epoch_start()
        batches = ValidationBatches(self._loader, self._num_batches, self._trial.get_batch_length)
        sums = MetricSums(self._context.device, self._trial.evaluation_reducer())
        outputs: list[Any] = []
        index = 0
        while batches.remaining > 0:
            metrics, weight = self._evaluate(batches, index)
            sums.add(metrics, weight)
            if weight:
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
        batches.start_call()
        padding = batches.exhausted
        with self._reducers_kept() if padding else contextlib.nullcontext():
            if self._takes_index:
                metrics = self._trial.evaluate_batch(batches, index)
            else:
                metrics = self._trial.evaluate_batch(batches)  # type: ignore[call-arg]
        if isinstance(metrics, torch.Tensor):
            metrics = {"loss": metrics}
        if not isinstance(metrics, dict):
            raise TrainingError(f"evaluate_batch returned {type(metrics).__name__}, not a dict of metrics")
        if self._loader is None:  # a pipeline's middle stage: keep step with the stages that load
            full = self._context.get_num_micro_batches_per_slot()
            batches.skip(min(full, before))
        elif batches.remaining == before:
            raise TrainingError("evaluate_batch took no batch from its iterator: call next(dataloader_iter)")
        if not self._context._mpu.should_report_metrics:
            return {}, 0
        return metrics, sum(batches.weights)

    @contextlib.contextmanager
    def _reducers_kept(self) -> Iterator[None]:
        """Custom reducers end with the values they began with."""
        reducers = [wrapped.reducer for wrapped in self._context._wrapped_reducers]
        saved = [copy.deepcopy(vars(reducer)) for reducer in reducers]
        yield
        for reducer, state in zip(reducers, saved, strict=True):
            vars(reducer).clear()
            vars(reducer).update(state)
