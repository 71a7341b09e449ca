"""The training loop: train a batch, see what is due, do it, until the end or until told to stop."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from determined import pytorch

from determined_ds.errors import CheckpointError, ConfigError, Problem, TrainingError
from determined_ds.runtime.boundaries import Due, Schedule
from determined_ds.runtime.checkpoint import Checkpoints, TrialState, spoil
from determined_ds.runtime.data import training_data
from determined_ds.runtime.generators import seed_everything, set_rng_state
from determined_ds.runtime.metrics import MetricSums
from determined_ds.runtime.progress import Progress
from determined_ds.runtime.reducers import Reducers
from determined_ds.runtime.reporting import Reporter
from determined_ds.runtime.stopping import LossGuard, StopRequests
from determined_ds.runtime.validation import Validator


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a trial is trained.

    Args:
        lengths: Arguments of :class:`Schedule` but the epoch's length.
        checkpoint_policy: ``best``, ``all`` or ``none``: whether a validation is followed by a checkpoint.
        metric: The validation metric that ``best`` goes by.
        smaller_is_better: Of that metric.
        step_zero_validation: Validate before the first batch.
        test_mode: One batch trained, one validated, one checkpoint saved, loaded and validated again.
        stop_on_nan: Stop at a loss that is not finite.
        save_total_limit: Checkpoints to keep at most; None: all.
        trial_id: Of the trial, 0 off-cluster.
    """

    lengths: dict[str, Any] = field(default_factory=dict)
    checkpoint_policy: str = "best"
    metric: str = ""
    smaller_is_better: bool = True
    step_zero_validation: bool = False
    test_mode: bool = False
    stop_on_nan: bool = True
    save_total_limit: int | None = None
    trial_id: int = 0


