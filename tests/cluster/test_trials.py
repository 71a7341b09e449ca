"""Trials that end well, badly, or as their searcher wants; a master that fails, and a cable that is cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster, metrics_of
from tests.cluster.scenarios import (
    CONST,
    LONG_ENOUGH,
    ON_CPU,
    ONE_SLOT,
    SEARCH,
    SHORT,
    ZB_H1,
    batches,
    by_launcher,
    tiny,
)
from tests.cluster.state import Experiment, Trial, taken_apart
from tests.harness.command import ROOT
from tests.harness.machines import Machine
from tests.package import NO_RESTART_HELPS

whole = pytest.mark.long(
    "whole trainings; test_follow trains const.yaml, experiments/test_templates.py the rest"
)


@whole
@pytest.mark.parametrize("path", ON_CPU)
def test_a_template_has_the_metrics_of_a_run_here(
    cluster: Cluster, run_here: Callable[..., Path], path: str
) -> None:
    """To the last digit, and from the same seed."""
    if yaml.safe_load((ROOT / path).read_text())["resources"]["slots_per_trial"] > cluster.agent.slots:
        pytest.skip("it takes more slots than there are")
    [trial] = cluster.wait(cluster.create(path, *batches(10)))
    here = metrics_of(run_here(path, *batches(10)))
    assert trial.restarts == 0
    assert all(here.values())
    assert metrics_of(trial) == here


@whole
@pytest.mark.parametrize("launcher", ["deepspeed", "torch_distributed"])
def test_trials_run_side_by_side_on_one_agent(cluster: Cluster, launcher: str) -> None:
    """One slot a trial, and every slot taken: the ranks of two on one host network do not meet at a port."""
    overrides = (*LONG_ENOUGH, ONE_SLOT, by_launcher(CONST, launcher), "max_restarts=5")
    made = [cluster.create(CONST, *overrides, paused=True) for _ in range(2)]
    with cluster.reached(2, *made):
        assert all(each.trials[0].running for each in made)
    one, other = (trial for each in made for trial in cluster.wait(each))
    assert metrics_of(one) == metrics_of(other), "the same experiment, other numbers"
    assert "EADDRINUSE" not in one.log + other.log


# ------------------------------------------------------------------------------------- failures

CASES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "configuration": (
        CONST,
        ("hyperparameters.global_batch_size=33",),
        r"hyperparameters\.global_batch_size = 33 .*; fix: use ",
    ),
    "data path": (CONST, ("data.path=/nowhere",), r"data\.path = '/nowhere': .*; fix: "),
    "loss, launched by deepspeed": (
        CONST,
        ("hyperparameters.learning_rate=1.0e30", by_launcher(CONST, "deepspeed")),
        "the loss was not finite at batch ",
    ),
    "schedule": (ZB_H1, ("hyperparameters.activation_checkpoint_interval=1",), "zb-h1"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_no_restart_can_help_is_started_once_and_its_errors_say_why(cluster: Cluster, name: str) -> None:
    """Whatever ``max_restarts`` says; in one line, which the web UI's filter "Error" finds."""
    path, overrides, said = CASES[name]
    [trial] = cluster.wait(cluster.create(path, *SHORT, *overrides), "ERROR")
    assert (trial.restarts, len(trial.allocations)) == (0, 1)
    errors = [text for _, level, text in (taken_apart(line) for _, line in trial.logs) if level == "ERROR"]
    assert re.search(said, "\n".join(errors)), errors
    assert NO_RESTART_HELPS.removeprefix("ERROR: ") in errors[-1]


# ------------------------------------------------------------------------------------- searches


def search(
    cluster: Cluster, folder: Path, path: str, *overrides: str, searcher: dict[str, Any], **hparams: Any
) -> Experiment:
    """Create a template with another searcher and other hyperparameters, paused."""
    config = yaml.safe_load((ROOT / path).read_text())
    config["searcher"] = {"metric": "validation_loss", "smaller_is_better": True, **searcher}
    config["hyperparameters"].update(hparams)
    (folder / "search.yaml").write_text(yaml.safe_dump(config))
    return cluster.create(folder / "search.yaml", *overrides, paused=True)


