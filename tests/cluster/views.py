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
    checkpoints = [c for c in master.checkpoints.values() if master.trials[c.trial_id] in trials]
    view = {
        "id": experiment.id,
        "name": experiment.name,
        "description": experiment.description,
        "labels": experiment.labels,
        "state": f"STATE_{experiment.state}",
        "archived": experiment.archived,
        "config": experiment.config,
        "originalConfig": experiment.original_config,
        "jobId": experiment.job_id,
        "numTrials": len(trials),
        "trialIds": [trial.id for trial in trials],
        "projectId": 1,
        "projectOwnerId": 1,
        "projectName": "Uncategorized",
        "workspaceName": "Uncategorized",
        "searcherType": experiment.searcher["name"],
        "searcherMetric": experiment.searcher["metric"],
        "resourcePool": experiment.config["resources"].get("resource_pool") or "default",
        "startTime": experiment.start_time,
        "username": experiment.username,
        "progress": 1.0 if experiment.state == "COMPLETED" else done / max(1, len(trials)),
        "checkpointCount": len(checkpoints),
        "forkedFrom": experiment.parent_id,
    }
    if experiment.end_time:
        view["endTime"] = experiment.end_time
    return view


def trial_view(master: Master, trial: Trial) -> dict[str, Any]:
    """``trialv1Trial``."""
    reports = [report for report in trial.reports if not report.archived]
    validations = trial.of_group("validation")
    view = {
        "id": trial.id,
        "experimentId": trial.experiment_id,
        "state": f"STATE_{_shown_state(trial)}",
        "hparams": trial.hparams,
        "restarts": trial.restarts,
        "startTime": trial.start_time,
        "totalBatchesProcessed": max((report.steps for report in reports), default=0),
        "runnerState": trial.runner_state,
        "taskId": trial.task_id,
        "checkpointCount": sum(c.trial_id == trial.id for c in master.checkpoints.values()),
        "summaryMetrics": _summary(reports),
        "latestValidation": metrics_view(validations[-1]) if validations else None,
    }
    if trial.warm_start:
        view["warmStartCheckpointUuid"] = trial.warm_start
    if trial.end_time and trial.closed:
        view["endTime"] = trial.end_time
    return view


def _shown_state(trial: Trial) -> str:
    if trial.state != "ACTIVE":
        return trial.state
    if trial.running is None:
        return "QUEUED"
    return "RUNNING" if trial.running.ready else "STARTING"


def _summary(reports: list[Report]) -> dict[str, Any]:
    names = {"training": "avg_metrics", "validation": "validation_metrics"}
    summary: dict[str, Any] = {}
    for report in reports:
        group = summary.setdefault(names.get(report.group, report.group), {})
        group.update({key: {"last": value} for key, value in report.metrics.items()})
    return summary


def metrics_view(report: Report) -> dict[str, Any]:
    """``v1MetricsWorkload``."""
    metrics = {"avgMetrics": report.metrics, "batchMetrics": None}
    return {"metrics": metrics, "totalBatches": report.steps, "numInputs": 0, "endTime": report.at}


def workloads_view(master: Master, trial: Trial) -> list[dict[str, Any]]:
    """``v1WorkloadContainer`` of everything that a trial has done."""
    workloads = [
        {report.group: metrics_view(report)}
        for report in trial.reports
        if not report.archived and report.group in ("training", "validation")
    ]
    for checkpoint in master.checkpoints.values():
        if checkpoint.trial_id == trial.id:
            workloads.append(
                {
                    "checkpoint": {
                        "uuid": checkpoint.uuid,
                        "state": f"STATE_{checkpoint.state}",
                        "totalBatches": checkpoint.steps,
                        "metadata": checkpoint.body["metadata"],
                        "resources": checkpoint.body["resources"],
                        "endTime": checkpoint.body["reportTime"],
                    }
                }
            )
    return workloads


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
