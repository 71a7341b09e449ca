"""What a master remembers (experiments, trials, what they reported), and how its API shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.http import Json, now
from tests.package import SearchMethod

# States by the names of the API, less their ``STATE_``. A trial and an experiment share them.
TERMINAL = frozenset({"COMPLETED", "CANCELED", "ERROR"})
STOPPING = {"STOPPING_COMPLETED": "COMPLETED", "STOPPING_CANCELED": "CANCELED", "STOPPING_KILLED": "CANCELED"}
# The rank, the level and the rest of a line. Source: determined 0.38.1's ``master/static/srv/ship_logs.py``.
SHIPPED = re.compile(r"(?: ?\[rank=(\d+)\] ?)?(?: ?(DEBUG|INFO|WARNING|ERROR|CRITICAL): ?)?(.*)", re.DOTALL)


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


@dataclass(kw_only=True)
class Allocation:
    """One run of a trial's container."""

    id: str  # ``<task id>.<run id>``
    token: str  # by which its processes are known
    slots: int
    ready: bool = False  # its rendezvous is done; until then it can only be killed
    preempted: bool = False  # it has been asked to stop
    acked: bool = False  # it has said that it will
    killed: bool = False  # by the master
    exit_code: int | None = None  # None while it runs
    start_time: str = field(default_factory=now)
    end_time: str | None = None

    @property
    def container(self) -> str:
        """The name of its container."""
        return f"{self.id}-container"


@dataclass(kw_only=True, eq=False)
class Trial:
    """A trial. ``allocations`` are its runs, of which the last one may be running; it is closed at its ``end_time``.

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
    invalid_hp: bool = False
    dont_retry: bool = False  # by a log policy
    progress: float = 0.0
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    allocations: list[Allocation] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    gate: int | None = None
    logs: list[tuple[str, str]] = field(default_factory=list)  # time, line

    @property
    def running(self) -> Allocation | None:
        """Its run that has not ended, if any."""
        return next((last for last in self.allocations[-1:] if last.exit_code is None), None)

    @property
    def complete(self) -> list[Checkpoint]:
        """Its checkpoints that are there."""
        return [each for each in self.checkpoints.values() if each.state == "COMPLETED"]

    @property
    def latest(self) -> Checkpoint | None:
        return max(self.complete, key=lambda checkpoint: checkpoint.steps, default=None)

    def of_group(self, group: str) -> list[Report]:
        """The reports of a group that count, in the order of training."""
        found = [report for report in self.reports if report.group == group and not report.archived]
        return sorted(found, key=lambda report: report.steps)

    def view(self) -> Json:
        """``trialv1Trial``."""
        counted = [report for report in self.reports if not report.archived]
        best = self.experiment.best_validation(self)
        state, running = self.state, self.running
        if state == "ACTIVE":
            state = "QUEUED" if running is None else "RUNNING" if running.ready else "STARTING"
        names = {"training": "avg_metrics", "validation": "validation_metrics"}
        metrics = best and {"avgMetrics": best.metrics, "batchMetrics": []}
        return {
            "id": self.id,
            "experimentId": self.experiment.id,
            "startTime": self.start_time,
            "endTime": self.end_time,
            "state": f"STATE_{state}",
            "restarts": self.restarts,
            "hparams": self.hparams,
            "totalBatchesProcessed": max((report.steps for report in counted), default=0),
            "bestValidation": best
            and {"metrics": metrics, "totalBatches": best.steps, "numInputs": 0, "endTime": best.at},
            "taskId": self.task_id,
            "taskIds": [self.task_id],
            "checkpointCount": len(self.complete),
            "summaryMetrics": {names.get(report.group, report.group): {} for report in counted},
        }

    def checkpoint_view(self, checkpoint: Checkpoint) -> Json:
        """``v1Checkpoint``."""
        training = {
            "trialId": self.id,
            "experimentId": self.experiment.id,
            "experimentConfig": self.experiment.config,
            "hparams": self.hparams,
        }
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

    def best_validation(self, *trials: Trial) -> Report | None:
        """By the searcher's metric."""
        name, sign = self.config["searcher"]["metric"], 1
        if not self.config["searcher"].get("smaller_is_better", True):
            sign = -1
        found = [each for trial in trials for each in trial.of_group("validation") if name in each.metrics]
        return min(found, key=lambda report: sign * float(report.metrics[name]), default=None)

    def view(self) -> Json:
        """``v1Experiment``."""
        done = sum(1.0 if trial.end_time else trial.progress for trial in self.trials)
        return {
            "id": self.id,
            "name": self.config["name"],
            "state": f"STATE_{self.state}",
            "archived": False,
            "config": self.config,
            "originalConfig": self.original_config,
            "jobId": f"job-{self.id}",
            "numTrials": len(self.trials),
            "projectId": 1,
            "projectOwnerId": 1,
            "searcherType": self.config["searcher"]["name"],
            "startTime": self.start_time,
            "username": self.username,
            "progress": 1.0 if self.state == "COMPLETED" else done / max(1, len(self.trials)),
        }
