"""Files of predictions: what is written is read back, row for row, from batches of any size."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from determined_ds.errors import TrainingError
from determined_ds.runtime.row_files import open_rows

BATCHES: list[dict[str, Any]] = [
    {
        "score": torch.tensor([0.5, 1.5], dtype=torch.bfloat16),
        "pair": np.array([[1, 2], [3, 4]]),
        "word": ["a", "b"],
        "path": [torch.tensor([1]), torch.tensor([1, 2])],
    },
    {"score": torch.tensor([2.5]), "pair": np.array([[5, 6]]), "word": ["c"], "path": [torch.tensor([3])]},
]
ROWS = [
    {"score": 0.5, "pair": [1, 2], "word": "a", "path": [1]},
    {"score": 1.5, "pair": [3, 4], "word": "b", "path": [1, 2]},
    {"score": 2.5, "pair": [5, 6], "word": "c", "path": [3]},
]


def written(file: Path, *names: str) -> Path:
    rows = open_rows(file)
    for batch in BATCHES:
        rows.write({name: batch[name] for name in names or batch})
        assert not file.exists(), "it is there when it is whole"
    rows.close()
    assert list(file.parent.iterdir()) == [file]
    return file


def test_lines_of_json(tmp_path: Path) -> None:
    lines = written(tmp_path / "p.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == ROWS


def test_a_table(tmp_path: Path) -> None:
    with written(tmp_path / "p.csv", "score", "word").open() as file:
        found = list(csv.DictReader(file))
    assert found == [{"score": str(row["score"]), "word": row["word"]} for row in ROWS]


def test_a_cell_holds_one_value_and_nothing_is_left_of_a_file_that_failed(tmp_path: Path) -> None:
    rows = open_rows(tmp_path / "p.csv")
    with pytest.raises(TrainingError, match="'pair' has 2 values a sample"):
        rows.write(BATCHES[0])
    rows.discard()
    assert not list(tmp_path.iterdir())


def test_parquet(tmp_path: Path) -> None:
    parquet = importlib.import_module("pyarrow.parquet")
    assert parquet.read_table(written(tmp_path / "p.parquet")).to_pylist() == ROWS


def test_tensors(tmp_path: Path) -> None:
    """One tensor where shapes agree, a list of them where they differ."""
    found = torch.load(written(tmp_path / "p.pt"))
    assert found["score"].tolist() == [0.5, 1.5, 2.5]
    assert found["pair"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [row.tolist() for row in found["path"]] == [[1], [1, 2], [3]]
    assert found["word"] == ["a", "b", "c"]
