"""``det-ds run --evaluate`` and ``--predict``: the weights of a checkpoint, used once; nothing is trained."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined.errors import CheckpointNotFound

from determined_ds.checkpoints.writer import Checkpoints
from determined_ds.errors import CheckpointError, ConfigError, Problem, TrialError
from determined_ds.rundir.heartbeat import HEART
from determined_ds.rundir.metrics_file import jsonable
from determined_ds.rundir.run_dir import PARTIAL_FILE
from determined_ds.train.loop.display import Progress
from determined_ds.train.loop.reporting import Reporter
from determined_ds.train.loop.steps import attach
from determined_ds.train.loop.validation import Validator, averaged
from determined_ds.trial import returned
from determined_ds.trial.author import described, failed, wrong
from determined_ds.trial.base import ReconciledTrial

GROUP, NAME = "prediction", "predict"
FIX = 'return {"name": tensor}, with a row for each sample of the batch'


class Evaluation:
    """A trial with the weights of a checkpoint, written by any number of ranks under any strategy."""

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
        context = self._context
        with contextlib.ExitStack() as stack:
            stack.callback(self._progress.stop)
            for callback in self._callbacks.values():
                callback.on_trial_startup(context.get_initial_batch(), Path(checkpoint).name)
                stack.callback(callback.on_trial_shutdown)
            with contextlib.ExitStack() as reading:
                path = Path(checkpoint)
                if not path.is_dir():  # in the cluster's storage, by its uuid
                    try:
                        path = Path(reading.enter_context(context._core.checkpoint.restore_path(checkpoint)))
                    except CheckpointNotFound as error:
                        message = f"checkpoint {checkpoint} is not in checkpoint_storage: {error}"
                        raise CheckpointError(message) from error
                state = self._checkpoints.take(path)
            context.reset_reducers()
            context.adopt()
            yield state.batches_trained

    def evaluate(self, checkpoint: str) -> dict[str, Any]:
        """Validate once, and report; a collective."""
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

    @torch.no_grad()
    def predict(self, checkpoint: str, file: Path) -> None:
        """Run the trial's ``predict`` over ``build_prediction_data_loader``; a collective.

        Rank 0 writes a JSON object for each sample, batch by batch, in the order of the data, whatever the ranks.

        Args:
            checkpoint: As of :meth:`evaluate`.
            file: A path that ends in ``.jsonl``. It is there, whole, at the end.

        Raises:
            TrialError: the trial has no ``predict``.
            ConfigError: its engine is a pipeline, or its ranks share sequences.
        """
        context, is_chief = self._context, self._context.distributed.rank == 0
        self._check_predicts()
        validator = Validator(self._trial, context, note=self._progress.note, predicts=True)
        partial, count = file.with_name(file.name + PARTIAL_FILE), 0
        with self._with_weights(checkpoint) as batches, averaged(list(self._callbacks.values())):
            for model in context.models:
                model.eval()
            with partial.open("w") if is_chief else contextlib.nullcontext() as stream:
                calls = validator.calls()
                while calls.next_call():
                    calls.start_call()
                    batch = context.to_device(next(calls))
                    rows = self._rows(self._trial.predict(context.models[0], batch), sum(calls.weights))
                    # Padding belongs to nobody, and of ranks that hold one replica one counts.
                    own = rows if validator.counts else []
                    gathered = context.distributed.gather((context._mpu.data_parallel_rank, own))
                    HEART.beat()
                    if stream is not None:
                        for _, each in sorted(gathered, key=lambda found: found[0]):
                            stream.writelines(each)
                            count += len(each)
            if is_chief:
                os.replace(partial, file)
                context._core.train.report_metrics(GROUP, batches, {"samples": count, "file": str(file)})
                self._progress.note(f"predicted   {count} samples to {file}")

    def _check_predicts(self) -> None:
        strategy, own = self._context.resolved.strategy, getattr(type(self._trial), NAME, None)
        message = ""
        if self._context.use_pipeline_parallel:
            message = "the stages of a pipeline compute a loss, and hand no outputs on"
        elif strategy.sequence_parallel_size > 1:
            message = "a rank of a sequence-parallel training computes on a slice of each sample"
        if message:
            fix = "predict with pipe_parallel_size 1 and sequence_parallel_size 1: any layout reads the checkpoint"
            raise ConfigError(Problem(key="--predict", message=message, fix=fix, code=NAME))
        if not callable(own) or own is ReconciledTrial.predict:
            fix = "def predict(self, model, batch): return {'output': model(batch)}"
            expected = "a method predict(model, batch)"
            raise TrialError(wrong(self._trial, NAME, None, expected, fix, did="is not defined"))

    def _rows(self, found: Any, length: int) -> list[str]:
        """What ``predict`` returned for a batch of so many samples, a line for each; none for padding."""
        if not length:
            return []
        if not isinstance(found, dict) or not found:
            raise failed(self._trial, NAME, found, "a dict of tensors by name", FIX)
        columns: dict[str, list[Any]] = {}
        for name, value in found.items():
            is_array = isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim
            if not is_array and not isinstance(value, (list, tuple)):
                did = f"returned {described(value)} for {name!r}"
                raise failed(self._trial, NAME, value, "tensors, arrays or lists", FIX, did=did)
            if len(value) != length:
                did = f"returned {len(value)} rows for {name!r} of a batch of {length} samples"
                fix = f"{FIX}; define get_batch_length(batch) where the number of samples is not found"
                raise failed(self._trial, NAME, value, "a row for each sample", fix, did=did)
            listed = value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else list(value)
            columns[str(name)] = [each.tolist() if hasattr(each, "tolist") else each for each in listed]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return [json.dumps(jsonable(row), allow_nan=False) + "\n" for row in rows]