@pytest.mark.long("a whole search; test_recorded has what is stopped, and test_follow a trial of a cluster")
def test_a_loser_stops_after_its_rung(cluster: Cluster, tmp_path: Path) -> None:
    """It learns so by its state alone, which the chief reads once after each validation."""
    halving = {"name": "adaptive_asha", "mode": "aggressive", "max_rungs": 2, "divisor": 2}
    trials = {"max_trials": 2, "max_concurrent_trials": 1, "time_metric": "batches", "max_time": 40}
    rates = {"type": "categorical", "vals": [1e-9, 0.003]}
    periods = {"max_length": 40, "validation_period": 20, "checkpoint_period": 20, "reporting_period": 2}
    fit = [f"hyperparameters.fit.{name}.batches={value}" for name, value in periods.items()]
    words = [*SHORT, *fit, "reproducibility.experiment_seed=5"]  # draws 0.003, then 1e-9
    made = search(cluster, tmp_path, CONST, *words, searcher={**halving, **trials}, learning_rate=rates)
    cluster.activate(made)
    best, loser = cluster.wait(made)
    assert [trial.hparams["learning_rate"] for trial in (best, loser)] == [0.003, 1e-9]
    assert {(trial.state, trial.restarts) for trial in (best, loser)} == {("COMPLETED", 0)}
    assert best.batches == 40
    assert loser.latest
    assert (stopped := loser.latest.steps) in (20, 21)
    assert f"stopped     batch {stopped} of 40, by the searcher (adaptive_asha)" in loser.log
    [allocation] = loser.allocations
    assert (allocation.exit_code, allocation.acked) == (0, False)
    asked = cluster.calls("/api/v1/trials/[0-9]+", allocation=allocation.id)
    assert [call.rank for call in asked] == [0]


@pytest.mark.long("trials of a search; runtime/test_invalid_hp.py has the dropped point")
def test_a_grid_drops_an_impossible_point_and_trains_the_other(cluster: Cluster, tmp_path: Path) -> None:
    """That a point is impossible may be said twice; it is started once, and that is no failure."""
    own = {
        "micro_batch_size": {"type": "categorical", "vals": [5, 8]},
        "zero_stage": 1,
        "learning_rate": 0.003,
    }
    made = search(cluster, tmp_path, SEARCH, *tiny(2), searcher={"name": "grid"}, **own)
    cluster.inject("close after", "POST", "/api/v1/trials/[0-9]+/early_exit")
    cluster.activate(made)
    trials: dict[int, Trial] = {trial.hparams["micro_batch_size"]: trial for trial in cluster.wait(made)}
    assert {(trial.state, trial.restarts) for trial in trials.values()} == {("COMPLETED", 0)}
    assert {size: trial.batches for size, trial in trials.items()} == {5: 0, 8: 2}
    assert "this point cannot run, and is dropped: " in trials[5].log
    assert len(trials[5].allocations) == 1


# ------------------------------------------------------------------------------------- a master that fails

TRIAL = r"/api/v1/trials/[0-9]+/"
BEST = "/api/v1/experiments/[0-9]+/searcher/best_searcher_validation_metric"


