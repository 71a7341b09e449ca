"""A search on a cluster: a loser stops after its rung. Points that cannot run: ``test_startup_hook.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster, FakeCluster
from tests.cluster.scenarios import CONST, SHORT
from tests.harness.command import ROOT

HALVING = {"name": "adaptive_asha", "mode": "aggressive", "max_rungs": 2, "divisor": 2}
TRIALS = {"max_trials": 2, "max_concurrent_trials": 1, "time_metric": "batches", "max_time": 40}
PERIODS = {"max_length": 40, "validation_period": 20, "checkpoint_period": 20, "reporting_period": 2}


@pytest.mark.long("a whole search; test_recorded has what is stopped")
def test_a_loser_stops_after_its_rung(cluster: Cluster, tmp_path: Path) -> None:
    """It learns so by its state alone, which the chief reads once after each validation."""
    config = yaml.safe_load((ROOT / CONST).read_text())
    config["searcher"].update(**HALVING, **TRIALS)
    config["hyperparameters"]["learning_rate"] = {"type": "categorical", "vals": [1e-9, 0.003]}
    path = tmp_path / "search.yaml"
    path.write_text(yaml.safe_dump(config))
    fit = [f"hyperparameters.fit.{name}.batches={value}" for name, value in PERIODS.items()]
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
        asked = cluster.calls("/api/v1/trials/[0-9]+", allocation=allocation.id)
        assert [call.rank for call in asked] == [0]
