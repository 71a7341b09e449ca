"""The training loop: train a batch, do what is due, until the end or a stop request."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from determined import core

from determined_ds.checkpoints.safe_load import check_callbacks
from determined_ds.config.params import ProfiledSteps
from determined_ds.logs.tensorboard import uploaded_to
from determined_ds.profile.capture import Capture, capture_of
from determined_ds.report.results import PROFILE_DIR
from determined_ds.rundir.heartbeat import HEART
from determined_ds.rundir.signals import TRAINED
from determined_ds.train.data.loaders import build_loader, check_apart
from determined_ds.train.data.samples import METHOD, training_data
from determined_ds.train.data.seeds import are_by_layer, seed_everything, set_rng_state
from determined_ds.train.data.streams import check_first_rows
from determined_ds.train.expected_memory import record_estimate
from determined_ds.train.loop.boundaries import Schedule
from determined_ds.train.loop.calls import TrainCalls
from determined_ds.train.loop.due_after_step import DueAfterStep
from determined_ds.train.loop.freezing import Freezing
from determined_ds.train.loop.progress import Progress
from determined_ds.train.loop.proof import prove_checkpoint
from determined_ds.train.loop.settings import LoopOptions
from determined_ds.train.loop.step_end import StepEnd, attach
from determined_ds.train.loop.validation import Validator
from determined_ds.train.scripts.given_run import cluster_info
from determined_ds.trial.pipeline_module import seed_layers
from determined_ds.trial.printing import print_communication


class TrainingLoop(DueAfterStep):
    """Trains one trial.

    Args:
        trial: A ``DeepSpeedTrial`` whose engines are wrapped.
        context: Its context.
        options: How.
        progress: What the chief shows.
    """

    def __init__(self, trial: Any, context: Any, options: LoopOptions, progress: Progress) -> None:
        super().__init__(trial, context, options, progress)
        attach(self.callbacks, context.models)
        self._step_end = StepEnd(trial, self.callbacks)
        self._freezing = Freezing(trial, context.models)
        self._generators: dict[str, Any] = {}
        self._capture: Capture | None = None
        self._closing = contextlib.ExitStack()

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
            if not self._options.test_mode:  # a task may have been preempted while it started
                self._stops.ask(self._state.batches_trained)
                self._stops.start(self._state.batches_trained)
                if self._stops.requested:
                    self._stop()
            while self.goes_on:
                self._train_one()
                self.end_step()
            self.end()

    def __enter__(self) -> TrainingLoop:
        """Whatever happens between :meth:`load` and :meth:`end`, its callbacks and its display are ended."""
        self._closing.callback(self._progress.stop)
        self._closing.callback(self._checkpoints.abandon)
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
        record_estimate(self._trial, self._context)
        self._progress.start(
            total=self._schedule.stated_batches,
            done=self._state.batches_trained,
            metric=self._options.metric,
            smaller_is_better=self._options.smaller_is_better,
        )
        self._call_back("on_training_start")
        check_callbacks(self._callbacks)
        self._checkpoints.prepare(self._options.asynchronous_checkpoints)
        if self._options.step_zero_validation and self._state.batches_trained == 0:
            self._validate()
        self._set_modes()
        self._seed()  # nothing is built from here on
        self._closing.enter_context(self._context.profiler or contextlib.nullcontext())
        self._set_status("training")
        self._stops.start(self._state.batches_trained)
        self._catch_up()
        if self._options.profile is not None:
            batches = self._record(self._options.profile, batches)
        return batches

    def _seed(self) -> None:
        """Have random numbers continue from where the checkpoint was made, or begin."""
        mpu, seed = self._context._mpu, self._context.get_trial_seed()
        if self._generators:
            set_rng_state(self._generators, self._context.device)
        else:  # ranks began alike, to build the same model; the dropout of replicas and of slices differs
            size = self._context.resolved.topology.sequence_parallel_size
            slices_before = self._context.distributed.rank % size * mpu.data_parallel_world_size
            seed_everything(seed + mpu.data_parallel_rank + slices_before)
        if are_by_layer(self._generators):
            seed_layers(self._context.models, seed, mpu.data_parallel_rank)

    def _record(self, steps: ProfiledSteps, batches: Iterator[Any] | None) -> Iterator[Any] | None:
        """Have steps recorded by torch's profiler; returns the micro-batches, for which waiting is recorded too."""
        context, note = self._context, self._progress.note
        folder, kept_in = Path(context._run_dir.path) / PROFILE_DIR, ""
        if not isinstance(context._core.train, core.DummyTrainContext):  # beside the files that are uploaded
            folder = Path(context._core.train.get_tensorboard_path()) / PROFILE_DIR
            kept_in = f"{uploaded_to(cluster_info())}/{PROFILE_DIR}"
        self._capture = capture = capture_of(steps, context, folder=folder, note=note, kept_in=kept_in)
        self._closing.callback(capture.close)
        return None if batches is None else capture.data(batches)

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
        self._checkpoints.finish()
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
        if self._capture is not None:
            self._capture.begin_step()
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
        if self._capture is not None:
            self._capture.end_step(self._state.batches_trained)

    def _prove_checkpoint(self) -> None:
        load = functools.partial(self._checkpoints.load, self._last_uuid, trial_id=self._state.trial_id)
        same = prove_checkpoint(self._context, lambda: self._validator.run([]), load)
        self._progress.note(f"test passed: trained, validated, saved, loaded back, validated to {same}")
