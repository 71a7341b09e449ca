"""The master's state as its API shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.cluster.state import Checkpoint, Experiment, Report, Trial

if TYPE_CHECKING:
    from tests.cluster.master import Master


def experiment_view(master: Master, experiment: Experiment) -> dict[str, Any]:
    """``v1Experiment``."""
    trials = master.trials_of(experiment)
    done = sum(1.0 if trial.closed else trial.progress for trial in trials)
    view = {
        "id": experiment.id,
        "name": experiment.name,
        "description": experiment.config.get("description") or "",
        "labels": experiment.config.get("labels") or [],
        "state": f"STATE_{experiment.state}",
        "archived": False,
        "config": experiment.config,
        "originalConfig": experiment.original_config,
        "jobId": experiment.job_id,
        "numTrials": len(trials),
        "projectId": 1,
        "projectOwnerId": 1,
        "searcherType": experiment.searcher["name"],
        "searcherMetric": experiment.searcher["metric"],
        "startTime": experiment.start_time,
        "username": experiment.username,
        "progress": 1.0 if experiment.state == "COMPLETED" else done / max(1, len(trials)),
    }
    if experiment.end_time:
        view["endTime"] = experiment.end_time
    return view


def trial_view(master: Master, trial: Trial) -> dict[str, Any]:
    """``trialv1Trial``."""
    reports = [report for report in trial.reports if not report.archived]
    validations = trial.of_group("validation")
    checkpoints = [
        c for c in master.checkpoints.values() if c.trial_id == trial.id and c.state == "COMPLETED"
    ]
    ranked = _best_first(master, trial, validations)
    best_at = [c for report in ranked for c in checkpoints if c.steps == report.steps]
    return {
        "id": trial.id,
        "experimentId": trial.experiment_id,
        "startTime": trial.start_time,
        "endTime": trial.end_time if trial.closed else None,
        "state": f"STATE_{_shown_state(trial)}",
        "restarts": trial.restarts,
        "hparams": trial.hparams,
        "totalBatchesProcessed": max((report.steps for report in reports), default=0),
        "bestValidation": metrics_view(ranked[0]) if ranked else None,
        "latestValidation": metrics_view(validations[-1]) if validations else None,
        "bestCheckpoint": checkpoint_workload_view(best_at[0], metadata=None) if best_at else None,
        "runnerState": trial.runner_state,
        "wallClockTime": 0.0,
        "warmStartCheckpointUuid": trial.warm_start or "",
        "taskId": trial.task_id,
        "totalCheckpointSize": str(sum(checkpoint.size_bytes for checkpoint in checkpoints)),
        "checkpointCount": len(checkpoints),
        "summaryMetrics": _summary(reports),
        "taskIds": [trial.task_id],
        "searcherMetricValue": 0,
    }


def _best_first(master: Master, trial: Trial, validations: list[Report]) -> list[Report]:
    searcher = master.experiments[trial.experiment_id].searcher
    name, sign = searcher["metric"], 1 if searcher.get("smaller_is_better", True) else -1
    return sorted((r for r in validations if name in r.metrics), key=lambda r: sign * float(r.metrics[name]))


def _shown_state(trial: Trial) -> str:
    if trial.state != "ACTIVE":
        return trial.state
    if trial.running is None:
        return "QUEUED"
    return "RUNNING" if trial.running.ready else "STARTING"


def _summary(reports: list[Report]) -> dict[str, Any]:
    names = {"training": "avg_metrics", "validation": "validation_metrics"}
    values: dict[str, dict[str, list[Any]]] = {}
    for report in reports:
        group = values.setdefault(names.get(report.group, report.group), {})
        for name, value in report.metrics.items():
            group.setdefault(name, []).append(value)
    return {group: {name: _summed_up(of[name]) for name in of} for group, of in values.items()}


def _summed_up(values: list[Any]) -> dict[str, Any]:
    """Of one metric: its last value, and of numbers their statistics."""
    last = values[-1]
    if isinstance(last, bool) or not isinstance(last, int | float):
        kinds = {bool: "boolean", str: "string", list: "array", dict: "object"}
        return {"last": last, "type": kinds.get(type(last), "null")}
    numbers = [value for value in values if isinstance(value, int | float)]
    total = sum(numbers)
    return {
        "count": len(numbers),
        "last": last,
        "max": max(numbers),
        "mean": total / len(numbers),
        "min": min(numbers),
        "sum": total,
        "type": "number",
    }


def metrics_view(report: Report) -> dict[str, Any]:
    """``v1MetricsWorkload``."""
    metrics = {"avgMetrics": report.metrics, "batchMetrics": []}
    return {"metrics": metrics, "totalBatches": report.steps, "numInputs": 0, "endTime": report.at}


def report_view(trial: Trial, report: Report) -> dict[str, Any]:
    """``v1MetricsReport``."""
    key = "validation_metrics" if report.group == "validation" else "avg_metrics"
    return {
        "trialId": trial.id,
        "trialRunId": report.run_id,
        "totalBatches": report.steps,
        "endTime": report.at,
        "metrics": {key: report.metrics},
        "group": report.group,
        "archived": report.archived,
        "id": trial.reports.index(report) + 1,
    }


def checkpoint_workload_view(checkpoint: Checkpoint, *, metadata: dict[str, Any] | None) -> dict[str, Any]:
    """``v1CheckpointWorkload``."""
    return {
        "uuid": checkpoint.uuid,
        "endTime": checkpoint.body["reportTime"],
        "state": f"STATE_{checkpoint.state}",
        "resources": checkpoint.body["resources"],
        "totalBatches": checkpoint.steps,
        "metadata": metadata,
    }


def checkpoint_view(master: Master, checkpoint: Checkpoint) -> dict[str, Any]:
    """``v1Checkpoint``, with the validation that was made at its step."""
    trial = master.trials[checkpoint.trial_id]
    experiment = master.experiments[trial.experiment_id]
    training: dict[str, Any] = {
        "trialId": trial.id,
        "experimentId": experiment.id,
        "experimentConfig": experiment.config,
        "hparams": trial.hparams,
    }
    for report in trial.of_group("validation"):
        if report.steps == checkpoint.steps:
            training["validationMetrics"] = {"avgMetrics": report.metrics}
            training["searcherMetric"] = report.metrics.get(experiment.searcher["metric"])
    return {**checkpoint.body, "state": f"STATE_{checkpoint.state}", "training": training}


def page(name: str, items: list[Any], query: dict[str, str]) -> dict[str, Any]:
    """A part of a list, as ``offset`` and ``limit`` ask for it."""
    offset, limit = int(query.get("offset") or 0), int(query.get("limit") or 0)
    shown = items[offset:][: limit or None]
    end = offset + len(shown)
    pagination = {
        "offset": offset,
        "limit": limit,
        "startIndex": offset,
        "endIndex": end,
        "total": len(items),
    }
    return {name: shown, "pagination": pagination}
