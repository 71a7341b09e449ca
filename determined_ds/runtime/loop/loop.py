"""The training loop: train a batch, do what is due, until the end or a stop request."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import NotFiniteError
from determined_ds.protocol.best import finite, is_better, not_finite
from determined_ds.protocol.heartbeat import HEART
from determined_ds.protocol.signals import TRAINED
from determined_ds.runtime.checkpoints.contents import check_callbacks
from determined_ds.runtime.checkpoints.saving import Checkpoints
from determined_ds.runtime.checkpoints.trial_state import TrialState
from determined_ds.runtime.data.loaders import build_loader, check_apart
from determined_ds.runtime.data.samples import METHOD, DataPlace, training_data
from determined_ds.runtime.data.seeds import seed_everything, set_rng_state
from determined_ds.runtime.data.streams import check_first_rows
from determined_ds.runtime.group.collectives import all_ranks_come, as_chief
from determined_ds.runtime.loop.boundaries import Due, Schedule
from determined_ds.runtime.loop.calls import METHODS, TrainCalls
from determined_ds.runtime.loop.custom_reducers import Reducers, searched
from determined_ds.runtime.loop.freezing import Freezing
from determined_ds.runtime.loop.metric_sums import MetricSums
from determined_ds.runtime.loop.progress import Progress
from determined_ds.runtime.loop.proof import prove_checkpoint
from determined_ds.runtime.loop.reporting import Reporter
from determined_ds.runtime.loop.settings import LoopOptions
from determined_ds.runtime.loop.step_end import StepEnd, attach
from determined_ds.runtime.loop.stopping import LossGuard, StopRequests, not_finite_validation
from determined_ds.runtime.loop.validation import Validator
from determined_ds.trial import returned
from determined_ds.trial.author import metrics_source
from determined_ds.trial.engine import print_communication
from determined_ds.trial.schedules import drive_by_validation

logger = logging.getLogger("determined_ds")

# How long ranks wait for each other after an error; one without an error waits in a collective, and never comes.
AGREE_S = 10.0


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
        self._sums = MetricSums(context.device, source=self._source, warned=warned)
        attach(self.callbacks, context.models)
        self._step_end = StepEnd(trial, self.callbacks)
        self._freezing = Freezing(trial, context.models)
        self._guard = LossGuard(context.device)
        self._stops = StopRequests(context)
        self._reporter = Reporter(trial, context, progress)
        self._state = TrialState(trial_id=options.trial_id)
        self._best_at = -1
        self._status = ""
        self._generators: dict[str, Any] = {}
        self._is_stopped = False
        self._closing = contextlib.ExitStack()
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
    def _source(self) -> str:
        """Where the training metrics come from, as messages say it."""
        return metrics_source(self._trial, *METHODS)

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
        with self:
            self.load(latest_checkpoint, fork)
            batches = self.begin()
            self._calls = TrainCalls(self._trial, self._context, batches)
            while self.goes_on:
                self._train_one()
                self.end_step()
            self.end()

    def __enter__(self) -> TrainingLoop:
        """Whatever happens between :meth:`load` and :meth:`end`, its callbacks and its display are ended."""
        self._closing.callback(self._progress.stop)
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)

    def load(self, latest_checkpoint: str | None, fork: Path | None = None) -> None:
        """Load the checkpoint, if there is one; a collective. Its arguments are those of :meth:`run`."""
        begins_with = latest_checkpoint or (fork.name if fork is not None else None)
        for callback in self.callbacks:
            callback.on_trial_startup(self._context.get_initial_batch(), begins_with)
            self._closing.callback(callback.on_trial_shutdown)
        self._validator = self._make_validator()
        self._context.reset_reducers()
        if latest_checkpoint is not None:
            self._read(latest_checkpoint)
        elif fork is not None:
            self._checkpoints.fork(fork)

    def _read(self, uuid: str) -> None:
        self._state, self._generators = self._checkpoints.load(uuid, trial_id=self._state.trial_id)

    def _make_validator(self) -> Any:
        note = self._progress.note
        return Validator(self._trial, self._context, test_mode=self._options.test_mode, note=note)

    def begin(self) -> Iterator[Any] | None:
        """Open the data, and do all that comes before the first batch; a collective.

        Returns:
            The micro-batches of this rank, from the one to train next; None where it loads none.
        """
        batches = self._open_training_data()
        self._context.adopt()
        self._progress.start(total=self._schedule.stated_batches, done=self._state.batches_trained)
        self._call_back("on_training_start")
        check_callbacks(self._callbacks)
        if self._options.step_zero_validation and self._state.batches_trained == 0:
            self._validate()
        self._set_modes()
        # Nothing is built from here on: the generators continue from where the checkpoint was made.
        if self._generators:
            set_rng_state(self._generators, self._context.device)
        else:  # replicas began alike, to build the same model; their dropout differs
            seed_everything(self._context.get_trial_seed() + self._context._mpu.data_parallel_rank)
        self._closing.enter_context(self._context.profiler or contextlib.nullcontext())
        self._set_status("training")
        self._stops.start(self._state.batches_trained)
        self._catch_up()
        return batches

    def _catch_up(self) -> None:
        """Validate where that failed at the end of an earlier process."""
        at_the_end = self._state.batches_trained == self._schedule.num_batches
        if at_the_end and self._state.last_validation != self._state.batches_trained:
            self._validate()

    def _set_modes(self) -> None:
        for model in self._context.models:
            model.train()

    def end(self) -> None:
        """What comes after the last batch; a collective."""
        print_communication()
        if self._options.test_mode:
            self._prove_checkpoint()
        else:
            self._progress.end(self._state, best_at=self._best_at)
        HEART.rest()

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

    # ------------------------------------------------------------------------------------ a step

    @property
    def goes_on(self) -> bool:
        """Whether there is another batch to train: neither is the schedule at its end, nor was a stop requested."""
        return not self._is_stopped and self._state.batches_trained < self._schedule.num_batches

    def begin_step(self) -> None:
        """A batch is about to be trained."""
        index = self._state.batches_trained
        epoch, is_first, _ = self._schedule.epoch_of(index)
        self._context._current_batch_idx = index
        if is_first:
            for callback in self.callbacks:
                # Without the epoch: a form deprecated by Determined in 0.17.8.
                takes_epoch = inspect.signature(callback.on_training_epoch_start).parameters
                callback.on_training_epoch_start(*((epoch,) if takes_epoch else ()))
        self._freezing.begin(index)
        self._reporter.batch_begins()
        self._context._loss_ids = {}

    def take(self, metrics: dict[str, Any]) -> None:
        """Add the training metrics of a micro-batch."""
        self._sums.add(metrics)
        self._step_end.take(metrics)

    def _train_one(self) -> None:
        self.begin_step()
        index = self._state.batches_trained
        for metrics in self._calls.train(self._schedule.epoch_of(index)[0], index):
            self.take(metrics)
        self._count_step()

    def _count_step(self) -> None:
        epoch, _, is_last = self._schedule.epoch_of(self._state.batches_trained)
        self._state.batches_trained += 1
        # Once a batch: a loss that is not finite stays in the sum that it was added to.
        self._guard.look(self._sums.running("loss"), self._state.batches_trained)
        TRAINED.set()
        if self._context.profiler is not None:
            self._context.profiler.step()
        if is_last:
            self._state.epochs_trained = epoch + 1
            self._call_back("on_training_epoch_end", epoch)
        self._freezing.end()
        self._step_end.call(self._state.batches_trained - 1)
        self._progress.step(self._state.batches_trained)
        HEART.step(self._state.batches_trained)

    def end_step(self) -> None:
        """Do what is due after a batch, and stop where that is requested; a collective where something is."""
        due = self._due()
        if due:
            self._do(due)
        if due.end:
            return
        if self._stops.due(self._state.batches_trained):
            self._stops.ask(self._state.batches_trained)
        if self._stops.requested:
            self._is_stopped = True
            self._checkpoint()
            done, total = self._state.batches_trained, self._schedule.stated_batches
            of = "" if total is None else f" of {total}"
            self._progress.note(f"stopped     batch {done}{of}, {self._stops.reason}")

    def _due(self) -> Due:
        return self._schedule.due(self._state.batches_trained)

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
        if self._options.metric:
            drive_by_validation(self._context.models, finite(metrics.get(self._options.metric)))
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
        load = functools.partial(self._checkpoints.load, self._last_uuid, trial_id=self._state.trial_id)
        same = prove_checkpoint(self._context, lambda: self._validator.run([]), load)
        self._progress.note(f"test passed: trained, validated, saved, loaded back, validated to {same}")

    def _set_status(self, status: str) -> None:
        if self._is_chief and status != self._status:
            self._status = status
            with HEART.patiently():  # a master may not answer for a while
                self._core.train.set_status(status)
