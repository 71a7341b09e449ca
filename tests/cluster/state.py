"""What a master remembers (experiments, trials, what they reported), and how its API shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from tests.cluster.http import Json
from tests.package import SearchMethod

# States by the names of the API, less their ``STATE_``. A trial and an experiment share them.
TERMINAL = frozenset({"COMPLETED", "CANCELED", "ERROR"})
STOPPING = {
    "STOPPING_COMPLETED": "COMPLETED",
    "STOPPING_CANCELED": "CANCELED",
    "STOPPING_KILLED": "CANCELED",
    "STOPPING_ERROR": "ERROR",
}
# The rank, the level and the rest of a line. Source: determined 0.38.1's ``master/static/srv/ship_logs.py``.
SHIPPED = re.compile(r"(?: ?\[rank=(\d+)\] ?)?(?: ?(DEBUG|INFO|WARNING|ERROR|CRITICAL): ?)?(.*)", re.DOTALL)


def now() -> str:
    """The time as the API writes it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def taken_apart(line: str) -> tuple[str, str, str]:
    """The rank and the level of a task's line, empty where it has none, and the rest, which the log shipper sends."""
    return SHIPPED.fullmatch(line).groups("")  # type: ignore[union-attr, return-value]  # it matches any line


@dataclass(kw_only=True)
class Report:
    """Metrics that were accepted. ``archived``: a later run, which began before them, has overtaken them."""

    group: str
    steps: int
    metrics: dict[str, Any]
    run_id: int
    archived: bool = False
    at: str = field(default_factory=now)

    def workload(self) -> Json:
        """``v1MetricsWorkload``."""
        metrics = {"avgMetrics": self.metrics, "batchMetrics": []}
        return {"metrics": metrics, "totalBatches": self.steps, "numInputs": 0, "endTime": self.at}


@dataclass(kw_only=True)
class Checkpoint:
    """A checkpoint that was reported; ``body`` is what the API takes and shows of it."""

    body: dict[str, Json]
    state: str = "COMPLETED"
    at: str = field(default_factory=now)

    @property
    def uuid(self) -> str:
        return str(self.body["uuid"])

    @property
    def steps(self) -> int:
        return int(self.body["metadata"]["steps_completed"])

    def workload(self) -> Json:
        """``v1CheckpointWorkload``."""
        return {
            "uuid": self.uuid,
            "endTime": self.body["reportTime"],
            "state": f"STATE_{self.state}",
            "resources": self.body["resources"],
            "totalBatches": self.steps,
            "metadata": None,
        }


@dataclass(kw_only=True)
class Allocation:
    """One run of a trial's containers."""

    id: str  # ``<task id>.<run id>``
    token: str  # by which its processes are known
    slots: int
    addresses: tuple[str, ...] = ("127.0.0.1",)  # of its machines, which have as many slots each
    ready: bool = False  # its rendezvous is done; until then it can only be killed
    preempted: bool = False  # it has been asked to stop
    acked: bool = False  # it has said that it will
    killed: bool = False  # by the master
    exit_code: int | None = None  # None while it runs
    start_time: str = field(default_factory=now)
    end_time: str | None = None

    @property
    def resources(self) -> list[str]:
        """The names of its containers."""
        return [f"{self.id}-container{number or ''}" for number in range(len(self.addresses))]


