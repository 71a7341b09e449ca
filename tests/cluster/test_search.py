"""Searches: a loser stops, and a point that cannot run is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster, FakeCluster
from tests.cluster.scenarios import CONST, SEARCH, SHORT, tiny
from tests.harness.command import ROOT

pytestmark = pytest.mark.long(
    "whole searches; test_recorded has what is stopped, and train/test_context.py the dropped point"
)
STATE = "/api/v1/trials/[0-9]+"


def changed(path: str, folder: Path, searcher: dict[str, Any], **hyperparameters: Any) -> Path:
    """A template with another searcher and other hyperparameters."""
    config = yaml.safe_load((ROOT / path).read_text())
    config["searcher"] = {"metric": "validation_loss", "smaller_is_better": True, **searcher}
    config["hyperparameters"].update(hyperparameters)
    (folder / "search.yaml").write_text(yaml.safe_dump(config))
    return folder / "search.yaml"


def test_a_loser_stops_after_its_rung(cluster: Cluster, tmp_path: Path) -> None:
    """It learns so by its state alone, which the chief reads once after each validation."""
    halving = {"name": "adaptive_asha", "mode": "aggressive", "max_rungs": 2, "divisor": 2}
    trials = {"max_trials": 2, "max_concurrent_trials": 1, "time_metric": "batches", "max_time": 40}
    rates = {"type": "categorical", "vals": [1e-9, 0.003]}
    path = changed(CONST, tmp_path, {**halving, **trials}, learning_rate=rates)
    periods = {"max_length": 40, "validation_period": 20, "checkpoint_period": 20, "reporting_period": 2}
    fit = [f"hyperparameters.fit.{name}.batches={value}" for name, value in periods.items()]
    seed = "reproducibility.experiment_seed=5"  # draws 0.003, then 1e-9, which learns next to nothing
    best, loser = cluster.wait(cluster.create(path, *SHORT, *fit, seed))
    assert [trial.hparams["learning_rate"] for trial in (best, loser)] == [0.003, 1e-9]
    assert {(trial.state.name, trial.restarts) for trial in (best, loser)} == {("COMPLETED", 0)}
    assert best.totalBatchesProcessed == 40
    stopped = cluster.checkpoints(loser)[-1].batch
    assert stopped in (20, 21)
    assert f"stopped     batch {stopped} of 40, by the searcher (adaptive_asha)" in cluster.log(loser)
    if isinstance(cluster, FakeCluster):
        [allocation] = cluster.kept(loser).allocations
        assert (allocation.exit_code, allocation.acked) == (0, False)
        assert [call.rank for call in cluster.calls(STATE, allocation=allocation.id)] == [0]


def test_a_grid_drops_an_impossible_point_and_trains_the_other(cluster: Cluster, tmp_path: Path) -> None:
    """That a point is impossible may be said twice; it is started once, and that is no failure."""
    sizes = {"type": "categorical", "vals": [5, 8]}
    path = changed(
        SEARCH, tmp_path, {"name": "grid"}, micro_batch_size=sizes, zero_stage=1, learning_rate=0.003
    )
    number = cluster.create(path, *tiny(2), paused=True)
    if isinstance(cluster, FakeCluster):
        cluster.inject("close after", "POST", f"{STATE}/early_exit")
    cluster.activate(number)
    trials = {trial.hparams["micro_batch_size"]: trial for trial in cluster.wait(number)}
    assert {(trial.state.name, trial.restarts) for trial in trials.values()} == {("COMPLETED", 0)}
    assert {size: trial.totalBatchesProcessed for size, trial in trials.items()} == {5: 0, 8: 2}
    assert "this point cannot run, and is dropped: " in cluster.log(trials[5])
    assert len(cluster.starts(trials[5])) == 1
