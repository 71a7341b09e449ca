"""``det-ds run --evaluate`` and ``--predict``: the weights of a checkpoint, used once; nothing is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from determined.errors import CheckpointNotFound

from determined_ds.checkpoints.writer import Checkpoints
from determined_ds.errors import CheckpointError
from determined_ds.train.loop.predicting import Predictor, check_predicts
from determined_ds.train.loop.progress import Progress
from determined_ds.train.loop.reporting import Reporter
from determined_ds.train.loop.step_end import attach
from determined_ds.train.loop.validation import Validator
from determined_ds.trial import returned

GROUP = "prediction"


class Evaluation:
    """A trial with the weights of a checkpoint, written by any number of ranks under any strategy.

    Args:
        trial: The trial, its engines wrapped.
        context: Its context.
        progress: What the chief shows.
    """

    def __init__(self, trial: Any, context: Any, progress: Progress) -> None:
        self._trial = trial
        self._context = context
        self._progress = progress
        returned.engines(trial, context.models)
        self._callbacks = returned.callbacks(trial, trial.build_callbacks())
        attach(list(self._callbacks.values()), context.models)
        self._checkpoints = Checkpoints(trial, context, self._callbacks, {}, note=progress.note)

    @contextlib.contextmanager
    def _with_weights(self, checkpoint: str) -> Iterator[int]:
        """Load the weights, and the averages of ``EMA``; a collective. Yields the batches that trained them."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._progress.stop)
            for callback in self._callbacks.values():
                callback.on_trial_startup(self._context.get_initial_batch(), Path(checkpoint).name)
                stack.callback(callback.on_trial_shutdown)
            with self._folder(checkpoint) as path:
                state = self._checkpoints.take(path)
            self._context.reset_reducers()
            self._context.adopt()
            yield state.batches_trained

    @contextlib.contextmanager
    def _folder(self, checkpoint: str) -> Iterator[Path]:
        """A folder of this machine, or a checkpoint that the cluster's storage has by its uuid."""
        if Path(checkpoint).is_dir():
            yield Path(checkpoint)
            return
        try:
            with self._context._core.checkpoint.restore_path(checkpoint) as path:
                yield Path(path)
        except CheckpointNotFound as error:
            raise CheckpointError(f"checkpoint {checkpoint} is not in checkpoint_storage: {error}") from error

    def evaluate(self, checkpoint: str) -> dict[str, Any]:
        """Validate once, and report; a collective.

        Args:
            checkpoint: Its folder, or its uuid on a cluster.

        Returns:
            The metrics.
        """
        validator = Validator(self._trial, self._context, note=self._progress.note)
        callbacks = list(self._callbacks.values())
        with self._with_weights(checkpoint) as batches:
            metrics = validator.run(callbacks)
            for callback in callbacks:
                callback.on_validation_end(metrics)
            reporter = Reporter(self._trial, self._context, self._progress)
            reporter.validation(batches, {"batches": batches, **metrics})
            reporter.upload()
        return metrics

    def predict(self, checkpoint: str, file: Path) -> None:
        """Predict to a file; a collective. See :class:`Predictor`."""
        check_predicts(self._trial, self._context)
        predictor = Predictor(self._trial, self._context, note=self._progress.note)
        with self._with_weights(checkpoint) as batches:
            samples = predictor.run_to(file, list(self._callbacks.values()))
            if self._context.distributed.rank == 0:
                metrics = {"samples": samples, "file": str(file)}
                self._context._core.train.report_metrics(GROUP, batches, metrics)
                self._progress.note(f"predicted   {samples} samples to {file}")
