"""A search that does not fit itself is reported, and the points of one that cannot run are counted and described."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.harness.checked import report_of

GRID = {"name": "grid", "metric": "validation_loss"}


def choice(*values: Any) -> dict[str, Any]:
    return {"type": "categorical", "vals": list(values)}


EIGHT = "global_batch_size = 8, micro_batch_size ="
ALL = f"with global_batch_size = 8 or 16 and micro_batch_size = 3, e.g. {EIGHT} 3"
SOME = f"e.g. {EIGHT} 8"


@pytest.mark.parametrize(
    ("batches", "micro_batches", "count", "where"),
    [((8, 16, 24), (1, 2, 3), 2, ALL), ((8, 9), (1, 8), 3, SOME)],
)
def test_the_points_that_cannot_run_are_counted_and_described(
    tmp_path: Path, batches: Sequence[int], micro_batches: Sequence[int], count: int, where: str
) -> None:
    space = {"global_batch_size": choice(*batches), "micro_batch_size": choice(*micro_batches)}
    report = report_of(tmp_path, hyperparameters=space, searcher=GRID)
    (only,) = report["findings"]
    size = len(batches) * len(micro_batches)
    assert only.points == {"count": count, "of": size, "where": where}
    said = CliRunner().invoke(main, ["check", str(tmp_path / "a.yaml"), str(tmp_path)])
    assert (said.exit_code, f"    points: {count} of {size} {where}\n" in said.stdout) == (0, True)
    assert f"{size - count} of {size} points can run\n" in said.stdout


TRIAL = """
from determined_ds import DataParallelTrial

class T(DataParallelTrial):
    validation_metrics = ("validation_loss", "accuracy", "val_acc", "accuracy_loss")
"""
ASHA = {"name": "adaptive_asha", "max_trials": 16, "time_metric": "batches", "max_time": 64}
LARGEST = {**ASHA, "smaller_is_better": False}
RANGE = {"dropout": {"type": "double", "minval": 0, "maxval": 1, "count": 101}}


@pytest.mark.parametrize(
    ("searcher", "searched", "code", "said"),
    [
        (GRID, {}, "search-nothing name", ""),
        (ASHA, RANGE, "", ""),
        (LARGEST, RANGE, "search-direction metric", "true"),
        ({**ASHA, "time_metric": "tokens"}, RANGE, "search-time time_metric", "batches"),
        ({**ASHA, "max_time": 32}, RANGE, "search-length max_time", "max_time to 64"),
    ],
)
def test_a_search_that_does_not_fit_itself_is_reported_at_its_key(
    tmp_path: Path, searcher: dict[str, Any], searched: dict[str, Any], code: str, said: str
) -> None:
    whole = {"metric": "validation_loss", **searcher}  # of trials that report it, and train 64 batches
    every = report_of(tmp_path, trial=TRIAL, hyperparameters=searched, searcher=whole)["findings"]
    assert [f"{each.code} {each.key.removeprefix('searcher.')}" for each in every] == [code] * bool(code)
    assert all(said in f"{each.message} {each.fix}" for each in every)
