"""The training loop: train a batch, see what is due, do it, until the end or until told to stop."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from determined import pytorch, tensorboard

from determined_ds.errors import CheckpointError, TrainingError
from determined_ds.runtime.boundaries import Due, Schedule
from determined_ds.runtime.checkpoint import Checkpoints, TrialState, spoil
from determined_ds.runtime.data import training_data
from determined_ds.runtime.metrics import MetricSums
from determined_ds.runtime.progress import Progress
from determined_ds.runtime.validation import Validator


class TrainingLoop:
    """Trains one trial.

    Args:
        trial: A ``DeepSpeedTrial`` whose engines are wrapped.
        context: Its context.
        lengths: Arguments of :class:`Schedule` but the epoch's length.
        checkpoint_policy: ``best``, ``all`` or ``none``: whether a validation is followed by a checkpoint.
        metric: The validation metric that ``best`` goes by.
        smaller_is_better: Of that metric.
        step_zero_validation: Validate before the first batch.
        test_mode: One batch trained, one validated, one checkpoint saved, loaded and validated again.
        progress: What the chief shows.
        trial_id: Of the trial, 0 off-cluster.
    """

    def __init__(
        self,
        trial: Any,
        context: Any,
        *,
        lengths: dict[str, Any],
        checkpoint_policy: str,
        metric: str,
        smaller_is_better: bool,
        step_zero_validation: bool,
        test_mode: bool,
        progress: Progress,
        trial_id: int,
    ) -> None:
        self._trial = trial
        self._context = context
        self._core = context._core
        self._lengths = lengths
        self._policy = checkpoint_policy
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self._step_zero_validation = step_zero_validation
        self._test_mode = test_mode
        self._progress = progress
        self._is_chief = context.distributed.rank == 0
        self._callbacks: dict[str, pytorch.PyTorchCallback] = trial.build_callbacks()
        self._checkpoints = Checkpoints(trial, context, self._callbacks)
        self._sums = MetricSums(context.device)
        self._state = TrialState(trial_id=trial_id)
        self._training_s = 0.0
        self._batches_timed = 0
        self._last_uuid = ""

    @property
    def callbacks(self) -> list[Any]:
        return list(self._callbacks.values())

    # ------------------------------------------------------------------------------------ start to end

    def run(self, latest_checkpoint: str | None) -> None:
        """Train to the end of the schedule, or until a stop is requested.

        Args:
            latest_checkpoint: Where to go on from.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._progress.stop)
            for callback in self.callbacks:
                callback.on_trial_startup(self._context.get_initial_batch(), latest_checkpoint)
                stack.callback(callback.on_trial_shutdown)
            validator = Validator(self._trial, self._context, test_mode=self._test_mode)
            self._validator = validator
            if latest_checkpoint is not None:
                self._state = self._checkpoints.load(latest_checkpoint, trial_id=self._state.trial_id)
            batches = self._open_training_data()
            self._progress.start(total=self._schedule.num_batches, done=self._state.batches_trained)
            for callback in self.callbacks:
                callback.on_training_start()
            if self._step_zero_validation and self._state.batches_trained == 0:
                self._validate()
            self._train(batches)
            if self._test_mode:
                self._prove_checkpoint()

    def _open_training_data(self) -> Iterator[Any] | None:
        context, mpu = self._context, self._context._mpu
        data = None
        if mpu.should_build_data_loader:
            data = training_data(
                self._trial.build_training_data_loader(),
                batch=context.resolved.batch,
                replica=mpu.data_parallel_rank,
                seed=context.get_trial_seed(),
                start_batch=self._state.batches_trained,
                manual=context._manual_grad_accumulation,
            )
        lengths = context.distributed.allgather(data.batches_per_epoch if data else None)
        per_epoch = min(length for length in lengths if length is not None)
        context._epoch_len = per_epoch
        self._schedule = Schedule(**self._lengths, batches_per_epoch=per_epoch)
        return data.batches if data else None

    def _train(self, batches: Iterator[Any] | None) -> None:
        for model in self._context.models:
            model.train()
        self._context.reset_reducers()
        self._set_status("training")
        while self._state.batches_trained < self._schedule.num_batches:
            self._train_one(batches)
            due = self._schedule.due(self._state.batches_trained)
            if due and self._do(due):
                return

    def _train_one(self, batches: Iterator[Any] | None) -> None:
        index = self._state.batches_trained
        epoch, in_epoch = divmod(index, self._schedule.batches_per_epoch)
        self._context._current_batch_idx = index
        if in_epoch == 0:
            for callback in self.callbacks:
                _on_epoch_start(callback, epoch)
        started = time.perf_counter()
        self._train_batch(batches, epoch, index)
        self._training_s += time.perf_counter() - started
        self._batches_timed += 1
        self._state.batches_trained += 1
        if in_epoch == self._schedule.batches_per_epoch - 1:
            self._state.epochs_trained = epoch + 1
            for callback in self.callbacks:
                callback.on_training_epoch_end(epoch)
        self._progress.step(self._state.batches_trained)

    def _train_batch(self, batches: Iterator[Any] | None, epoch: int, index: int) -> None:
        """One optimizer step: as many calls of the trial's ``train_batch`` as it takes."""
        context = self._context
        one_call = context.use_pipeline_parallel or context._manual_grad_accumulation
        context._loss_ids = {}
        for _ in range(1 if one_call else context.get_num_micro_batches_per_slot()):
            metrics = self._trial.train_batch(batches, epoch, index)
            if not context._mpu.should_report_metrics:
                continue
            if isinstance(metrics, torch.Tensor):
                metrics = {"loss": metrics}
            if not isinstance(metrics, dict):
                kind = type(metrics).__name__
                raise TrainingError(f"train_batch returned {kind}: return a dict of metrics, or the loss")
            self._sums.add(metrics)

    # ------------------------------------------------------------------------------------ what is due

    def _do(self, due: Due) -> bool:
        """Do what is due after a batch.

        Returns:
            Whether to stop before the end.
        """
        if due.report:
            self._report()
        if due.validate and self._state.last_validation != self._state.batches_trained:
            self._validate()
        if due.checkpoint and self._state.last_checkpoint != self._state.batches_trained:
            self._checkpoint()
        if self._context.get_enable_tensorboard_logging():
            self._context._maybe_reset_tbd_writer()
            self._core.train.upload_tensorboard_files(self._uploads, tensorboard.util.get_rank_aware_path)
        if due.end:
            return True
        stop: bool = self._core.preempt.should_preempt() or self._context.get_stop_requested()
        if stop and self._state.last_checkpoint != self._state.batches_trained:
            self._checkpoint()
        return stop

    def _report(self) -> None:
        """Report the training metrics since the last report; a collective."""
        metrics: dict[str, Any] = self._sums.reduce()
        metrics.update(self._context.reduce_metrics(for_training=True) or {})
        metrics.update(self._engine_metrics())
        metrics.update(self._position())
        for callback in self.callbacks:
            callback.on_training_workload_end(avg_metrics=metrics, batch_metrics=[])
        self._context.reset_reducers()
        if self._is_chief:
            self._write_tensorboard("train", metrics)
            done = self._state.batches_trained
            self._core.train.report_training_metrics(steps_completed=done, metrics=metrics)
            self._core.train.report_progress(min(1.0, done / self._schedule.num_batches))
            self._progress.report("training", done, metrics)

    def _engine_metrics(self) -> dict[str, Any]:
        engine = self._context.models[0]
        metrics: dict[str, Any] = {}
        rates = engine.get_lr() if engine.optimizer is not None else []
        if rates:
            metrics["lr"] = float(rates[0])
        norm = engine.get_global_grad_norm()
        if norm is not None:
            metrics["grad_norm"] = float(norm)
        if self._training_s:
            samples = self._batches_timed * self._context.resolved.batch.global_batch_size
            metrics["samples_per_second"] = samples / self._training_s
            tokens = getattr(self._trial, "tokens_per_sample", lambda: None)()
            if tokens:
                metrics["tokens_per_second"] = metrics["samples_per_second"] * tokens
        self._training_s, self._batches_timed = 0.0, 0
        return metrics

    def _position(self) -> dict[str, int]:
        return {"batches": self._state.batches_trained, "epochs": self._state.epochs_trained}

    def _validate(self) -> dict[str, Any]:
        self._set_status("validating")
        metrics = self._validator.run(self.callbacks)
        for callback in self.callbacks:
            callback.on_validation_end(metrics)
        self._state.last_validation = self._state.batches_trained
        best_before = None
        if self._is_chief:
            best_before = self._core.train.get_experiment_best_validation()
            self._write_tensorboard("val", metrics)
            reported = {**self._position(), **metrics}
            self._core.train.report_validation_metrics(
                steps_completed=self._state.batches_trained, metrics=reported
            )
            self._progress.report("validation", self._state.batches_trained, reported)
        # Only the chief asks what was best before; the others do as it does.
        if self._context.distributed.broadcast(self._worth_keeping(metrics, best_before)):
            self._checkpoint()
        self._set_status("training")
        return metrics

    def _worth_keeping(self, metrics: dict[str, Any], best_before: float | None) -> bool:
        if self._policy != "best" or self._state.batches_trained == 0:
            return self._policy == "all" and self._state.batches_trained > 0
        if self._metric not in metrics:
            known = ", ".join(sorted(metrics))
            raise TrainingError(
                f"checkpoint_policy best goes by searcher.metric {self._metric!r}, and the trial reports "
                f"{known}: set searcher.metric to one of them, or checkpoint_policy to all or none"
            )
        if best_before is None:
            return True
        now = float(metrics[self._metric])
        return now < best_before if self._smaller_is_better else now > best_before

    def _checkpoint(self) -> str:
        if self._state.last_checkpoint == self._state.batches_trained:
            return ""
        self._set_status("checkpointing")
        uuid = self._checkpoints.save(self._state)
        self._progress.note(f"checkpoint  batch {self._state.batches_trained}  {uuid}")
        self._set_status("training")
        self._last_uuid = uuid
        return uuid

    def _prove_checkpoint(self) -> None:
        """Spoil the weights, load the checkpoint back, and validate to the same number."""
        before = self._validator.run([])
        spoil(self._context.models)
        self._checkpoints.load(self._last_uuid, trial_id=self._state.trial_id)
        after = self._validator.run([])
        if before != after:
            raise CheckpointError(f"validated {before} before the checkpoint and {after} after loading it back")
        self._progress.note("test passed: trained, validated, saved, loaded back, validated to the same number")

    # ------------------------------------------------------------------------------------------- small

    def _uploads(self, path: pathlib.Path) -> bool:
        return self._is_chief or not path.match("*tfevents*")

    def _set_status(self, status: str) -> None:
        if self._is_chief:
            self._core.train.set_status(status)

    def _write_tensorboard(self, prefix: str, metrics: dict[str, Any]) -> None:
        """Scalars under Determined's names: ``Determined/loss``, ``Determined/val_loss`` as its harness has them."""
        if self._context.get_enable_tensorboard_logging():
            writer = self._context.get_tensorboard_writer()
            pytorch._log_tb_metrics(writer, prefix, self._state.batches_trained, metrics, None)


def _on_epoch_start(callback: Any, epoch: int) -> None:
    if inspect.signature(callback.on_training_epoch_start).parameters:
        callback.on_training_epoch_start(epoch)
    else:  # a form deprecated by Determined in 0.17.8
        callback.on_training_epoch_start()
