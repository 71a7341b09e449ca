"""Files of predictions, one row a sample: ``.jsonl``, ``.csv``, ``.parquet`` and ``.pt``."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from determined_ds.errors import TrainingError
from determined_ds.rundir.metrics_file import jsonable
from determined_ds.rundir.run_dir import PARTIAL_FILE

Rows = Mapping[str, Any]


class RowFile(Protocol):
    """Takes rows batch by batch; the file is there, whole, after :meth:`close`."""

    def write(self, rows: Rows) -> None:
        """Add rows: name -> tensor, array or list with an entry for each sample."""

    def close(self) -> None: ...

    def discard(self) -> None:
        """Leave nothing of it."""


def open_rows(file: Path) -> RowFile:
    """A file for rows, by its suffix, which was checked before."""
    kinds: dict[str, Any] = {".jsonl": _Lines, ".csv": _Table, ".parquet": _Parquet, ".pt": _Tensors}
    made: RowFile = kinds[file.suffix](file)
    return made


class _Opened:
    """A text file that gets its name at the end."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._partial = file.with_name(file.name + PARTIAL_FILE)

    def discard(self) -> None:
        self._partial.unlink(missing_ok=True)

    def _named(self) -> None:
        os.replace(self._partial, self._file)


class _Lines(_Opened):
    """A JSON object a line; numbers that JSON lacks as in ``metrics.jsonl``."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._stream = self._partial.open("w")

    def write(self, rows: Rows) -> None:
        for row in _each(rows):
            self._stream.write(json.dumps(jsonable(row), allow_nan=False) + "\n")

    def close(self) -> None:
        self._stream.close()
        self._named()


class _Table(_Opened):
    """Comma-separated values: one number or word in each cell."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._stream = self._partial.open("w", newline="")
        self._writer: Any = None

    def write(self, rows: Rows) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._stream, fieldnames=list(rows))
            self._writer.writeheader()
        for row in _each(rows):
            for name, value in row.items():
                if isinstance(value, (list, dict, tuple)):
                    raise TrainingError(
                        f"{self._file.name}: {name!r} has {len(value)} values a sample, and a cell of csv holds one\n"
                        "  fix: predict to a file that ends in .jsonl, .parquet or .pt"
                    )
            self._writer.writerow(row)

    def close(self) -> None:
        self._stream.close()
        self._named()


class _Parquet(_Opened):
    """A column for each name; lists where a sample has several values."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._writer: Any = None

    def write(self, rows: Rows) -> None:
        import pyarrow

        table = pyarrow.table({name: _listed(value) for name, value in rows.items()})
        schema = table.schema
        if self._writer is not None and schema != self._writer.schema:
            try:  # such as fractions after integers, or a number after a null
                schema = pyarrow.unify_schemas([self._writer.schema, schema], promote_options="permissive")
            except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
                raise TrainingError(
                    f"{self._file.name}: a column of parquet has values of one kind, and batches differ: {error}\n"
                    "  fix: return values of one type in every batch, or predict to a file that ends in .jsonl"
                ) from None
        if self._writer is None or schema != self._writer.schema:
            self._begin(schema)
        self._writer.write_table(_with_columns(table, schema))

    def _begin(self, schema: Any) -> None:
        """Write by a schema from now on, with what was written by another one so far."""
        from pyarrow import parquet

        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._partial, schema)
            return
        self._writer.close()
        before = self._partial.with_name(f"{self._partial.name}.before")
        os.replace(self._partial, before)
        try:
            self._writer = parquet.ParquetWriter(self._partial, schema)
            with parquet.ParquetFile(before) as written:
                for group in range(written.num_row_groups):
                    self._writer.write_table(_with_columns(written.read_row_group(group), schema))
        finally:
            before.unlink()

    def close(self) -> None:
        self._writer.close()
        self._named()


def _with_columns(table: Any, schema: Any) -> Any:
    """A table of arrow's with the columns of a schema; those that it lacks are null."""
    import pyarrow

    columns = [
        table[each.name].cast(each.type)
        if each.name in table.column_names
        else pyarrow.nulls(len(table), each.type)
        for each in schema
    ]
    return pyarrow.table(columns, schema=schema)


class _Tensors(_Opened):
    """Name -> one tensor of all samples, or a list where shapes differ or values are not numbers."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._kept: dict[str, list[Any]] = {}

    def write(self, rows: Rows) -> None:
        for name, value in rows.items():
            self._kept.setdefault(name, []).append(value)

    def close(self) -> None:
        torch.save({name: _joined(values) for name, values in self._kept.items()}, self._partial)
        self._named()


def _joined(values: list[Any]) -> Any:
    if all(isinstance(value, (torch.Tensor, np.ndarray)) for value in values):
        tensors = [torch.as_tensor(value) for value in values]
        if len({tensor.shape[1:] for tensor in tensors}) == 1:
            return torch.cat(tensors)
        return [row.clone() for tensor in tensors for row in tensor]
    return [row for value in values for row in value]


def _each(rows: Rows) -> list[dict[str, Any]]:
    columns = {name: _listed(value) for name, value in rows.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _listed(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        value = value.float() if value.dtype == torch.bfloat16 else value
    listed = value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else list(value)
    return [row.tolist() if hasattr(row, "tolist") else row for row in listed]
