"""The clients of the tools, each behind the same calls. They may wait, and raise: a thread of their own calls them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from determined_ds.logs.shown_run import COMPLETED, FAILED, STOPPED, NumbersAt, ShownRun, flattened

MOST_METRICS = (
    1000  # of a report, and of what a client sends at once. Source: mlflow 3.17's ``utils/validation.py``.
)


class Client(Protocol):
    """A tool's run."""

    def begin(self) -> str:
        """Open the run, or continue it. Returns where people find it; "" for nothing to say."""

    def send(self, reports: deque[NumbersAt]) -> None:
        """Send reports, the oldest first, and remove from the left what the tool has taken."""

    def end(self, status: str) -> None:
        """Close the run: ``completed``, ``stopped`` or ``failed``."""


# ------------------------------------------------------------------------------------------- W&B

STEP = "batches"
# Options -> the client's environment variables, which stand where an option is not stated.
VARIABLES = {
    "project": "WANDB_PROJECT",
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "notes": "WANDB_NOTES",
    "dir": "WANDB_DIR",
}


class WandbRun:
    """A run of Weights & Biases, with the key as its id.

    A resumed run goes back to the batch that it continues from. Where the server cannot do that, and offline, what was
    logged after that batch stays beside what is logged again; ``batches``, the axis of every chart, shows where.

    Args:
        about: The run.
        options: Of ``wandb.init``.
    """

    def __init__(self, about: ShownRun, options: Mapping[str, Any]) -> None:
        own = {
            "project": about.project,
            "name": about.name,
            "group": about.group or None,
            "tags": list(about.tags) or None,
            "notes": about.notes or None,
            "dir": str(about.folder),
        }
        defaults = {key: value for key, value in own.items() if VARIABLES[key] not in os.environ}
        self._options = {**defaults, **options}
        if options.get("tags"):
            self._options["tags"] = [*about.tags, *options["tags"]]
        self._about = about
        self._run: Any = None

    def begin(self) -> str:
        """Open the run."""
        import wandb

        about, config = self._about, dict(self._about.config)
        folder = str(self._options.get("dir") or ".")
        os.makedirs(folder, exist_ok=True)
        mode = str(self._options.get("mode") or os.environ.get("WANDB_MODE") or "online")
        arguments = {
            **self._options,
            "config": config,
            "reinit": "create_new",
            "settings": wandb.Settings(console="off", silent=True),
        }
        if about.continues is not None and mode == "online":
            # A server without rewinding, or a run that it does not know.
            with contextlib.suppress(wandb.Error):
                self._run = wandb.init(resume_from=f"{about.key}?_step={about.continues}", **arguments)
        self._run = self._run or wandb.init(id=about.key, resume="allow", **arguments)
        # Lists of tags are not merged by a resume; a changed configuration replaces the earlier one.
        self._run.config.update(config, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if mode == "online":
            return str(self._run.url or "")
        if folder == str(about.folder):
            folder = about.kept_in
        starts = f"{folder}/wandb/offline-run-*-{about.key}"  # each in a folder of its own
        return "" if mode == "disabled" else f"offline; later: wandb sync {starts}"

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


# ------------------------------------------------------------------------------------------- MLflow

# Tags of a run: how it is found again, and what it belongs to.
KEY, GROUP, LABELS = "determined_ds.run", "determined_ds.group", "determined_ds.labels"
STATUS, CONTINUED = "determined_ds.status", "determined_ds.continued_from_batch"
NOTES, SOURCE = "mlflow.note.content", "mlflow.source.name"  # MLflow's own
STATUSES = {COMPLETED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
MOST_PARAMS, LONGEST = 100, 6000  # as above
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
# Beyond it the report is offered again; the client's own patience is two minutes, seven times.
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}


class MlflowRun:
    """A run of MLflow, found again by a tag.

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
        """Open the run; what is there already is left, so that this can be tried again."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        about, environ = self._about, os.environ
        for name, value in PATIENCE.items():
            environ.setdefault(name, value)
        for name in ("mlflow", "alembic"):  # which tell of each table that they make
            logging.getLogger(name).setLevel(logging.WARNING)
        uri = self._options.get("tracking_uri") or environ.get("MLFLOW_TRACKING_URI")
        # The client's own default is a file in the current folder, which is sent to clusters.
        client = self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{about.folder}/mlflow.db")
        experiment_id = self._experiment_id()
        found = client.search_runs([experiment_id], f"tags.`{KEY}` = '{about.key}'")
        if found:
            self._run_id, known = found[0].info.run_id, found[0].data.params
            client.update_run(self._run_id, status="RUNNING")
        else:
            name = self._options.get("run_name") or environ.get("MLFLOW_RUN_NAME") or about.name
            run = client.create_run(experiment_id, run_name=name, tags={KEY: about.key})
            self._run_id, known = run.info.run_id, {}
        tags = {
            GROUP: about.group,
            LABELS: ", ".join(about.tags),
            NOTES: about.notes,
            SOURCE: str(about.config.get("runs") or ""),
            CONTINUED: "" if about.continues is None else str(about.continues),
            **dict(self._options.get("tags") or {}),
        }
        params = {
            NOT_IN_NAMES.sub("_", name): str(value)[:LONGEST] for name, value in flattened(about.config)
        }
        # A parameter cannot change there.
        tags |= {
            f"changed.{name}": value for name, value in params.items() if known.get(name, value) != value
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

    def send(self, reports: deque[NumbersAt]) -> None:
        """Log metrics, as many reports at once as the client may send."""
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
        self._client.set_tag(self._run_id, STATUS, status)
        self._client.set_terminated(self._run_id, STATUSES[status])


CLIENTS: Mapping[str, tuple[str, Callable[[ShownRun, Mapping[str, Any]], Client]]] = {
    "wandb": ("wandb", WandbRun),
    "mlflow": ("mlflow.tracking", MlflowRun),
}


def load_client(name: str) -> Callable[[ShownRun, Mapping[str, Any]], Client]:
    """Import a tool's client, in the main thread: a worker that is forked during an import may hang in its own."""
    module, kind = CLIENTS[name]
    importlib.import_module(module)
    return kind
