"""A search that does not fit itself is reported, and every point of one judged as it would be alone."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.harness.checked import DEEPSPEED, Found, report_of

GRID = {"name": "grid", "metric": "validation_loss"}
RANDOM = {"name": "random", "metric": "validation_loss", "max_trials": 5}


def choice(*values: Any) -> dict[str, Any]:
    return {"type": "categorical", "vals": list(values)}


STAGE_2 = {"zero_optimization": {"stage": 2}}
OFFLOADED = {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}
RATE = {"optimizer": {"params": {"lr": 0.5}}}
FILES = ["plain.json", "wrong.json", "none.json", 3]
# What of each hyperparameter is searched.
SPACES: dict[str, dict[str, list[Any]]] = {
    "the batch": {"global_batch_size": [8, 9, "8"], "micro_batch_size": [1, 2, 4, None]},
    "stages": {"pipe_parallel_size": [1, 2], "global_batch_size": [8, 10], "micro_batch_size": [2, 3]},
    "the JSON": {"deepspeed_config": FILES, "learning_rate": [0.1, "0.1"]},
    "overwritten values": {"overwrite_deepspeed_args": [STAGE_2, OFFLOADED, RATE], "zero_stage": [1, 2]},
    "a rate that the JSON may state too": {
        "overwrite_deepspeed_args": [STAGE_2, RATE],
        "learning_rate": [0.1, 0.5, 0.9],
    },
    "what fills auto": {
        "betas": [[0.9, 0.95], 1, None],
        "adam_beta1": [0.8, None],
        "max_grad_norm": [1, "x"],
    },
    "none that can run": {"global_batch_size": [9, 11], "dropout": [0, 1]},
}


@pytest.mark.parametrize("searched", SPACES.values(), ids=SPACES)
def test_points_judged_together_get_the_verdict_that_each_gets_alone(
    tmp_path: Path, searched: dict[str, list[Any]]
) -> None:
    """A search passes over those that cannot run: they are errors only where none can."""
    for file, stage in (("plain", 1), ("wrong", 7)):
        ds = {**DEEPSPEED, "zero_optimization": {"stage": stage}}
        (tmp_path / f"{file}.json").write_text(json.dumps(ds))
    axes = {key: choice(*values) for key, values in searched.items()}
    together = report_of(tmp_path, hyperparameters=axes, searcher=GRID)
    points = [*itertools.product(*searched.values())]
    runnable, counts = 0, Counter[tuple[str, str]]()
    for values in points:
        fixed = {key: {"type": "const", "val": value} for key, value in zip(searched, values, strict=True)}
        alone = report_of(tmp_path, hyperparameters=fixed)["findings"]
        refused = {each.code for each in alone if each.severity == "error"}
        runnable += not refused
        counts.update((each.code, each.key) for each in alone if not refused or each.severity == "error")
    assert together["points"] == {"checked": len(points), "runnable": runnable, "size": len(points)}
    found = {
        (each.code, each.key): each.points["count"] if each.points else len(points)
        for each in together["findings"]
    }
    assert found == counts
    assert runnable or {each.severity for each in together["findings"]} == {"error"}


ALL = "all 2 points with global_batch_size = 8 or 16 and micro_batch_size = 3"
SOME = """3 points: every one with global_batch_size = 9; every one with micro_batch_size = 8; \
e.g. global_batch_size = 8, micro_batch_size = 8"""


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
    assert only.points == {"count": count, "share": count / size, "of": size, "exact": True, "where": where}
    said = CliRunner().invoke(main, ["check", str(tmp_path / "a.yaml"), str(tmp_path)])
    assert (said.exit_code, f"    points: {where}; " in said.stdout) == (0, True)
    assert f"{size - count} of {size} points can run\n" in said.stdout


@pytest.mark.parametrize(
    ("searcher", "dropout", "sampled"),
    [
        (RANDOM, {"type": "double"}, r"\d+ points of a continuous space"),
        (RANDOM, {"type": "int"}, r"[45],\d+ of 1,200,000 points"),
        (GRID, {"type": "double", "count": 600_000}, r"[45],\d+ of 1,200,000 points"),
    ],
)
def test_a_large_space_is_sampled_and_said_to_be(
    tmp_path: Path, searcher: dict[str, Any], dropout: dict[str, Any], sampled: str
) -> None:
    space = {"global_batch_size": choice(8, 9), "dropout": {**dropout, "minval": 1, "maxval": 600_000}}
    report = report_of(tmp_path, hyperparameters=space, searcher=searcher)
    (points,) = [each.points for each in report["findings"] if each.code == "batch"]
    assert not points["exact"]
    assert 0.3 < points["share"] < 0.7
    assert points["where"] == f"all {points['count']:,} points with global_batch_size = 9"
    said = CliRunner().invoke(main, ["check", str(tmp_path / "a.yaml")]).stdout
    assert re.search(f"points can run; sampled {sampled}\n", said)


TRIAL = """
from determined_ds import DataParallelTrial

