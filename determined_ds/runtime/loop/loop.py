"""The training loop: train a batch, do what is due, until the end or a stop request."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import CheckpointError, NotFiniteError
from determined_ds.protocol.best import is_better, not_finite
from determined_ds.protocol.heartbeat import HEART
from determined_ds.protocol.signals import TRAINED
from determined_ds.runtime.checkpoints.contents import check_callbacks
from determined_ds.runtime.checkpoints.saving import Checkpoints, scramble
from determined_ds.runtime.checkpoints.trial_state import TrialState
from determined_ds.runtime.data.loaders import build_loader, check_apart
from determined_ds.runtime.data.samples import METHOD, DataPlace, training_data
from determined_ds.runtime.data.seeds import seed_everything, set_rng_state
from determined_ds.runtime.data.streams import check_first_rows
from determined_ds.runtime.group.collectives import all_ranks_come, as_chief
from determined_ds.runtime.loop.boundaries import Due, Schedule
from determined_ds.runtime.loop.calls import METHODS, TrainCalls
from determined_ds.runtime.loop.custom_reducers import Reducers, is_same, searched
from determined_ds.runtime.loop.metric_sums import MetricSums
from determined_ds.runtime.loop.progress import Progress
from determined_ds.runtime.loop.reporting import Reporter
from determined_ds.runtime.loop.stopping import LossGuard, StopRequests, not_finite_validation
from determined_ds.runtime.loop.validation import Validator
from determined_ds.trial import returned
from determined_ds.trial.author import metrics_source
from determined_ds.trial.engine import print_communication

logger = logging.getLogger("determined_ds")

# Kernels of a GPU may add the same numbers in a different order each time. In bf16 that is the last of three digits.
GPU_TOLERANCE = 0.01
# How long ranks wait for each other after an error; one without an error waits in a collective, and never comes.
AGREE_S = 10.0
LENGTHS = ("max_length", "validation_period", "checkpoint_period", "reporting_period")


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a trial is trained; see :meth:`Trainer.fit`, whose arguments have these names.

    Args:
        lengths: Name of :data:`LENGTHS` -> ``TrainUnit`` or None.
        metric: The validation metric that ``checkpoint_policy: best`` goes by.
        smaller_is_better: Of that metric.
        trial_id: Of the trial, 0 off-cluster.
        time_metric: Of the searcher: what it reads from each validation as the trial's progress.
    """

    lengths: dict[str, Any] = field(default_factory=dict)
    checkpoint_policy: str = "best"
    step_zero_validation: bool = False
    test_mode: bool = False
    stop_on_nan: bool = True
    save_total_limit: int | None = None
    warm_start: str = "weights"
    metric: str = ""
    smaller_is_better: bool = True
    trial_id: int = 0
    time_metric: str = ""


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
        returned.engines(trial, context.models)
        self._callbacks = returned.callbacks(trial, trial.build_callbacks())
        warned: set[str] | None = set() if self._is_chief else None
        self._sums = MetricSums(context.device, source=metrics_source(trial, *METHODS), warned=warned)
        self._guard = LossGuard(context.device)
        self._stops = StopRequests(context)
        self._reporter = Reporter(trial, context, progress)
        self._state = TrialState(trial_id=options.trial_id)
        self._best_at = -1
        self._status = ""
        self._data_place = DataPlace()
        self._checkpoints = Checkpoints(
            trial,
            context,
            self._callbacks,
            {"metrics": self._sums, "reducers": Reducers(context), "data": self._data_place},
            options.save_total_limit,
            warm_start=options.warm_start,
            note=progress.note,
        )

    @property
    def callbacks(self) -> list[Any]:
        return list(self._callbacks.values())

    def _call_back(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(*args, **kwargs)

    # ------------------------------------------------------------------------------------ start to end

    def run(self, latest_checkpoint: str | None, fork: Path | None = None) -> None:
        """Train to the end of the schedule, or until a stop is requested.

        Args:
            latest_checkpoint: Uuid of the checkpoint to resume from.
            fork: Folder of a checkpoint of another run to start from; ignored with the former.
        """
        begins_with = latest_checkpoint or (fork.name if fork is not None else None)
        with contextlib.ExitStack() as stack:
            stack.callback(self._progress.stop)
            for callback in self.callbacks:
                callback.on_trial_startup(self._context.get_initial_batch(), begins_with)
                stack.callback(callback.on_trial_shutdown)
            batches, generators = self._prepare(latest_checkpoint, fork)
            for model in self._context.models:
                model.train()
            # Nothing is built from here on: the generators continue from where the checkpoint was made.
            if generators:
                set_rng_state(generators, self._context.device)
            else:  # replicas began alike, to build the same model; their dropout differs
                seed_everything(self._context.get_trial_seed() + self._context._mpu.data_parallel_rank)
            with self._context.profiler or contextlib.nullcontext():
                self._train(batches)
            print_communication()
            if self._options.test_mode:
                self._prove_checkpoint()
            else:
                self._progress.end(self._state, best_at=self._best_at)
            HEART.rest()

    def _prepare(
        self, latest_checkpoint: str | None, fork: Path | None
    ) -> tuple[Iterator[Any] | None, dict[str, Any]]:
        """Load the checkpoint and open the data. Returns the micro-batches, and the state of the generators."""
        test_mode, note = self._options.test_mode, self._progress.note
        self._validator = Validator(self._trial, self._context, test_mode=test_mode, note=note)
        self._context.reset_reducers()
        generators: dict[str, Any] = {}
        if latest_checkpoint is not None:
            self._state, generators = self._checkpoints.load(latest_checkpoint, trial_id=self._state.trial_id)
        elif fork is not None:
            self._checkpoints.fork(fork)
        batches = self._open_training_data()
        self._context.adopt()
        self._progress.start(total=self._schedule.num_batches, done=self._state.batches_trained)
        self._call_back("on_training_start")
        check_callbacks(self._callbacks)
        if self._options.step_zero_validation and self._state.batches_trained == 0:
            self._validate()
        return batches, generators

    def _open_training_data(self) -> Iterator[Any] | None:
        context, mpu = self._context, self._context._mpu
        data = None
        if mpu.should_build_data_loader:
            loader = build_loader(self._trial, context, METHOD, self._progress.note)
            check_apart(loader, self._validator.dataset)
            data = training_data(
                loader,
                batch=context.resolved.batch,
                replica=mpu.data_parallel_rank,
                seed=context.get_trial_seed(),
                start_batch=self._state.batches_trained,
                manual=context._manual_grad_accumulation,
                place=self._data_place.found,
                note=self._progress.note,
            )
            self._data_place.of = data.place
        ranks = context.distributed.allgather((data.batches_per_epoch, data.first) if data else None)
        loading = [rank for rank in ranks if rank is not None]
        check_first_rows([first for _, first in loading], self._progress.note)
        lengths = [length for length, _ in loading]
        per_epoch = None if None in lengths else min(lengths)
        context._epoch_len = per_epoch or sys.maxsize  # for Determined's is_epoch_start() and similar methods
        self._schedule = Schedule(**self._options.lengths, batches_per_epoch=per_epoch)
        return data.batches if data else None

    def _train(self, batches: Iterator[Any] | None) -> None:
        self._set_status("training")
        self._stops.start(self._state.batches_trained)
        self._calls = TrainCalls(self._trial, self._context, batches)
        at_the_end = self._state.batches_trained == self._schedule.num_batches
        if at_the_end and self._state.last_validation != self._state.batches_trained:
            self._validate()  # it failed at the end of an earlier process
        while self._state.batches_trained < self._schedule.num_batches:
            self._train_one()
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
                self._progress.note(f"stopped     batch {done} of {total}, {self._stops.reason}")
                return

    def _train_one(self) -> None:
        index = self._state.batches_trained
        epoch, is_first, is_last = self._schedule.epoch_of(index)
        self._context._current_batch_idx = index
        if is_first:
            for callback in self.callbacks:
                # Without the epoch: a form deprecated by Determined in 0.17.8.
                takes_epoch = inspect.signature(callback.on_training_epoch_start).parameters
                callback.on_training_epoch_start(*((epoch,) if takes_epoch else ()))
        self._reporter.batch_begins()
        self._context._loss_ids = {}
        for metrics in self._calls.train(epoch, index):
            self._sums.add(metrics)
        # Once a batch: a loss that is not finite stays in the sum that it was added to.
        self._guard.look(self._sums.running("loss"), index + 1)
        TRAINED.set()
        if self._context.profiler is not None:
            self._context.profiler.step()
        self._state.batches_trained += 1
        if is_last:
            self._state.epochs_trained = epoch + 1
            self._call_back("on_training_epoch_end", epoch)
        self._progress.step(self._state.batches_trained)
        HEART.step(self._state.batches_trained)

    # ------------------------------------------------------------------------------------ what is due

    def _do(self, due: Due) -> None:
        """Do what is due after a batch; a collective."""
        if due.report:
            self._report()
        elif due.validate or due.checkpoint:
            self._check_loss()
            self._reporter.pause()
        if due.validate and self._state.last_validation != self._state.batches_trained:
            with self._saved_before_error():
                is_worth_it = self._validate()
            if is_worth_it:
                self._checkpoint()
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
        metrics["batches"] = done
        self._call_back("on_training_workload_end", avg_metrics=metrics, batch_metrics=[])
        self._context.reset_reducers()
        self._reporter.training(done, metrics, progress=min(1.0, done / self._schedule.num_batches))

    def _check_loss(self) -> None:
        """Before the weights are used: stop if a loss behind them was not finite; a collective."""
        if self._options.stop_on_nan and any(self._context.distributed.allgather(bool(self._guard.flag))):
            self._guard.stop(self._context.distributed, self._last_uuid)

    @property
    def _last_uuid(self) -> str:
        return self._state.kept[-1] if self._state.kept else ""

    def _position(self) -> dict[str, int]:
        """What a validation reports beside its metrics; epochs only where something is counted in them.

        The web UI shows metrics in the order of their names: ``epochs``, though always 0, would be its first chart.
        """
        position = {"batches": self._state.batches_trained}
        if self._schedule.in_epochs or self._options.time_metric == "epochs":
            position["epochs"] = self._state.epochs_trained
        return position

    def _validate(self) -> bool:
        """Validate and report; a collective. Returns whether a checkpoint is due for it."""
        self._set_status("validating")
        metrics = self._validator.run(self.callbacks)
        self._call_back("on_validation_end", metrics)
        self._state.last_validation = self._state.batches_trained
        # Only the chief knows what was best before.
        better = as_chief(self._context.distributed, lambda: self._judge(metrics))
        self._check_validation(metrics)
        if better:
            self._best_at = self._state.batches_trained
        policy = self._options.checkpoint_policy
        worth_it = better if policy == "best" else policy == "all"
        if worth_it and self._state.batches_trained > 0:
            return True
        self._set_status("training")
        return False

    def _judge(self, metrics: dict[str, Any]) -> bool:
        """Report a validation, and return whether it is the best; on the chief."""
        best_before = self._reporter.validation(self._state.batches_trained, {**self._position(), **metrics})
        if not self._options.metric:
            return False
        now = searched(metrics, self._options.metric, self._trial)
        return is_better(now, best_before, smaller_is_better=self._options.smaller_is_better)

    def _check_validation(self, metrics: dict[str, Any]) -> None:
        """Stop before the weights are saved, or warn, where a metric is not finite; the same on all ranks."""
        if found := not_finite(metrics):
            message = not_finite_validation(
                found, self._options.metric, self._state.batches_trained, self._last_uuid
            )
            if self._options.stop_on_nan and self._options.metric in found:
                raise NotFiniteError(message)
            if self._is_chief:
                logger.warning("warning: %s", message)

    @contextlib.contextmanager
    def _saved_before_error(self) -> Iterator[None]:
        """Write a checkpoint before an error is raised, where all ranks have one and so can take part in it."""
        try:
            yield
        except NotFiniteError:
            raise
        except Exception:
            batch = self._state.batches_trained
            if self._state.last_checkpoint != batch and all_ranks_come(f"error/{batch}", within_s=AGREE_S):
                try:
                    self._checkpoint()
                except Exception as error:
                    if self._is_chief:
                        logger.warning("warning: no checkpoint was written before it: %s", error)
            raise

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
        """Scramble the weights, load the checkpoint back, and validate to the same number."""
        before = self._validator.run([])
        scramble(self._context.models)
        self._checkpoints.load(self._last_uuid, trial_id=self._state.trial_id)
        after = self._validator.run([])
        on_gpu = self._context.device.type == "cuda"
        if not is_same(before, after, tolerance=GPU_TOLERANCE if on_gpu else 0.0):
            raise CheckpointError(
                f"validated {before} before the checkpoint and {after} after loading it back"
            )
        same = f"the same number within {GPU_TOLERANCE:.1%}" if on_gpu else "the same number"
        self._progress.note(f"test passed: trained, validated, saved, loaded back, validated to {same}")

    def _set_status(self, status: str) -> None:
        if self._is_chief and status != self._status:
            self._status = status
            with HEART.patiently():  # a master may not answer for a while
                self._core.train.set_status(status)
