"""A table that others measured: a list of mappings or a DataFrame, read by the names that people use in such tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from determined_ds.documents.document import nearest
from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.units import GIB, MIB
from determined_ds.report.columns import CSV
from determined_ds.report.repetition import PARTS
from determined_ds.report.results import STATUSES

GB, MB = 10**9, 10**6
# Field -> the names that it goes by, each with what makes the field's unit of it: samples/s, seconds, bytes.
NAMES: dict[str, dict[str, float]] = {
    "name": dict.fromkeys(("strategy", "name", "method", "config", "configuration", "run"), 1),
    "slots": dict.fromkeys(("slots", "gpus", "num_gpus", "n_gpus", "ranks", "num_ranks", "world_size"), 1),
    "samples_per_second": dict.fromkeys(
        (
            *("samples_per_second", "samples_per_s", "samples_per_sec", "throughput"),
            *("train_samples_per_second", "training_throughput"),
        ),
        1,
    ),
    "step_seconds": {
        **dict.fromkeys(("step_seconds", "step_time", "step_time_s", "seconds_per_step", "step_median_s"), 1),
        **dict.fromkeys(("step_time_ms", "step_ms", "ms_per_step"), 1e-3),
    },
    "samples_per_step": dict.fromkeys(("global_batch_size", "samples_per_step", "train_batch_size"), 1),
    "peak_memory_bytes": {
        **dict.fromkeys(("peak_memory_gb", "max_memory_gb", "memory_gb", "gpu_memory_gb"), GB),
        **dict.fromkeys(("peak_memory_gib", "max_memory_gib", "memory_gib"), GIB),
        **dict.fromkeys(("peak_memory_mb", "max_memory_mb", "memory_mb", "gpu_memory_mb"), MB),
        **dict.fromkeys(("peak_memory_mib", "max_memory_mib", "memory_mib"), MIB),
        "peak_memory_bytes": 1,
    },
    "model_state_bytes": {"model_state_gb": GB, "model_state_gib": GIB, "model_state_bytes": 1},
    "estimated_model_state_bytes": {"estimated_model_state_bytes": 1},
    "loss": dict.fromkeys(("final_loss", "loss", "train_loss", "training_loss", "final_train_loss"), 1),
    "losses": dict.fromkeys(("losses", "train_losses", "loss_history", "losses_per_epoch"), 1),
    "accuracy": dict.fromkeys(
        ("final_accuracy", "accuracy", "val_accuracy", "validation_accuracy", "test_accuracy"), 1
    ),
    "total_seconds": {
        **dict.fromkeys(("total_time", "total_time_s", "total_seconds", "training_time", "train_runtime"), 1),
        **dict.fromkeys(("training_time_s", "train_time", "duration_s"), 1),
    },
    "bubble": {"bubble": 1},
    "bubble_ideal": {"bubble_ideal": 1},
    **{f"{part}_share": {f"{part}_share": 1} for part in PARTS},
    "status": {"status": 1},
    "reason": dict.fromkeys(("reason", "error"), 1),
}
FIELDS = {name: (field, unit) for field, names in NAMES.items() for name, unit in names.items()}
# Known, and in no picture: other columns of results.csv, and what a result of a training has beside them.
NOT_DRAWN = {
    *CSV,
    "tokens_per_second",
    "val_losses",
    "final_val_loss",
    "seconds_per_epoch",
    "run_dir",
    "final_metrics",
} - set(FIELDS)
WITHOUT_UNIT = {"memory": "memory_gb", "peak_memory": "peak_memory_gb", "gpu_memory": "gpu_memory_gb"}
TEXTS = ("name", "status", "reason")
WHOLE = ("slots", "samples_per_step")
POSITIVE = (*WHOLE, "samples_per_second", "step_seconds", "total_seconds")
MAX_ROWS_NAMED = 5


def values_of(table: object) -> list[dict[str, Any]]:
    """The rows of a table, each as field -> value in the field's own unit; what is missing is left out.

    Args:
        table: A sequence of mappings; a mapping of such by their names; or what has ``to_dict``, such as a pandas
            DataFrame. Each row likewise.

    Raises:
        ConfigError: it is neither, a column is unknown, or a value is not what its column holds.
    """
    records = list(_records(table))
    problems = [*_unknown_columns(records), *_without_name(records)]
    found: list[dict[str, Any]] = []
    for index, record in enumerate(records):
        values: dict[str, Any] = {}
        for column, value in record.items():
            if column in FIELDS and not _is_missing(value):
                field, unit = FIELDS[column]
                try:
                    values[field] = _read(field, value, unit)
                except (TypeError, ValueError):
                    problems.append(_wrong_value(index, column, field, value))
        found.append(values)
    if problems:
        raise ConfigError(problems)
    return found


def _records(table: object) -> Iterator[Mapping[str, Any]]:
    rows: object = table
    if callable(to_dict := getattr(table, "to_dict", None)) and not isinstance(table, Mapping):
        rows = to_dict("records")  # pandas, polars by to_pandas, modin
        index = getattr(table, "index", None)
        if isinstance(rows, list) and rows and not any(name in rows[0] for name in NAMES["name"]):
            labels = list(index) if index is not None else []
            if len(labels) == len(rows) and all(isinstance(label, str) for label in labels):
                rows = [{"name": label, **row} for label, row in zip(labels, rows, strict=True)]
    if isinstance(rows, Mapping) and rows and all(isinstance(row, Mapping) for row in rows.values()):
        rows = [{"name": name, **row} for name, row in rows.items()]
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Sequence):
        raise ConfigError(_not_a_table(table))
    for row in rows:
        record = row.to_dict() if not isinstance(row, Mapping) and hasattr(row, "to_dict") else row
        if not isinstance(record, Mapping):
            raise ConfigError(_not_a_table(row))
        yield record


def _is_missing(value: object) -> bool:
    """None, an empty text, or what a DataFrame has in an empty cell: it differs from itself."""
    if value is None or isinstance(value, str):
        return not (value or "").strip()
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # pandas.NA is neither true nor false; an array is a value
        return not hasattr(value, "__len__")


def _read(field: str, value: Any, unit: float) -> Any:
    """A value in the field's own unit.

    Raises:
        TypeError: it is of another kind.
        ValueError: it is outside the range.
    """
    if field == "status":
        if value not in STATUSES:
            raise ValueError(value)
        return value
    if field in TEXTS:
        return str(value)
    if field == "losses":
        return tuple(float(each) for each in value)
    if isinstance(value, bool):
        raise TypeError(value)
    number = float(value) * unit
    if field in ("loss", "accuracy"):
        return number
    if not (math.isfinite(number) and number >= 0) or (field in POSITIVE and number == 0):
        raise ValueError(value)
    if field in WHOLE and number != int(number):
        raise ValueError(value)
    return int(number) if field in WHOLE or field.endswith("_bytes") else number


# ---------------------------------------------------------------------------------------------- what is refused


def _not_a_table(given: object) -> Problem:
    return Problem(
        key="results",
        value=type(given).__name__,
        message="is not a table of results",
        fix="give what compare() returns, the path of a results.json, a list of mappings with one for each strategy,"
        " or a DataFrame",
        code="results",
    )


def _unknown_columns(records: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    columns = dict.fromkeys(column for record in records for column in record)
    for column in columns:
        if column in FIELDS or column in NOT_DRAWN:
            continue
        guess = nearest(column.lower(), [*FIELDS]) if isinstance(column, str) else None
        if column in WITHOUT_UNIT:
            message, fix = (
                "has no unit",
                f"rename it to {WITHOUT_UNIT[column]} (10**9 bytes), or to ..._gib (2**30)",
            )
        else:
            message = "is not a known column"
            accepted = ", ".join(next(iter(names)) for names in NAMES.values())
            fix = f"{f'rename it to {guess}' if guess else 'rename'} or remove it; accepted: {accepted}"
        yield Problem(key="results", value=column, message=message, fix=fix, code="results-column")


def _without_name(records: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    missing = [
        str(index)
        for index, record in enumerate(records)
        if all(_is_missing(record.get(name)) for name in NAMES["name"])
    ]
    if missing:
        which = f"row{'s' * (len(missing) > 1)} {', '.join(missing[:MAX_ROWS_NAMED])}"
        more = f" and {len(missing) - MAX_ROWS_NAMED} more" if len(missing) > MAX_ROWS_NAMED else ""
        message = f"{which}{more} (from 0): without a strategy"
        fix = f"name each in a column {' or '.join(list(NAMES['name'])[:3])}"
        yield Problem(key="results", message=message, fix=fix, code="results-name")


def _wrong_value(index: int, column: str, field: str, value: object) -> Problem:
    needed = {
        "status": f"one of {', '.join(STATUSES)}",
        "losses": "a list of numbers",
        "loss": "a number",
        "accuracy": "a number",
    }
    what = (
        "a whole number above 0"
        if field in WHOLE
        else "a number above 0"
        if field in POSITIVE
        else "a number of 0 or more"
    )
    return Problem(
        key=f"results[{index}].{column}",
        value=value,
        message="is not valid",
        fix=f"must be {needed.get(field, what)}",
        code="results-value",
    )
