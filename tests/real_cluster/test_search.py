"""Searches: over schedules; a point that cannot run is refused, and adaptive ASHA stops what it gives up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.command import ROOT
from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import ONE_THREAD, TINY

SEARCH = "experiments/gpt2/search.yaml"
# One slot a trial, and a small model of it.
SMALL = (
    ONE_THREAD,
    "resources.slots_per_trial=1",
    "hyperparameters.global_batch_size=16",
    "hyperparameters.sequence_length=32",
    "hyperparameters.zero_stage.maxval=1",
    "hyperparameters.fit.reporting_period.batches=5",
    "data.max_validation_sequences=64",
)
RUNG, LENGTH = 20, 80
# Schedule -> its bubble on two ranks with eight micro-batches.
COUNTED = {"gpipe": 1 / 9, "1f1b": 1 / 9, "interleaved": 1 / 17, "zb-h1": 1 / 25, "dualpipev": 1 / 17}


def test_a_random_search_drops_the_points_that_cannot_run(cluster: RealCluster, tmp_path: Path) -> None:
    """Each is started once, and the search goes on to its end."""
    config = yaml.safe_load((ROOT / SEARCH).read_text())
    config["searcher"] = {"name": "random", "metric": "validation_loss", "max_trials": 4}
    path = tmp_path / "random.yaml"
    path.write_text(yaml.safe_dump(config))
    number = cluster.create(
        path,
        *SMALL,
        "hyperparameters.micro_batch_size={type: categorical, vals: [5, 8]}",
        "hyperparameters.fit.max_length.batches=10",
        "hyperparameters.fit.validation_period.batches=5",
    )
    trials = cluster.wait(number)
    refused = [trial for trial in trials if trial["hparams"]["micro_batch_size"] == 5]
    trained = [trial for trial in trials if trial not in refused]
    assert refused
    assert trained
    for trial in trials:
        assert (trial["state"], trial["restarts"]) == ("STATE_COMPLETED", 0)
        assert trial["totalBatchesProcessed"] == (0 if trial in refused else 10)
    for trial in refused:
        assert "this point cannot run, and is dropped: " in cluster.log(trial)


def test_a_grid_goes_over_the_schedules_of_a_pipeline(cluster: RealCluster, tmp_path: Path) -> None:
    """Each trains to the same loss; its bubble, measured and counted, is on the master and in its report."""
    config = yaml.safe_load((ROOT / "experiments/gpt2/pipeline.yaml").read_text())
    config["searcher"] = {"name": "grid", "metric": "validation_loss"}
    config["hyperparameters"]["pipe_schedule"] = {"type": "categorical", "vals": list(COUNTED)}
    config["hyperparameters"]["trial_seed"] = 0  # else the searcher draws one for each trial
    path = tmp_path / "schedules.yaml"
    path.write_text(yaml.safe_dump(config))
    number = cluster.create(path, *TINY)
    trials = cluster.wait(number)
    assert {trial["hparams"]["pipe_schedule"] for trial in trials} == COUNTED.keys()
    losses = []
    for trial in trials:
        assert (trial["restarts"], trial["totalBatchesProcessed"]) == (0, 10)
        reported = trial["summaryMetrics"]["avg_metrics"]
        assert 0.0 < reported["bubble"]["min"] <= reported["bubble"]["max"] < 1.0
        assert reported["bubble_ideal"]["last"] == pytest.approx(COUNTED[trial["hparams"]["pipe_schedule"]])
        losses.append(trial["bestValidation"]["metrics"]["avgMetrics"]["validation_loss"])
    assert losses == pytest.approx([losses[0]] * len(COUNTED), rel=2e-5)
    done = CliRunner().invoke(main, ["report", "--experiment", str(number), "--json"])
    assert done.exit_code == 0, done.output
    for run in json.loads(done.stdout)["runs"]:
        assert {"training/bubble", "training/bubble_ideal"} <= run["curves"].keys()


def test_adaptive_asha_stops_what_it_gives_up(cluster: RealCluster) -> None:
    """Within a batch of the rung; the best trains to the end. Determined 0.38.1 by itself stops none."""
    number = cluster.create(
        SEARCH,
        *SMALL,
        "hyperparameters.micro_batch_size={type: categorical, vals: [4, 8]}",
        f"hyperparameters.fit.max_length.batches={LENGTH}",
        f"hyperparameters.fit.validation_period.batches={RUNG}",
        f"searcher.max_time={LENGTH}",
        "searcher.max_trials=8",
        "searcher.max_rungs=2",
        "searcher.divisor=4",
        "searcher.mode=aggressive",
        "searcher.max_concurrent_trials=4",
    )
    trials = cluster.wait(number)
    assert len(trials) == 8
    assert {(trial["state"], trial["restarts"]) for trial in trials} == {("STATE_COMPLETED", 0)}
    given_up = [trial for trial in trials if trial["totalBatchesProcessed"] < LENGTH]
    assert 0 < len(given_up) < len(trials)
    for trial in given_up:
        assert trial["totalBatchesProcessed"] in (RUNG, RUNG + 1)
        assert cluster.checkpoints(trial)
    best = min(trials, key=lambda trial: cluster.metrics(trial)["validation"][0][1]["validation_loss"])
    assert best["totalBatchesProcessed"] == LENGTH