@dataclass(kw_only=True, eq=False)
class Trial:
    """A trial. ``allocations`` are its runs, of which the last one may be running.

    ``gate``: from its report of that batch on it waits with its next checkpoint, for as long as this is set.
    """

    id: int
    experiment: Experiment = field(repr=False)
    hparams: dict[str, Json]
    seed: int
    task_id: str
    state: str = "ACTIVE"
    restarts: int = 0
    run_id: int = 0
    warm_start: str = ""
    runner_state: str = "UNSPECIFIED"
    invalid_hp: bool = False
    closed: bool = False
    dont_retry: bool = False  # by a log policy
    progress: float = 0.0
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    allocations: list[Allocation] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    profiled: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # group -> the Profiler tab's
    gate: int | None = None
    logs: list[tuple[str, str]] = field(default_factory=list)  # time, line

    @property
    def running(self) -> Allocation | None:
        """Its run that has not ended, if any."""
        return next((last for last in self.allocations[-1:] if last.exit_code is None), None)

    @property
    def latest(self) -> Checkpoint | None:
        """Its checkpoint of the most steps."""
        return max(self.complete, key=lambda checkpoint: checkpoint.steps, default=None)

    @property
    def complete(self) -> list[Checkpoint]:
        """Its checkpoints that are there."""
        return [each for each in self.checkpoints.values() if each.state == "COMPLETED"]

    def of_group(self, group: str) -> list[Report]:
        """The reports of a group that count, in the order of training."""
        found = [report for report in self.reports if report.group == group and not report.archived]
        return sorted(found, key=lambda report: report.steps)

    def view(self) -> Json:
        """``trialv1Trial``."""
        counted = [report for report in self.reports if not report.archived]
        validations, checkpoints = self.of_group("validation"), self.complete
        best_first = self.experiment.best_first(validations)
        best = [c.workload() for report in best_first for c in checkpoints if c.steps == report.steps]
        state = self.state
        if state == "ACTIVE":
            running = self.running
            state = "QUEUED" if running is None else "RUNNING" if running.ready else "STARTING"
        values: dict[str, dict[str, list[Any]]] = {}
        for report in counted:
            names = {"training": "avg_metrics", "validation": "validation_metrics"}
            group = values.setdefault(names.get(report.group, report.group), {})
            for name, value in report.metrics.items():
                group.setdefault(name, []).append(value)
        return {
            "id": self.id,
            "experimentId": self.experiment.id,
            "startTime": self.start_time,
            "endTime": self.end_time,
            "state": f"STATE_{state}",
            "restarts": self.restarts,
            "hparams": self.hparams,
            "totalBatchesProcessed": max((report.steps for report in counted), default=0),
            "bestValidation": best_first[0].workload() if best_first else None,
            "latestValidation": validations[-1].workload() if validations else None,
            "bestCheckpoint": best[0] if best else None,
            "runnerState": self.runner_state,
            "wallClockTime": 0.0,
            "warmStartCheckpointUuid": self.warm_start,
            "taskId": self.task_id,
            "totalCheckpointSize": str(sum(sum(map(int, c.body["resources"].values())) for c in checkpoints)),
            "checkpointCount": len(checkpoints),
            "summaryMetrics": {
                group: {name: _summed_up(of[name]) for name in of} for group, of in values.items()
            },
            "taskIds": [self.task_id],
            "searcherMetricValue": 0,
        }

    def checkpoint_view(self, checkpoint: Checkpoint) -> Json:
        """``v1Checkpoint``, with the validation that was made at its step."""
        training: dict[str, Any] = {
            "trialId": self.id,
            "experimentId": self.experiment.id,
            "experimentConfig": self.experiment.config,
            "hparams": self.hparams,
        }
        for report in self.of_group("validation"):
            if report.steps == checkpoint.steps:
                training["validationMetrics"] = {"avgMetrics": report.metrics}
                training["searcherMetric"] = report.metrics.get(self.experiment.config["searcher"]["metric"])
        return {**checkpoint.body, "state": f"STATE_{checkpoint.state}", "training": training}

    def report_view(self, report: Report) -> Json:
        """``v1MetricsReport``."""
        key = "validation_metrics" if report.group == "validation" else "avg_metrics"
        return {
            "trialId": self.id,
            "trialRunId": report.run_id,
            "totalBatches": report.steps,
            "endTime": report.at,
            "metrics": {key: report.metrics},
            "group": report.group,
            "archived": report.archived,
            "id": self.reports.index(report) + 1,
        }


def _summed_up(values: list[Any]) -> Json:
    """Of one metric: its last value, and of numbers their statistics."""
    last = values[-1]
    if isinstance(last, bool) or not isinstance(last, int | float):
        kinds = {bool: "boolean", str: "string", list: "array", dict: "object"}
        return {"last": last, "type": kinds.get(type(last), "null")}
    numbers = [value for value in values if isinstance(value, int | float)]
    total = sum(numbers)
    spread = {"max": max(numbers), "min": min(numbers), "mean": total / len(numbers)}
    return {"count": len(numbers), "last": last, "sum": total, "type": "number", **spread}


@dataclass(kw_only=True, eq=False)
class Experiment:
    """An experiment, its config with the cluster's defaults filled in."""

    id: int
    config: dict[str, Json]
    original_config: str
    username: str
    state: str = "ACTIVE"
    context_tgz: bytes = b""
    search: SearchMethod | None = None  # None: of one that is unmanaged
    trials: list[Trial] = field(default_factory=list)
    start_time: str = field(default_factory=now)
    end_time: str | None = None

    def best_first(self, validations: list[Report]) -> list[Report]:
        """Validations by the searcher's metric."""
        searcher = self.config["searcher"]
        name, sign = searcher["metric"], 1 if searcher.get("smaller_is_better", True) else -1
        having = [report for report in validations if name in report.metrics]
        return sorted(having, key=lambda report: sign * float(report.metrics[name]))

    def view(self) -> Json:
        """``v1Experiment``."""
        done = sum(1.0 if trial.closed else trial.progress for trial in self.trials)
        view = {
            "id": self.id,
            "name": self.config["name"],
            "description": self.config.get("description") or "",
            "labels": self.config.get("labels") or [],
            "state": f"STATE_{self.state}",
            "archived": False,
            "config": self.config,
            "originalConfig": self.original_config,
            "jobId": f"job-{self.id}",
            "numTrials": len(self.trials),
            "projectId": 1,
            "projectOwnerId": 1,
            "searcherType": self.config["searcher"]["name"],
            "searcherMetric": self.config["searcher"]["metric"],
            "startTime": self.start_time,
            "username": self.username,
            "progress": 1.0 if self.state == "COMPLETED" else done / max(1, len(self.trials)),
        }
        return {**view, "endTime": self.end_time} if self.end_time else view
