"""Tables that others measured are drawn: lists of mappings and DataFrames, by the names that people use in them."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from determined_ds.errors import ConfigError
from determined_ds.report.given_rows import results_of_table
from determined_ds.report.results import FAILED, Row
from determined_ds.report.table import rows_csv
from determined_ds.report.written import create_performance_visualizations
from tests.report.making import comparison, results
from tests.report.making import row as measured

TABLE: list[dict[str, Any]] = [
    {
        "strategy": "ZeRO-1",
        "throughput": 100.0,
        "peak_memory_gb": 12.0,
        "final_loss": 2.1,
        "final_accuracy": 0.81,
        "train_losses": [3.0, 2.5, 2.1],
        "total_time": 30,
    },
    {
        "strategy": "ZeRO-2",
        "throughput": 90.0,
        "peak_memory_gb": 9.0,
        "final_loss": 2.2,
        "final_accuracy": 0.8,
    },
    {
        "strategy": "ZeRO-2",
        "throughput": 94.0,
        "peak_memory_gb": 9.5,
        "final_loss": 2.2,
        "final_accuracy": 0.8,
    },
    {"strategy": "ZeRO-3", "error": "CUDA out of memory"},
]


class Frame:
    """What is used of a pandas DataFrame: missing cells are nan, numbers are numpy's."""

    def __init__(self, records: list[dict[str, Any]], index: list[Any] | None = None) -> None:
        columns = dict.fromkeys(column for record in records for column in record)
        self._records = [{column: self._cell(record.get(column)) for column in columns} for record in records]
        self.index = list(range(len(records))) if index is None else index

    @staticmethod
    def _cell(value: Any) -> Any:
        return (
            np.float64("nan") if value is None else np.float64(value) if isinstance(value, float) else value
        )

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self._records


@pytest.mark.parametrize("table", [TABLE, tuple(TABLE), Frame(TABLE)], ids=["list", "tuple", "frame"])
def test_a_table_is_drawn(table: Any, tmp_path: Path) -> None:
    drawn = create_performance_visualizations(table, tmp_path)
    assert [path.name for path in drawn] == ["throughput.png", "memory.png", "loss.png", "final.png"]


def rows_of(table: Any) -> dict[str, Row]:
    return {row.name: row for row in results_of_table(table).rows}


@pytest.mark.parametrize("table", [TABLE, Frame(TABLE)], ids=["list", "frame"])
def test_its_numbers_are_those_of_the_pictures(table: Any) -> None:
    rows = rows_of(table)
    assert list(rows) == ["ZeRO-1", "ZeRO-2", "ZeRO-3"]
    one, two, three = rows.values()
    assert (one.samples_per_second, one.peak_memory_bytes, one.loss, one.accuracy) == (
        100,
        12 * 10**9,
        2.1,
        0.81,
    )
    assert one.loss_curve == ((10, 3.0), (20, 2.5), (30, 2.1))
    assert (two.samples_per_second, two.samples_per_second_spread) == (92, (90, 94))
    assert (two.peak_memory_bytes, two.num_repetitions) == (9_500_000_000, 2)
    assert (three.is_measured, three.status, three.reason) == (False, FAILED, "CUDA out of memory")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"train_samples_per_second": "12.5"}, "samples_per_second", 12.5),
        ({"step_time_ms": 250, "global_batch_size": 32}, "samples_per_second", 128),
        ({"step_seconds": 0.25, "train_batch_size": 32}, "samples_per_second", 128),
        ({"memory_gib": 2}, "peak_memory_bytes", 2**31),
        ({"gpu_memory_mb": 700}, "peak_memory_bytes", 700 * 10**6),
        ({"loss": 2, "throughput": 1}, "loss", 2),
        ({"losses": [3, 2], "step_time": 0.5}, "loss", 2),
        ({"val_accuracy": 81.5}, "accuracy", 81.5),
    ],
)
def test_names_and_units_of_other_tables(given: dict[str, Any], field: str, value: float) -> None:
    for name in ("strategy", "name", "method"):
        assert getattr(rows_of([{name: "a", **given}])["a"], field) == pytest.approx(value)


def test_rows_are_named_by_their_index_or_their_key() -> None:
    numbers = [{"throughput": 1.0}, {"throughput": 2.0}]
    assert list(rows_of(Frame(numbers, index=["zero1", "zero2"]))) == ["zero1", "zero2"]
    assert list(rows_of(dict(zip(["zero1", "zero2"], numbers, strict=True)))) == ["zero1", "zero2"]


def test_what_was_measured_on_several_slots_scales() -> None:
    table = [{"name": "zero1", "gpus": gpus, "throughput": rate} for gpus, rate in ((1, 10), (2, 18))]
    found = results_of_table(table)
    assert [found.scaling_efficiency(row) for row in found.rows] == [1, pytest.approx(0.9)]


def test_results_csv_comes_back(tmp_path: Path) -> None:
    """As csv.DictReader gives it: all values are texts, and those that are unknown are empty."""
    lines = list(csv.DictReader(io.StringIO(rows_csv(comparison()), newline="")))
    found = results_of_table(lines)
    for row, original in zip(found.rows, comparison().rows, strict=True):
        assert (row.name, row.slots, row.status) == (original.name, original.slots, original.status)
        assert row.samples_per_second == original.samples_per_second
        assert row.peak_memory_bytes == original.peak_memory_bytes
        assert row.bubble == original.bubble
    names = [path.name for path in create_performance_visualizations(lines, tmp_path)]
    assert names == ["throughput.png", "memory.png", "final.png", "scaling.png", "bubble.png"]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            [{"strategy": "a", "throughputs": 3}],
            "rename it to throughput or remove it; accepted: strategy, slots",
        ),
        ([{"strategy": "a", "memory": 3}], "rename it to memory_gb (10**9 bytes), or to ..._gib"),
        ([{"throughput": 3}, {"strategy": "b"}], "row 0 (from 0): without a strategy"),
        ([{"strategy": "a", "throughput": "fast"}], "results[0].throughput = 'fast'"),
        ([{"strategy": "a", "throughput": 0}], "must be a number above 0"),
        ([{"strategy": "a", "gpus": 1.5}], "must be a whole number above 0"),
        ([{"strategy": "a", "losses": 3}], "must be a list of numbers"),
        ([{"strategy": "a", "status": "fine"}], "must be one of measured, failed"),
        (7, "is not a table of results"),
        (["zero1"], "is not a table of results"),
        ([], "nothing in them was measured"),
        ([{"strategy": "a"}], "nothing in them was measured"),
    ],
)
def test_what_is_no_such_table_is_refused(table: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        create_performance_visualizations(table, tmp_path / "new")
    assert says in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_every_unknown_column_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        results_of_table([{"strategy": "a", "color": 1}, {"strategy": "b", "shape": 2}])
    assert [problem.value for problem in caught.value.problems] == ["color", "shape"]


def test_what_was_measured_here_has_no_second_picture_of_its_loss(tmp_path: Path) -> None:
    names = [path.name for path in create_performance_visualizations(results(measured("zero1")), tmp_path)]
    assert "final.png" not in names