class T(DataParallelTrial):
    validation_metrics = ("validation_loss", "accuracy", "val_acc", "accuracy_loss")
"""
SINGLE = {"name": "single"}
ASHA = {"name": "adaptive_asha", "max_trials": 16, "time_metric": "batches", "max_time": 64}
LARGEST = {**ASHA, "smaller_is_better": False}
RANGE = {"dropout": {"type": "double", "minval": 0, "maxval": 1, "count": 101}}


def found(folder: Path, searcher: dict[str, Any], searched: dict[str, Any]) -> list[Found]:
    """What is found in a search whose trials report its metric, and train 64 batches."""
    whole = {"metric": "validation_loss", **searcher}
    every: list[Found] = report_of(folder, trial=TRIAL, hyperparameters=searched, searcher=whole)["findings"]
    return every


@pytest.mark.parametrize(
    ("searcher", "searched", "code", "said"),
    [
        (GRID, RANGE, "", ""),
        (SINGLE, {}, "", ""),
        (GRID, {}, "search-nothing name", ""),
        (RANDOM, {}, "search-nothing name", ""),
        (SINGLE, RANGE, "search-single name", "dropout"),
        (ASHA, RANGE, "", ""),
        (LARGEST, RANGE, "search-direction metric", "true"),
        ({**LARGEST, "metric": "accuracy"}, RANGE, "", ""),
        ({**ASHA, "metric": "val_acc"}, RANGE, "search-direction metric", "false"),
        ({**LARGEST, "metric": "accuracy_loss"}, RANGE, "", ""),  # may be either
        ({**ASHA, "time_metric": "tokens"}, RANGE, "search-time time_metric", "batches"),
        ({**ASHA, "max_time": 32}, RANGE, "search-length max_time", "{batches: 32}"),
        ({**ASHA, "time_metric": "epochs"}, RANGE, "search-length max_time", "time_metric to batches"),
    ],
)
def test_a_search_that_does_not_fit_itself_is_reported_at_its_key(
    tmp_path: Path, searcher: dict[str, Any], searched: dict[str, Any], code: str, said: str
) -> None:
    every = found(tmp_path, searcher, searched)
    assert [f"{each.code} {each.key.removeprefix('searcher.')}" for each in every] == [code] * bool(code)
    assert all(said in f"{each.message} {each.fix}" for each in every)


def test_bounds_of_a_log_hyperparameter_are_exponents(tmp_path: Path) -> None:
    """No rate is above 1; what else is drawn between 100 and 10000 may be meant so."""
    bounds = {"weight_decay": (2, 4), "learning_rate": (-4, 2), "lr": (-4, -2), "width": (2, 4)}
    axes = {
        name: {"type": "log", "minval": low, "maxval": high, "base": 10}
        for name, (low, high) in bounds.items()
    }
    odd = {each.key: each.message for each in found(tmp_path, RANDOM, axes) if each.code == "log-bounds"}
    assert [*odd] == ["hyperparameters.learning_rate", "hyperparameters.weight_decay"]
    assert "from 0.0001 to 100 are drawn" in odd["hyperparameters.learning_rate"]
