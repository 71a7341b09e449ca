"""The clients of Weights & Biases and MLflow behind the same three calls. They may wait and raise: only the thread that
delivers calls them.

``begin`` opens or continues the run and returns where people find it; it may be tried again. ``send`` removes from the
left of the reports what the tool has taken. ``end`` closes the run. What a resumed run logs again stays beside the
earlier.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.documents.document import dotted, leaves

COMPLETED, STOPPED, FAILED = "completed", "stopped", "failed"
# Of a report, and of what MLflow takes at once. Source: mlflow 3.17's ``utils/validation.py``
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000
STEP = "batches"  # the axis of W&B's charts
MLFLOW_KEY = "determined_ds.run"  # the tag by which a run is found again
MLFLOW_STATUSES = {COMPLETED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True)
class NumbersAt:
    """Metrics of one moment: batches trained, seconds since the epoch, whole name -> number (finite or not)."""

    step: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """The run that tools show."""

    key: str  # 32 hexadecimal digits that stay the same when the run is resumed or restarted
    name: str
    project: str  # where a tool puts it that is given no project
    group: str  # the search that it is a trial of; "" for none
    tags: tuple[str, ...]
    notes: str
    config: Mapping[str, Any]  # with where values came from, and the surroundings
    folder: Path  # where tools may write


class WandbRun:
    """A run of Weights & Biases, with the key as its id."""

    def __init__(self, about: ShownRun, options: Mapping[str, Any]) -> None:
        self._about, self._given = about, options
        self._run: Any = None

    def begin(self) -> str:
        """Open the run."""
        import wandb

        about = self._about
        own: dict[str, Any] = {"project": about.project, "name": about.name, "run_group": about.group or None}
        own |= {"tags": list(about.tags) or None, "notes": about.notes or None, "dir": str(about.folder)}
        # W&B's own environment variables decide where the YAML does not.
        options = {key: value for key, value in own.items() if f"WANDB_{key.upper()}" not in os.environ}
        options = {key.removeprefix("run_"): value for key, value in options.items()} | dict(self._given)
        if self._given.get("tags"):
            options["tags"] = [*about.tags, *self._given["tags"]]
        os.makedirs(str(options.get("dir") or "."), exist_ok=True)
        settings = wandb.Settings(console="off", silent=True)
        self._run = run = wandb.init(
            id=about.key, resume="allow", reinit="create_new", settings=settings, **options
        )
        run.config.update(dict(about.config), allow_val_change=True)  # a resume may change it
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)
        return str(run.url or "")  # none where it is offline

    def send(self, reports: deque[NumbersAt]) -> None:
        """Log rows; the step is that of batches, unless the run has been further before."""
        while reports:
            report = reports[0]
            row = {**report.metrics, STEP: report.step, "_timestamp": report.time}
            self._run.log(row, **({"step": report.step} if report.step >= self._run.step else {}))
            reports.popleft()

    def end(self, status: str) -> None:
        """Close the run."""
        self._run.summary["status"] = status
        if status == STOPPED:
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if status == FAILED else 0)


class MlflowRun:
    """A run of MLflow, found again by a tag."""

    def __init__(self, about: ShownRun, options: Mapping[str, Any]) -> None:
        self._about, self._given, self._run_id = about, options, ""
        self._client: Any = None

    def begin(self) -> str:
        """Open the run."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        about, given, environ = self._about, self._given, os.environ
        # The client's own patience is two minutes, seven times; a report that is not taken is offered again anyway.
        environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        for name in ("mlflow", "alembic"):  # which tell of each table that they make
            logging.getLogger(name).setLevel(logging.WARNING)
        # The client's own default is a file in the current folder, which is sent to clusters.
        uri = given.get("tracking_uri") or environ.get("MLFLOW_TRACKING_URI")
        self._client = client = MlflowClient(tracking_uri=uri or f"sqlite:///{about.folder}/mlflow.db")
        stated = given.get("experiment_name") or environ.get("MLFLOW_EXPERIMENT_NAME")
        experiment_id = environ.get("MLFLOW_EXPERIMENT_ID") if not stated else None
        if experiment_id is None:
            name = stated or about.project
            found = client.get_experiment_by_name(name)
            # Another run may make it meanwhile: then this is tried again.
            experiment_id = str(found.experiment_id if found else client.create_experiment(name))
        if runs := client.search_runs([experiment_id], f"tags.`{MLFLOW_KEY}` = '{about.key}'"):
            run = runs[0]
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            name = given.get("run_name") or environ.get("MLFLOW_RUN_NAME") or about.name
            run = client.create_run(experiment_id, run_name=name, tags={MLFLOW_KEY: about.key})
        self._run_id, known = run.info.run_id, run.data.params
        params = {
            NOT_IN_NAMES.sub("_", dotted(path)): str(value)[:LONGEST_PARAM]
            for path, value in leaves(about.config)
        }
        tags = {
            "determined_ds.group": about.group,
            "determined_ds.labels": ", ".join(about.tags),
            "mlflow.note.content": about.notes,
            "mlflow.source.name": str(about.config.get("runs") or ""),
            **dict(given.get("tags") or {}),
            # MLflow does not let a parameter change.
            **{f"changed.{key}": value for key, value in params.items() if known.get(key, value) != value},
        }
        for key, value in tags.items():
            if str(value):
                client.set_tag(self._run_id, key, str(value))
        new = [Param(name, value) for name, value in params.items() if name not in known]
        for start in range(0, len(new), MOST_PARAMS):
            client.log_batch(self._run_id, params=new[start : start + MOST_PARAMS])
        uri = client.tracking_uri
        if not uri.startswith("http"):
            return f"mlflow ui --backend-store-uri {uri}"
        return f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{self._run_id}"

    def send(self, reports: deque[NumbersAt]) -> None:
        """Log metrics, as many reports at once as MLflow takes."""
        from mlflow.entities import Metric

        while reports:
            metrics: list[Any] = []
            taken = 0
            for report in list(reports):
                if taken and len(metrics) + len(report.metrics) > MOST_METRICS:
                    break
                metrics += [
                    Metric(NOT_IN_NAMES.sub("_", name), float(value), int(report.time * 1000), report.step)
                    for name, value in report.metrics.items()
                ]
                taken += 1
            self._client.log_batch(self._run_id, metrics=metrics)
            for _ in range(taken):
                reports.popleft()

    def end(self, status: str) -> None:
        """Close the run."""
        self._client.set_tag(self._run_id, "determined_ds.status", status)
        self._client.set_terminated(self._run_id, MLFLOW_STATUSES[status])


Client = WandbRun | MlflowRun


def client_kind(name: str) -> type[WandbRun] | type[MlflowRun]:
    """Import a tool's client, in the main thread: a worker that is forked during an import may hang in its own."""
    importlib.import_module({"wandb": "wandb", "mlflow": "mlflow.tracking"}[name])
    return WandbRun if name == "wandb" else MlflowRun
