"""``search.yaml`` over real trials: points are sampled, losers stopped early, impossible points dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.command import ROOT

SEARCH = "experiments/gpt2/search.yaml"
# One slot a trial, so that two run at a time, which share the cores, and a small model of it.
SMALL = (
    "resources.slots_per_trial=1",
    "environment.environment_variables=['OMP_NUM_THREADS=1']",
    "hyperparameters.global_batch_size=16",
    "hyperparameters.sequence_length=16",
    "hyperparameters.zero_stage.maxval=1",
    "hyperparameters.fit.checkpoint_policy=none",
    "data.max_validation_sequences=64",
)


@pytest.mark.long("four trials; test_stops has how a trial stops, test_searchers which ones")
def test_adaptive_asha_stops_losers_and_drops_an_impossible_point(cluster: Cluster) -> None:
    """A loser is told by its state alone. The impossible point is one of the four trials: no other takes its place."""
    # Rungs at 20 and 40 batches; the second point drawn has a micro-batch that 16 samples do not divide by.
    number = cluster.create(
        SEARCH,
        *SMALL,
        "hyperparameters.micro_batch_size={type: categorical, vals: [4, 5, 8, 16]}",
        "hyperparameters.fit.max_length.batches=40",
        "hyperparameters.fit.validation_period.batches=20",
        "searcher.max_time=40",
        "searcher.max_trials=4",
        "searcher.divisor=2",
        "searcher.mode=aggressive",
        "searcher.max_concurrent_trials=2",
        "reproducibility.experiment_seed=70",
    )
    cluster.wait(number)
    trials = cluster.trials(number)
    impossible = [trial for trial in trials if trial.hparams["micro_batch_size"] == 5]
    [dropped] = impossible
    assert (dropped.state, dropped.restarts, dropped.run_id) == ("COMPLETED", 0, 1)
    assert not dropped.reports
    assert "this point cannot run, and is dropped: " in cluster.log(dropped)

    others = [trial for trial in trials if trial is not dropped]
    assert len(others) == 3
    assert {trial.state for trial in others} == {"COMPLETED"}
    assert {trial.restarts for trial in others} == {0}
    trained = {trial.id: trial.of_group("validation")[-1].steps for trial in others}
    best = min(others, key=lambda trial: trial.of_group("validation")[0].metrics["validation_loss"])
    assert trained[best.id] == 40
    losers = [trial for trial in others if trial.stopped_by_searcher and trained[trial.id] == 20]
    assert losers
    for trial in losers:
        assert not trial.allocations[0].acked
        assert trial.allocations[0].exit_code == 0
        assert cluster.checkpoints(trial)[-1].steps == 20
        assert "stopped     batch 20 of 40, by the searcher (adaptive_asha)" in cluster.log(trial)


@pytest.mark.long("trials of a search; test_stops has some, runtime/test_invalid_hp the dropped point")
def test_a_grid_drops_an_impossible_point_and_trains_the_other(cluster: Cluster, tmp_path: Path) -> None:
    """That a point is impossible may be said twice."""
    config = yaml.safe_load((ROOT / SEARCH).read_text())
    config["searcher"] = {"name": "grid", "metric": "validation_loss", "smaller_is_better": True}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(config))
    number = cluster.create(
        path,
        *SMALL,
        "hyperparameters.micro_batch_size={type: categorical, vals: [5, 8]}",
        "hyperparameters.zero_stage=1",
        "hyperparameters.learning_rate=0.003",
        "hyperparameters.fit.max_length.batches=2",
        paused=True,
    )
    [impossible] = [trial for trial in cluster.trials(number) if trial.hparams["micro_batch_size"] == 5]
    cluster.inject("close after", "POST", f"/api/v1/trials/{impossible.id}/early_exit")
    cluster.activate(number)
    cluster.wait(number)
    trials = {trial.hparams["micro_batch_size"]: trial for trial in cluster.trials(number)}
    assert set(trials) == {5, 8}
    assert trials[5].invalid_hp
    assert not trials[5].reports
    assert [report.steps for report in trials[8].of_group("validation")] == [2]
    assert {(trial.state, trial.restarts) for trial in trials.values()} == {("COMPLETED", 0)}
    told = cluster.calls("POST", f"/api/v1/trials/{trials[5].id}/early_exit")
    assert [call.status for call in told] == [None, 200]
