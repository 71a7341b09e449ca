"""A master that fails for a while, or answers oddly, costs a trial nothing; one that rejects a report ends it."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.scenarios import CONST, tiny

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