def test_odd_answers_cost_a_trial_nothing(cluster: Cluster) -> None:
    """Nor do nulls in the configuration for what was not said."""
    made = cluster.create(CONST, *tiny(6), "max_restarts=0", paused=True)
    made.config.update(description=None, labels=None, bind_mounts=None)
    made.config["searcher"].update(max_length=None, smaller_is_better=None, source_trial_id=None)
    met = [
        # The report was taken, and its answer lost: sent again, a master refuses it even where it is the same.
        cluster.inject("close after", "POST", f"{TRIAL}metrics"),
        cluster.inject("answer after", "POST", "/api/v1/checkpoints", status=204),
        cluster.inject("close after", "POST", "/api/v1/checkpoints"),
        cluster.inject("hang", "POST", f"{TRIAL}metrics", skip=4, seconds=1.0),
        cluster.inject("hang", "POST", f"{TRIAL}progress", skip=1, seconds=20.0),  # no step waits for it
        cluster.inject("answer", "POST", f"{TRIAL}progress", status=501, body={"error": "not implemented"}),
        cluster.inject("answer", "POST", f"{TRIAL}runner/metadata", status=404),
        *(
            cluster.inject("answer", "GET", BEST, body=body)
            for body in ({}, {"metric": None}, {"metric": "NaN"})
        ),
    ]
    cluster.activate(made)
    [trial] = cluster.wait(made)
    assert all(fault.is_met for fault in met)
    assert [report.steps for report in trial.of_group("training")] == [1, 2, 3, 4, 5, 6]
    assert [report.steps for report in trial.of_group("validation")] == [2, 4, 6]
    assert [checkpoint.steps for checkpoint in trial.complete] == [2, 4, 6]
    assert not any(report.archived for report in trial.reports)
    for found in trial.checkpoints.values():
        assert (cluster.storage / found.uuid / "manifest.json").exists()
        # A trial that is killed just then would go on from the checkpoint, and its metrics would never be sent.
        before = (report for report in trial.of_group("training") if report.steps <= found.steps)
        assert all(report.at <= found.at for report in before)
    first, *_, last = trial.of_group("training")
    began, ended = (datetime.fromisoformat(each.at.replace("Z", "+00:00")) for each in (first, last))
    assert (ended - began).total_seconds() < 20.0


@pytest.mark.long("a whole trial; odd answers are short")
def test_a_report_that_is_rejected_ends_the_trial_and_its_log_says_why(cluster: Cluster) -> None:
    message = "invalid run id, 1 (reported) != 2 (expected)"
    made = cluster.create(CONST, *tiny(6), "max_restarts=0", paused=True)
    body = {"error": {"error": message}}
    cluster.inject("answer", "POST", f"{TRIAL}metrics", trial=made.trials[0], status=400, body=body)
    cluster.activate(made)
    [trial] = cluster.wait(made, "ERROR")
    assert message in trial.log


# ------------------------------------------------------------------------------------- two machines


@pytest.mark.usefixtures("cluster")  # where there is one, there can be another
@pytest.mark.long("two machines with an agent each; test_as_rank has two machines under torchrun")
def test_a_cut_cable_is_reported_and_the_restart_resumes_from_the_shared_folder(
    machines: tuple[Machine, Machine], run_here: Callable[..., Path]
) -> None:
    """The rank that the master still hears of names the one that it no longer hears of, and exits as a crash does."""
    environment = {"OMP_NUM_THREADS": "1", "DETERMINED_DS_HANG_TIMEOUT": "0.1"}
    with Cluster(machines[0].shared / "cluster", machines=machines, environment=environment) as cluster:
        made = cluster.create(CONST, *SHORT, "max_restarts=1", paused=True)
        [trial] = made.trials
        with cluster.reached(6, made):
            [checkpoint] = trial.complete
            assert set(checkpoint.files) >= {f"det_state_dict_rank{rank}.pth" for rank in (0, 1)}
            machines[0].cut()
            cluster.poll(lambda: "no sign of life from rank 1 (machine1)" in trial.log)
            machines[0].plug_in()
            cluster.poll(lambda: trial.allocations[0].end_time is not None)
        cluster.wait(made)
        assert (trial.restarts, len(trial.allocations)) == (1, 2)
        assert f"resumed at batch {checkpoint.steps} of" in trial.log
        here = metrics_of(run_here(CONST, *SHORT))
        assert metrics_of(trial)["validation"][-1] == here["validation"][-1]
