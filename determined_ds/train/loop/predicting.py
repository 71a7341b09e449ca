"""A trial's ``predict`` over a data set: each sample once, in the order of the data, whatever the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from determined_ds.errors import ConfigError, Problem, TrialError
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.data.shares import ValidationBatches
from determined_ds.train.loop.validation import Validator, averaged
from determined_ds.train.row_files import RowFile, open_rows
from determined_ds.trial.author import described, failed, wrong
from determined_ds.trial.base import ReconciledTrial

NAME = "predict"
FIX = 'return {"name": tensor}, with a row for each sample of the batch'


def check_predicts(trial: Any, context: Any) -> None:
    """Refuse a trial that cannot predict.

    Raises:
        TrialError: it has no ``predict``.
        ConfigError: its engine is a pipeline, or its ranks share sequences.
    """
    if context.use_pipeline_parallel:
        message = "the stages of a pipeline compute a loss, and hand no outputs on"
        fix = "predict with a trial without pipeline stages, or by load_model_from_checkpoint_path"
        raise ConfigError(Problem(key="--predict", message=message, fix=fix, code=NAME))
    size = context.resolved.topology.sequence_parallel_size
    if size > 1:
        message, key = "a rank computes on a slice of each sample", "hyperparameters.sequence_parallel_size"
        fix = "predict with sequence_parallel_size 1: any layout reads the checkpoint"
        raise ConfigError(Problem(key=key, value=size, message=message, fix=fix, code=NAME))
    own = getattr(type(trial), NAME, None)
    if not callable(own) or own is ReconciledTrial.predict:
        fix = "def predict(self, model, batch): return {'output': model(batch)}"
        raise TrialError(
            wrong(trial, NAME, None, "a method predict(model, batch)", fix, did="is not defined")
        )


class Predictor(Validator):
    """Runs ``predict`` over ``build_prediction_data_loader``; the arguments are those of :class:`Validator`."""

    takes_full_dataset = False

    @property
    def loader_method(self) -> str:  # type: ignore[override]
        """By Determined's own class, a trial has none for predictions."""
        own = "build_prediction_data_loader"
        return own if hasattr(self._trial, own) else "build_validation_data_loader"

    @torch.no_grad()
    def run_to(self, file: Path, callbacks: list[Any]) -> int:
        """Predict; a collective. Rank 0 writes.

        Args:
            file: What is written.
            callbacks: Of the trial; an ``EMA`` has its average used.

        Returns:
            Samples, on rank 0; 0 elsewhere.
        """
        for model in self._context.models:
            model.eval()
        rows_file = open_rows(file) if self._context.distributed.rank == 0 else None
        try:
            count = self._write(rows_file, callbacks)
        except BaseException:
            if rows_file is not None:
                rows_file.discard()
            raise
        if rows_file is not None:
            rows_file.close()
        return count

    def _write(self, rows_file: RowFile | None, callbacks: list[Any]) -> int:
        count = 0
        with averaged(callbacks):
            reading = self._share.open() if self._share is not None else None
            batches = ValidationBatches(reading, self._plans(reading), self._batch_length)
            while batches.next_call():
                own = self._predicted(batches)
                gathered = self._context.distributed.gather((self._context._mpu.data_parallel_rank, own))
                HEART.beat()
                for _, rows in sorted(gathered or (), key=lambda each: each[0]):
                    if rows is not None and rows_file is not None:
                        rows_file.write(rows)
                        count += len(next(iter(rows.values())))
        return count

    def _predicted(self, batches: ValidationBatches) -> dict[str, Any] | None:
        """The rows of the next batch; None where it is padding, or another rank reports the same."""
        batches.start_call()
        batch = self._context.to_device(next(batches))
        length = sum(batches.weights)
        trial: Any = self._trial
        found = trial.predict(self._context.models[0], batch)
        if not length or not self._counts:
            return None
        if not isinstance(found, dict) or not found:
            raise failed(self._trial, NAME, found, "a dict of tensors by name", FIX)
        return {str(name): self._rows(name, value, length) for name, value in found.items()}

    def _rows(self, name: str, value: Any, length: int) -> Any:
        is_array = isinstance(value, (torch.Tensor, np.ndarray))
        if not (is_array and value.ndim) and not isinstance(value, (list, tuple)):
            did = f"returned {described(value)} for {name!r}"
            raise failed(self._trial, NAME, value, "tensors, arrays or lists", FIX, did=did)
        if len(value) != length:
            did = f"returned {len(value)} rows for {name!r} of a batch of {length} samples"
            fix = f"{FIX}; define get_batch_length(batch) where the number of samples is not found"
            raise failed(self._trial, NAME, value, "a row for each sample", fix, did=did)
        if isinstance(value, torch.Tensor):
            return value.detach().cpu()
        return [each.detach().cpu() if isinstance(each, torch.Tensor) else each for each in value]