class TrainingLoop:
    """Trains one trial.

    Args:
        trial: A ``DeepSpeedTrial`` whose engines are wrapped.
        context: Its context.
        options: How.
        progress: What the chief shows.
    """

    def __init__(self, trial: Any, context: Any, options: LoopOptions, progress: Progress) -> None:
        self._trial = trial
        self._context = context
        self._core = context._core
        self._options = options
        self._progress = progress
        self._is_chief = context.distributed.rank == 0
        self._callbacks: dict[str, pytorch.PyTorchCallback] = trial.build_callbacks()
        self._sums = MetricSums(context.device)
        self._guard = LossGuard(context.device)
        self._stops = StopRequests(context)
        self._reporter = Reporter(trial, context, progress)
        self._state = TrialState(trial_id=options.trial_id)
        self._best_at = -1
        self._status = ""
        self._checkpoints = Checkpoints(
            trial,
            context,
            self._callbacks,
            {"metrics": self._sums, "reducers": Reducers(context)},
            options.save_total_limit,
        )

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
            self._validator = Validator(self._trial, self._context, test_mode=self._options.test_mode)
            self._context.reset_reducers()
            generators: dict[str, Any] = {}
            if latest_checkpoint is not None:
                self._state, generators = self._checkpoints.load(
                    latest_checkpoint, trial_id=self._state.trial_id
                )
            batches = self._open_training_data()
            self._progress.start(total=self._schedule.num_batches, done=self._state.batches_trained)
            for callback in self.callbacks:
                callback.on_training_start()
            if self._options.step_zero_validation and self._state.batches_trained == 0:
                self._validate()
            for model in self._context.models:
                model.train()
            # Nothing is built from here on: the generators go on from where the checkpoint was made.
            if generators:
                set_rng_state(generators, self._context.device)
            else:  # replicas began alike, to build the same model; what they drop out is each one's own
                seed_everything(self._context.get_trial_seed() + self._context._mpu.data_parallel_rank)
            profiler = self._context.profiler
            with profiler if profiler is not None else contextlib.nullcontext():
                self._train(batches)
            if self._options.test_mode:
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
        self._schedule = Schedule(**self._options.lengths, batches_per_epoch=per_epoch)
        return data.batches if data else None

    def _train(self, batches: Iterator[Any] | None) -> None:
        self._set_status("training")
        self._stops.start(self._state.batches_trained)
        while self._state.batches_trained < self._schedule.num_batches:
            self._train_one(batches)
            due = self._schedule.due(self._state.batches_trained)
            if due:
                self._do(due)
            if due.end:
                return
            if self._stops.due(self._state.batches_trained):
                self._stops.ask(self._state.batches_trained)
            if self._stops.requested:
                self._checkpoint()
                done, total = self._state.batches_trained, self._schedule.num_batches
                self._progress.note(f"stopped     batch {done} of {total}, as requested")
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
        if self._context.profiler is not None:
            self._context.profiler.step()
        self._reporter.timed(time.perf_counter() - started)
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
        # Once a batch: a loss that is not finite stays in the sum that it was added to.
        self._guard.look(self._sums.running("loss"), index + 1)

    # ------------------------------------------------------------------------------------ what is due

    def _do(self, due: Due) -> None:
        """Do what is due after a batch; a collective."""
        if due.report:
            self._report()
        elif due.validate or due.checkpoint:
            self._check_loss()
        if due.validate and self._state.last_validation != self._state.batches_trained:
            self._validate()
        if due.checkpoint:
            self._checkpoint()
        if due.validate or due.checkpoint:
            self._reporter.upload()
            if not due.end:  # they may have taken long
                self._stops.ask(self._state.batches_trained)

    def _report(self) -> None:
        done = self._state.batches_trained
        riders = torch.cat([self._guard.flag.reshape(1), self._stops.vote(done)])
        metrics, (num_bad, *votes) = self._reporter.reduce(self._sums, riders)
        if num_bad and self._options.stop_on_nan:
            self._guard.stop(self._context.distributed, self._last_uuid)
        self._stops.count(votes, done)
        metrics.update(self._position())
        for callback in self.callbacks:
            callback.on_training_workload_end(avg_metrics=metrics, batch_metrics=[])
        self._context.reset_reducers()
        self._reporter.training(done, metrics, progress=min(1.0, done / self._schedule.num_batches))

    def _check_loss(self) -> None:
        """Before anything is made of the weights: that no loss behind them was not finite."""
        if self._options.stop_on_nan and any(self._context.distributed.allgather(bool(self._guard.flag))):
            self._guard.stop(self._context.distributed, self._last_uuid)

    @property
    def _last_uuid(self) -> str:
        return self._state.kept[-1] if self._state.kept else ""

    def _position(self) -> dict[str, int]:
        return {"batches": self._state.batches_trained, "epochs": self._state.epochs_trained}

    def _validate(self) -> None:
        self._set_status("validating")
        metrics = self._validator.run(self.callbacks)
        for callback in self.callbacks:
            callback.on_validation_end(metrics)
        self._state.last_validation = self._state.batches_trained
        best_before = self._reporter.validation(self._state.batches_trained, {**self._position(), **metrics})
        # Only the chief knows what was best before; the others do as it does.
        better = self._context.distributed.broadcast(self._is_better(metrics, best_before))
        worth_it = self._options.checkpoint_policy == "all" or (
            better and self._options.checkpoint_policy == "best"
        )
        if better:
            self._best_at = self._state.batches_trained
        if worth_it and self._state.batches_trained > 0:
            self._checkpoint()
        self._set_status("training")

    def _is_better(self, metrics: dict[str, Any], best_before: float | None) -> bool:
        name = self._options.metric
        if not name:
            return False
        if name not in metrics:
            known = ", ".join(sorted(metrics))
            raise ConfigError(
                Problem(
                    key="searcher.metric",
                    value=name,
                    message=f"the trial reports {known}",
                    mend=f"name one of them: {known}",
                    code="searcher-metric",
                )
            )
        if best_before is None:
            return True
        now = float(metrics[name])
        return now < best_before if self._options.smaller_is_better else now > best_before

    def _checkpoint(self) -> None:
        if self._state.last_checkpoint == self._state.batches_trained:
            return
        self._check_loss()
        self._set_status("checkpointing")
        best = self._best_at == self._state.batches_trained
        uuid = self._checkpoints.save(self._state, best=best)
        self._progress.note(f"checkpoint  batch {self._state.batches_trained}  {uuid}")
        self._set_status("training")

    def _prove_checkpoint(self) -> None:
        """Spoil the weights, load the checkpoint back, and validate to the same number."""
        before = self._validator.run([])
        spoil(self._context.models)
        self._checkpoints.load(self._last_uuid, trial_id=self._state.trial_id)
        after = self._validator.run([])
        if before != after:
            raise CheckpointError(
                f"validated {before} before the checkpoint and {after} after loading it back"
            )
        self._progress.note(
            "test passed: trained, validated, saved, loaded back, validated to the same number"
        )

    def _set_status(self, status: str) -> None:
        if self._is_chief and status != self._status:
            self._status = status
            self._core.train.set_status(status)


def _on_epoch_start(callback: Any, epoch: int) -> None:
    if inspect.signature(callback.on_training_epoch_start).parameters:
        callback.on_training_epoch_start(epoch)
    else:  # a form deprecated by Determined in 0.17.8
        callback.on_training_epoch_start()
