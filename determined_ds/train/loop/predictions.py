"""``det-ds run --evaluate`` and ``--predict``: the weights of a checkpoint, used once; nothing is trained."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined.errors import CheckpointNotFound

from determined_ds.checkpoints.writer import Checkpoints
from determined_ds.errors import CheckpointError, ConfigError, Problem, TrainingError, TrialError
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
        with contextlib.ExitStack() as stack:
            stack.callback(self._progress.stop)
            for callback in self._callbacks.values():
                callback.on_trial_startup(self._context.get_initial_batch(), Path(checkpoint).name)
                stack.callback(callback.on_trial_shutdown)
            with contextlib.ExitStack() as reading:
                path = Path(checkpoint)
                if not path.is_dir():  # in the cluster's storage, by its uuid
                    try:
                        stored = self._context._core.checkpoint.restore_path(checkpoint)
                        path = Path(reading.enter_context(stored))
                    except CheckpointNotFound as error:
                        message = f"checkpoint {checkpoint} is not in checkpoint_storage: {error}"
                        raise CheckpointError(message) from error
                state = self._checkpoints.take(path)
            self._context.reset_reducers()
            self._context.adopt()
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
        """Run the trial's ``predict`` over ``build_prediction_data_loader``; a collective. Rank 0 writes.

        Each sample is there once, in the order of the data, whatever the ranks.

        Args:
            checkpoint: As of :meth:`evaluate`.
            file: ``.jsonl``, ``.csv``, ``.parquet`` or ``.pt``: one row a sample. It is there, whole, at the end.

        Raises:
            TrialError: the trial has no ``predict``.
            ConfigError: its engine is a pipeline, or its ranks share sequences.
        """
        context, is_chief = self._context, self._context.distributed.rank == 0
        self._check_predicts()
        validator = Validator(self._trial, context, note=self._progress.note, predicts=True)
        with self._with_weights(checkpoint) as batches, averaged(list(self._callbacks.values())):
            for model in context.models:
                model.eval()
            rows = RowFile(file) if is_chief else None
            count = 0
            try:
                calls = validator.calls()
                while calls.next_call():
                    calls.start_call()
                    batch = context.to_device(next(calls))
                    own = self._rows(self._trial.predict(context.models[0], batch), sum(calls.weights))
                    # Padding is nobody's, and of ranks that hold one replica one counts.
                    keeps = sum(calls.weights) and validator.counts
                    gathered = context.distributed.gather(
                        (context._mpu.data_parallel_rank, own if keeps else None)
                    )
                    HEART.beat()
                    if rows is not None:
                        found = sorted(gathered, key=lambda each: each[0])
                        for table in (table for _, table in found if table is not None):
                            rows.write(table)
                            count += len(next(iter(table.values())))
                if rows is not None:
                    rows.close()
            except BaseException:
                if rows is not None:
                    rows.discard()
                raise
            if is_chief:
                metrics = {"samples": count, "file": str(file)}
                context._core.train.report_metrics(GROUP, batches, metrics)
                self._progress.note(f"predicted   {count} samples to {file}")

    def _check_predicts(self) -> None:
        if self._context.use_pipeline_parallel:
            message = "the stages of a pipeline compute a loss, and hand no outputs on"
            fix = "predict with a trial without pipeline stages, or by load_model_from_checkpoint_path"
            raise ConfigError(Problem(key="--predict", message=message, fix=fix, code=NAME))
        size = self._context.resolved.topology.sequence_parallel_size
        if size > 1:
            message, key = (
                "a rank computes on a slice of each sample",
                "hyperparameters.sequence_parallel_size",
            )
            fix = "predict with sequence_parallel_size 1: any layout reads the checkpoint"
            raise ConfigError(Problem(key=key, value=size, message=message, fix=fix, code=NAME))
        own = getattr(type(self._trial), NAME, None)
        if not callable(own) or own is ReconciledTrial.predict:
            fix = "def predict(self, model, batch): return {'output': model(batch)}"
            expected = "a method predict(model, batch)"
            raise TrialError(wrong(self._trial, NAME, None, expected, fix, did="is not defined"))

    def _rows(self, found: Any, length: int) -> dict[str, Any] | None:
        """What ``predict`` returned for a batch of so many samples, on the host; None for padding."""
        if not length:
            return None
        if not isinstance(found, dict) or not found:
            raise failed(self._trial, NAME, found, "a dict of tensors by name", FIX)
        rows: dict[str, Any] = {}
        for name, value in found.items():
            is_array = isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim
            if not is_array and not isinstance(value, (list, tuple)):
                did = f"returned {described(value)} for {name!r}"
                raise failed(self._trial, NAME, value, "tensors, arrays or lists", FIX, did=did)
            if len(value) != length:
                did = f"returned {len(value)} rows for {name!r} of a batch of {length} samples"
                fix = f"{FIX}; define get_batch_length(batch) where the number of samples is not found"
                raise failed(self._trial, NAME, value, "a row for each sample", fix, did=did)
            if isinstance(value, torch.Tensor):
                rows[str(name)] = value.detach().cpu()
            else:
                rows[str(name)] = [
                    each.detach().cpu() if isinstance(each, torch.Tensor) else each for each in value
                ]
        return rows


class RowFile:
    """A file of predictions, one row a sample, by its suffix, which was checked before.

    ``.jsonl`` has a JSON object a line, with numbers that JSON lacks as in ``metrics.jsonl``; ``.csv`` one number or
    word in each cell; ``.parquet`` a column for each name; ``.pt`` name -> one tensor of all samples, or a list where
    shapes differ or values are not numbers. The last two are held in memory until the end.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._partial = file.with_name(file.name + PARTIAL_FILE)
        self._kept: list[Mapping[str, Any]] = []
        self._is_text = file.suffix in (".jsonl", ".csv")
        self._stream = (
            self._partial.open("w", newline="" if file.suffix == ".csv" else None) if self._is_text else None
        )
        self._table: csv.DictWriter[str] | None = None

    def write(self, rows: Mapping[str, Any]) -> None:
        """Add rows: name -> tensor, array or list with an entry for each sample."""
        if self._stream is None:
            self._kept.append(rows if self._file.suffix == ".pt" else _listed(rows))
            return
        columns = _listed(rows)
        each = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if self._file.suffix == ".jsonl":
            self._stream.writelines(json.dumps(jsonable(row), allow_nan=False) + "\n" for row in each)
            return
        if self._table is None:
            self._table = csv.DictWriter(self._stream, fieldnames=list(rows))
            self._table.writeheader()
        for name, values in columns.items():
            if long := [value for value in values if isinstance(value, (list, dict, tuple))]:
                raise TrainingError(
                    f"{self._file.name}: {name!r} has {len(long[0])} values a sample, and a cell of csv holds one\n"
                    "  fix: predict to a file that ends in .jsonl, .parquet or .pt"
                )
        self._table.writerows(each)

    def close(self) -> None:
        """Give the file its name."""
        if self._stream is not None:
            self._stream.close()
        elif self._file.suffix == ".pt":
            names = dict.fromkeys(name for rows in self._kept for name in rows)
            found = {name: _joined([rows[name] for rows in self._kept if name in rows]) for name in names}
            torch.save(found, self._partial)
        else:
            self._write_parquet()
        os.replace(self._partial, self._file)

    def _write_parquet(self) -> None:
        import pyarrow
        from pyarrow import parquet

        tables = [pyarrow.table(rows) for rows in self._kept] or [pyarrow.table({})]
        try:  # fractions after integers, or a number after a null, are of the wider kind
            whole = pyarrow.concat_tables(tables, promote_options="permissive")
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise TrainingError(
                f"{self._file.name}: a column of parquet has values of one kind, and batches differ: {error}\n"
                "  fix: return values of one type in every batch, or predict to a file that ends in .jsonl"
            ) from None
        parquet.write_table(whole, self._partial)

    def discard(self) -> None:
        """Leave nothing of it."""
        if self._stream is not None:
            self._stream.close()
        self._partial.unlink(missing_ok=True)


def _listed(rows: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Columns as lists of plain values."""
    columns = {}
    for name, value in rows.items():
        if isinstance(value, torch.Tensor):
            value = value.float() if value.dtype == torch.bfloat16 else value
        listed = value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else list(value)
        columns[name] = [row.tolist() if hasattr(row, "tolist") else row for row in listed]
    return columns


def _joined(values: list[Any]) -> Any:
    if all(isinstance(value, (torch.Tensor, np.ndarray)) for value in values):
        tensors = [torch.as_tensor(value) for value in values]
        if len({tensor.shape[1:] for tensor in tensors}) == 1:
            return torch.cat(tensors)
        return [row.clone() for tensor in tensors for row in tensor]
    return [row for value in values for row in value]
