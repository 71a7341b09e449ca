"""MLflow, by its client."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from determined_ds.train.logs.flattening import flattened
from determined_ds.train.logs.messages import COMPLETED, FAILED, STOPPED, NumbersAt, ShownRun

# Tags of a run: how it is found again, and what it belongs to.
KEY, GROUP, LABELS = "determined_ds.run", "determined_ds.group", "determined_ds.labels"
STATUS, CONTINUED = "determined_ds.status", "determined_ds.continued_from_batch"
NOTES, SOURCE = "mlflow.note.content", "mlflow.source.name"  # MLflow's own
STATUSES = {COMPLETED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
# Of what a client may send at once, and of what a name and a value may hold.
# Source: mlflow 3.17's ``utils/validation.py``.
MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 6000
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
# Beyond it the report is offered again; the client's own patience is two minutes, seven times.
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


class MlflowRun:
    """A run there, found again by a tag.

    MLflow cannot delete metrics: what a run logged after the batch that it continues from stays, beside what is logged
    again, and a tag says from which batch it continued.

    Args:
        about: The run.
        options: ``tracking_uri``, ``experiment_name``, ``run_name``, ``tags``; by default what the client's
            environment variables say, or without them a file in the run directory.
    """

    def __init__(self, about: ShownRun, options: Mapping[str, Any]) -> None:
        self._about = about
        self._options = options
        self._client: Any = None
        self._run_id = ""

    def begin(self) -> str:
        """Open the run."""
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        uri = self._options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        # The client's own default is a file in the current folder, which is sent to clusters.
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{self._about.folder}/mlflow.db")
        experiment_id = self._experiment_id()
        found = self._client.search_runs([experiment_id], f"tags.`{KEY}` = '{self._about.key}'")
        if found:
            self._run_id, known = found[0].info.run_id, found[0].data.params
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            name = self._options.get("run_name") or os.environ.get("MLFLOW_RUN_NAME") or self._about.name
            run = self._client.create_run(experiment_id, run_name=name, tags={KEY: self._about.key})
            self._run_id, known = run.info.run_id, {}
        self._tag()
        self._log_params(known)
        uri = self._client.tracking_uri
        if not uri.startswith("http"):
            return f"mlflow ui --backend-store-uri {uri}"
        return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{self._run_id}"

    def _experiment_id(self) -> str:
        """Of the experiment, made where it is not there; another run may make it meanwhile."""
        from mlflow.exceptions import MlflowException

        stated = self._options.get("experiment_name") or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        name = stated or self._about.project
        if "MLFLOW_EXPERIMENT_ID" in os.environ and not stated:
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _tag(self) -> None:
        about = self._about
        tags = {GROUP: about.group, LABELS: ", ".join(about.tags), NOTES: about.notes}
        tags[SOURCE] = str(about.config.get("runs") or "")
        if about.continues is not None:
            tags[CONTINUED] = str(about.continues)
        for key, value in {**tags, **dict(self._options.get("tags") or {})}.items():
            if str(value):
                self._client.set_tag(self._run_id, key, str(value))

    def _log_params(self, known: Mapping[str, str]) -> None:
        """Log the configuration; a value that has changed since the run began, which MLflow keeps, as a tag."""
        from mlflow.entities import Param

        values = {
            NOT_IN_NAMES.sub("_", name): str(value)[:LONGEST]
            for name, value in flattened(self._about.config).items()
        }
        for name, value in values.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._run_id, f"changed.{name}", value)
        new = [Param(name, value) for name, value in values.items() if name not in known]
        for some in _portions(new, MOST_PARAMS):
            self._client.log_batch(self._run_id, params=some)

    def report(self, reports: list[NumbersAt]) -> None:
        """Log metrics."""
        from mlflow.entities import Metric

        metrics = [
            Metric(NOT_IN_NAMES.sub("_", name), float(value), int(report.time * 1000), report.step)
            for report in reports
            for name, value in report.metrics.items()
        ]
        for some in _portions(metrics, MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def end(self, status: str) -> None:
        """Close the run."""
        self._client.set_tag(self._run_id, STATUS, status)
        self._client.set_terminated(self._run_id, STATUSES[status])


def _portions(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
