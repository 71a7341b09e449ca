"""A trial on a cluster is one run in the tools of its team, however often it is started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT
from tests.runtime.logs.reading import (
    csv_rows,
    mlflow_points,
    points_of,
    serving_mlflow,
)

pytestmark = [
    pytest.mark.programs,
    pytest.mark.long("tools are proved by runtime/logs, and that a run begins them by cli/test_logging.py"),
]
CONST = "experiments/gpt2/const.yaml"


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_mlflow(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


def test_paused_and_activated_it_is_one_run_there_and_its_file_is_uploaded(
    cluster: Cluster, mlflow_server: str
) -> None:
    tools = (f"hyperparameters.logging.mlflow.tracking_uri={mlflow_server}", "hyperparameters.logging.csv={}")
    number = cluster.create(CONST, *SHORT, *tools, paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 2)
    cluster.activate(number)
    cluster.wait_for_report(trial, "training", 2)
    cluster.pause(number, held)
    stopped_at = cluster.checkpoints(trial)[-1].steps
    cluster.activate(number)
    cluster.wait(number)

    from mlflow.tracking import MlflowClient

    client = MlflowClient(mlflow_server)
    experiment = client.get_experiment_by_name("gpt2_const")
    (run,) = client.search_runs([experiment.experiment_id])
    reported = [(steps, metrics["loss"]) for steps, metrics in cluster.metrics(trial, "training")]
    assert mlflow_points(client, run, "training/loss") == reported
    assert run.info.status == "FINISHED"
    assert run.info.run_name == f"gpt2_const trial {trial.id}"
    assert run.data.tags["determined_ds.continued_from_batch"] == str(stopped_at)
    assert run.data.tags["determined_ds.group"] == f"gpt2_const experiment {number}"
    assert run.data.params["determined.trial_id"] == str(trial.id)
    files = [*cluster.storage.rglob("metrics.csv"), *cluster.storage.rglob("metrics-2.csv")]
    found = [point for file in files for point in points_of(csv_rows(file), "training/loss", "batches")]
    assert found == reported
