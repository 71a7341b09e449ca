"""What is due after a batch: report, validate, write a checkpoint, stop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from determined_ds.checkpoints.rank_state import TrialState
from determined_ds.checkpoints.retention import finite, is_better, not_finite
from determined_ds.checkpoints.writer import Checkpoints
from determined_ds.errors import NotFiniteError
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.data.samples import DataPlace
from determined_ds.train.group.collectives import all_ranks_come, as_chief
from determined_ds.train.loop.boundaries import Due, Schedule
from determined_ds.train.loop.calls import METHODS
from determined_ds.train.loop.custom_reducers import Reducers, searched
from determined_ds.train.loop.metric_sums import MetricSums
from determined_ds.train.loop.progress import Progress
from determined_ds.train.loop.reporting import Reporter
from determined_ds.train.loop.settings import LoopOptions
from determined_ds.train.loop.stopping import (
    CheckpointClock,
    LossGuard,
    StopRequests,
    not_finite_validation,
)
from determined_ds.trial import returned
from determined_ds.trial.author import metrics_source
from determined_ds.trial.schedules import drive_by_validation

logger = logging.getLogger("determined_ds")

# How long ranks wait for each other after an error; one without an error waits in a collective, and never comes.
AGREE_S = 10.0


class DueAfterStep:
    """A training at the end of a batch. Who trains the batches sets the schedule and the validator.

    Args:
        trial: A ``DeepSpeedTrial`` whose engines are wrapped.
        context: Its context.
        options: How.
        progress: What the chief shows.
    """

    _schedule: Schedule
    _validator: Any

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
        self._guard = LossGuard(context.device)
        self._clock = CheckpointClock(options.lengths.get("checkpoint_period"))
        self._reporter = Reporter(trial, context, progress)
        self._state = TrialState(trial_id=options.trial_id)
        self._best_at = -1
        self._status = ""
        self._is_stopped = False
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
        self._stops = StopRequests(context, self._clock, self._checkpoints)

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

    # ------------------------------------------------------------------------------------ the end of a batch

    def end_step(self) -> None:
        """Do what is due after a batch, and stop where that is requested; a collective where something is."""
        due = self._due()
        if due:
            self._do(due)
        if due.end:
            return
        if self._stops.due(self._state.batches_trained):
            self._ask()
        if self._stops.checkpoint_due:
            self._do(Due(checkpoint=True))
        if self._stops.requested:
            self._stop()

    def _stop(self) -> None:
        """Stop as requested, with a checkpoint where something is trained; a collective."""
        self._is_stopped = True
        done, total = self._state.batches_trained, self._schedule.stated_batches
        if done:
            self._checkpoint(waits=True)
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
                self._checkpoint(waits=due.end)
        if due.checkpoint:
            self._checkpoint(waits=due.end)
        if due.validate or due.checkpoint:
            self._reporter.upload()
            if not due.end:  # they may have taken long
                self._ask()

    def _ask(self) -> None:
        self._stops.ask(self._state.batches_trained)
        self._seal_written()

    def _seal_written(self) -> None:
        """Complete a checkpoint that was written meanwhile, if the last vote says that all ranks have."""
        if self._stops.is_written:
            self._stops.is_written = False
            self._reporter.pause()
            self._checkpoints.seal_oldest()
            self._show_checkpoints()

    def _report(self) -> None:
        done = self._state.batches_trained
        riders = torch.cat([self._guard.flag.reshape(1), self._stops.vote(done)])
        metrics, (num_bad, *votes) = self._reporter.reduce(self._sums, riders)
        if num_bad and self._options.stop_on_nan:
            self._stop_for_loss()
        self._stops.count(votes, done)
        metrics["batches"] = done
        self._call_back("on_training_workload_end", avg_metrics=metrics, batch_metrics=[])
        self._context.reset_reducers()
        self._reporter.training(done, metrics, progress=self._share_trained)
        self._seal_written()

    @property
    def _share_trained(self) -> float:
        """From 0 to 1."""
        return min(1.0, self._state.batches_trained / self._schedule.num_batches)

    def _check_loss(self) -> None:
        """Before the weights are used: stop if a loss behind them was not finite; a collective."""
        if self._options.stop_on_nan and any(self._context.distributed.allgather(bool(self._guard.flag))):
            self._stop_for_loss()

    def _stop_for_loss(self) -> None:
        self._checkpoints.finish()  # its weights are good
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
            if self._options.stop_on_nan and self._options.metric in found:
                self._checkpoints.finish()
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
            is_saved = self._state.last_checkpoint == batch and self._checkpoints.batch_in_writing is None
            if not is_saved and all_ranks_come(f"error/{batch}", within_s=AGREE_S):
                try:
                    self._checkpoint(waits=True)
                    self._checkpoints.finish()
                except Exception as error:
                    if self._is_chief:
                        logger.warning("warning: no checkpoint was written before it: %s", error)
            raise

    def _checkpoint(self, *, waits: bool) -> None:
        if self._state.last_checkpoint == self._state.batches_trained:
            if waits:
                self._checkpoints.finish()
            return
        self._check_loss()
        self._set_status("checkpointing")
        best = self._best_at == self._state.batches_trained
        self._checkpoints.save(self._state, best=best, waits=waits and not self._options.test_mode)
        self._clock.restart()
        self._show_checkpoints()
        self._set_status("training")

    def _show_checkpoints(self) -> None:
        newest, writing = self._state.last_checkpoint, self._checkpoints.batch_in_writing
        self._progress.checkpoints(newest if writing is None else None, writing)

    def _set_status(self, status: str) -> None:
        if self._is_chief and status != self._status:
            self._status = status
            self._progress.status(status)
            with HEART.patiently():  # a master may not answer for a while
                self._core.train.set_status(status)
