"""A tuning that ``det-ds autotune --emit`` wrote, submitted as it is: its trials measure themselves on the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.cluster.cluster import Cluster
from tests.command import ROOT

pytestmark = pytest.mark.long("a tuning on a cluster; test_emit has what is submitted, test_search a grid")

STEPS, WARMUP = 5, 1
# Of the forty points that are written, four.
FEW = (
    "hyperparameters.zero_stage={type: categorical, vals: [0, 2]}",
    "hyperparameters.micro_batch_size={type: categorical, vals: [4]}",
    "hyperparameters.sequence_length=16",
    "data.max_validation_sequences=64",
)


def form(hparams: dict[str, Any]) -> tuple[int, int]:
    """ZeRO stage and pipeline stages of a point."""
    return hparams["zero_stage"], hparams["pipe_parallel_size"]


def test_a_tuning_is_a_grid_that_drops_what_cannot_run(cluster: Cluster, tmp_path: Path) -> None:
    """ZeRO 2 of a pipeline cannot; the others report the metric that the web UI ranks them by, and nothing is saved."""
    path = tmp_path / "tune.yaml"
    words = [
        str(ROOT / "experiments/gpt2/const.yaml"),
        str(ROOT),
        "--over",
        "zero_stage,micro_batch,pipeline",
    ]
    options = ["--steps", str(STEPS), "--warmup", str(WARMUP), "--emit", str(path), "--accelerator", "cpu"]
    emitted = CliRunner().invoke(main, ["autotune", *words, *options])
    assert emitted.exit_code == 0, emitted.output

    number = cluster.create(path, *FEW)
    experiment = cluster.wait(number)
    trials = {form(trial.hparams): trial for trial in cluster.trials(number)}
    assert set(trials) == {(0, 1), (2, 1), (0, 2), (2, 2)}
    dropped = trials.pop((2, 2))
    assert dropped.invalid_hp
    assert not dropped.reports
    assert "this point cannot run, and is dropped: " in cluster.log(dropped)
    speeds = []
    for (_, stages), trial in trials.items():
        assert (trial.state, trial.restarts) == ("COMPLETED", 0), cluster.log(trial)
        [report] = trial.of_group("validation")
        assert report.steps == STEPS + WARMUP
        assert {"samples_per_second", "step_seconds", "peak_memory_gib", "loss"} <= set(report.metrics)
        assert cluster.checkpoints(trial) == []
        speeds.append(report.metrics["samples_per_second"])
        [training] = trial.of_group("training")
        assert ("bubble" in training.metrics) == (stages == 2)
    assert min(speeds) > 0
    assert experiment.config["searcher"]["smaller_is_better"] is False
    assert cluster.master.best_validation(experiment) == max(speeds)
