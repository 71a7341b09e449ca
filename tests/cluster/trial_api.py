"""What a trial's processes ask the master: their part of the REST API."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy

from tests.cluster import views
from tests.cluster.log_policies import taken_apart
from tests.cluster.server import Refused, route
from tests.cluster.state import Allocation, Call, Checkpoint, Report, Trial

if TYPE_CHECKING:
    from tests.cluster.master import Master

LONGEST_POLL_S = 60.0
LONGEST_HOLD_S = 120.0


class TrialApi:
    """The calls of Determined's harness."""

    def __init__(self, master: Master) -> None:
        self._master = master

    # --- Before it starts -------------------------------------------------------------------------------

    @route("GET", "/api/v1/tasks/{task}/context_directory")
    def context_directory(self, request: Call, task: str) -> dict[str, Any]:
        for trial in self._master.trials.values():
            if trial.task_id == task:
                tgz = self._master.experiments[trial.experiment_id].context_tgz
                return {"b64Tgz": base64.b64encode(tgz).decode()}
        raise Refused(404, f"task '{task}' not found")

    @route("GET", "/api/v1/tasks/{task}")
    def task(self, request: Call, task: str) -> dict[str, Any]:
        """As a real master shows it: the newest allocation first, in UTC without saying so."""
        [trial] = [each for each in self._master.trials.values() if each.task_id == task]
        allocations = [
            {
                "taskId": task,
                "allocationId": each.id,
                "state": "STATE_TERMINATED" if each.exit_code is not None else "STATE_RUNNING",
                "startTime": each.start_time.removesuffix("Z"),
                **({"endTime": each.end_time.removesuffix("Z")} if each.end_time else {}),
                "slots": 0,
            }
            for each in reversed(trial.allocations)
        ]
        kept = {"taskId": task, "taskType": "TASK_TYPE_TRIAL", "startTime": trial.start_time}
        return {"task": {**kept, "allocations": allocations}}

    @route("POST", "/api/v1/allocations/{allocation}/acceleratorData")
    def accelerator_data(self, request: Call, allocation: str) -> None:
        self._master.allocation(allocation)

    @route("GET", "/api/v1/allocations/{allocation}/resources/{resources}/rendezvous")
    def rendezvous(self, request: Call, allocation: str, resources: str) -> dict[str, Any]:
        with self._master.lock():
            _, found = self._master.allocation(allocation)
            count = len(found.addresses)
            ids = [resources_id(found, number) for number in range(count)]
            if resources not in ids:
                raise Refused(404, f"resources '{resources}' not found")
            found.ready = True
            slots = [found.slots // count] * count
            info = {"addresses": list(found.addresses), "rank": ids.index(resources), "slots": slots}
            return {"rendezvousInfo": info}

    @route("POST", "/api/v1/runs/start")
    def run_start(self, request: Call) -> dict[str, Any]:
        self._master.trial(int(request.body["runId"]))
        return {"storageId": 1}

    # --- Preemption -------------------------------------------------------------------------------------

    @route("GET", "/api/v1/allocations/{allocation}/signals/preemption")
    def preemption(self, request: Call, allocation: str) -> dict[str, bool]:
        """Answered when it comes, when the allocation ends, or after ``timeout_seconds`` without."""
        _, found = self._master.allocation(allocation)
        timeout_s = min(LONGEST_POLL_S, float(request.query.get("timeout_seconds", 60)))
        self._master.wait(lambda: found.preempted or found.exit_code is not None, timeout_s)
        return {"preempt": found.preempted or found.exit_code is not None}

    @route("POST", "/api/v1/allocations/{allocation}/signals/ack_preemption")
    def ack_preemption(self, request: Call, allocation: str) -> None:
        with self._master.lock():
            self._master.allocation(allocation)[1].acked = True

    # --- While it trains --------------------------------------------------------------------------------

    @route("POST", "/api/v1/trials/{trial_id}/runner/metadata")
    def runner_metadata(self, request: Call, trial_id: int) -> None:
        with self._master.lock():
            self._master.trial(trial_id).runner_state = str(request.body["state"])

    @route("POST", "/api/v1/trials/{trial_id}/metrics")
    def metrics(self, request: Call, trial_id: int) -> None:
        body = request.body["metrics"]
        if int(body["trialId"]) != trial_id:
            raise Refused(400, "the path and the body name different trials")
        if body.get("stepsCompleted") is None:  # of the machine, not of the training: they have a time alone
            with self._master.lock():
                profiled = self._master.trial(trial_id).profiled
                profiled.setdefault(request.body["group"], []).append(body["metrics"]["avgMetrics"])
            return
        report = Report(
            group=request.body["group"],
            steps=int(body["stepsCompleted"]),
            metrics=body["metrics"]["avgMetrics"],
            run_id=int(body["trialRunId"]),
        )
        with self._master.lock():
            self._master.report(self._master.trial(trial_id), report)

    @route("POST", "/api/v1/trials/{trial_id}/progress")
    def progress(self, request: Call, trial_id: int) -> None:
        value = float(request.body["progress"])
        if not 0.0 <= value <= 1.0:
            raise Refused(400, f"progress {value} is not between 0 and 1")
        with self._master.lock():
            trial = self._master.trial(trial_id)
            trial.progress = value
        if trial.gate is not None:
            batch, opened = trial.gate
            # The metrics before it may come a moment later.
            if self._master.wait(lambda: any(r.steps >= batch for r in trial.of_group("training")), 0.3):
                opened.wait(LONGEST_HOLD_S)

    @route("POST", "/api/v1/trials/{trial_id}/early_exit")
    def early_exit(self, request: Call, trial_id: int) -> None:
        reason = request.body["reason"]
        if reason not in ("EXITED_REASON_INVALID_HP", "EXITED_REASON_INIT_INVALID_HP"):
            raise Refused(400, f"unhandled early exit reason: {reason}")
        with self._master.lock():
            self._master.trial(trial_id).invalid_hp = True

    @route("GET", "/api/v1/experiments/{experiment_id}/searcher/best_searcher_validation_metric")
    def best_validation(self, request: Call, experiment_id: int) -> dict[str, float]:
        with self._master.lock():
            best = self._master.best_validation(self._master.experiment(experiment_id))
        if best is None:
            raise Refused(404, "no validations for experiment")
        return {"metric": float(str(numpy.float32(best)))}  # the answer has no more digits

    # --- Checkpoints ------------------------------------------------------------------------------------

    @route("POST", "/api/v1/checkpoints")
    def report_checkpoint(self, request: Call) -> None:
        body = request.body
        with self._master.lock():
            trial = self._trial_of(body["taskId"])
            if body["uuid"] in self._master.checkpoints:
                raise Refused(500, f"inserting checkpoint model: duplicate key {body['uuid']}")
            self._master.checkpoints[body["uuid"]] = Checkpoint(
                uuid=body["uuid"],
                trial_id=trial.id,
                run_id=trial.run_id,
                steps=int(body["metadata"]["steps_completed"]),
                body=body,
            )

    @route("PATCH", "/api/v1/checkpoints")
    def patch_checkpoints(self, request: Call) -> None:
        """A trial has deleted some of a checkpoint's files, or all."""
        with self._master.lock():
            for patch in request.body["checkpoints"]:
                if patch["uuid"] not in self._master.checkpoints:
                    raise Refused(404, f"checkpoint '{patch['uuid']}' not found")
                left = (patch.get("resources") or {}).get("resources") or {}
                state = "PARTIALLY_DELETED" if left else "DELETED"
                self._master.checkpoints[patch["uuid"]].state = state

    def _trial_of(self, task: str) -> Trial:
        for trial in self._master.trials.values():
            if trial.task_id == task:
                return trial
        raise Refused(404, f"task '{task}' not found")

    # --- Logs -------------------------------------------------------------------------------------------

    @route("POST", "/api/v1/task/logs")
    def post_task_logs(self, request: Call) -> None:
        for line in request.body["logs"]:
            self._master.log(self._trial_of(line["task_id"]), line["log"].rstrip("\n"))

    @route("GET", "/api/v1/trials/{trial_id}/logs")
    def logs(self, request: Call, trial_id: int) -> Iterator[dict[str, Any]]:
        trial = self._master.trial(trial_id)
        backwards = request.query.get("orderBy") == "ORDER_BY_DESC"
        lines = self._log_lines(
            trial, request.query.get("follow") == "true", int(request.query.get("limit") or 0), backwards
        )
        levels = request.repeated.get("levels")
        return (line for line in lines if levels is None or line["level"] in levels)

    @route("GET", "/api/v1/trials/metrics/trial_metrics")
    def stream_metrics(self, request: Call) -> Iterator[dict[str, Any]]:
        """Source: ``GetMetrics`` in determined 0.38.1's ``master/internal/db/postgres_trial_metrics.go``."""
        group = request.query["group"]
        for trial in [self._master.trial(int(number)) for number in request.repeated["trialIds"]]:
            with self._master.lock():
                reports = [views.report_view(trial, report) for report in trial.of_group(group)]
            if reports:
                yield {"metrics": reports}

    def _log_lines(self, trial: Trial, follow: bool, limit: int, backwards: bool) -> Iterator[dict[str, Any]]:
        lines = list(enumerate(trial.logs))
        if backwards:
            lines.reverse()
        yield from (_log_line(trial, *line) for line in (lines[:limit] if limit else lines))
        num_sent = len(lines)
        while follow:
            ended = trial.closed
            if num_sent == len(trial.logs):
                if ended:
                    return
                self._wait_for_more(trial, num_sent)
            for number in range(num_sent, len(trial.logs)):
                yield _log_line(trial, number, trial.logs[number])
                num_sent += 1

    def _wait_for_more(self, trial: Trial, num_sent: int) -> None:
        self._master.wait(lambda: num_sent < len(trial.logs) or trial.closed, timeout_s=10)


def _log_line(trial: Trial, number: int, entry: tuple[str, str]) -> dict[str, Any]:
    at, line = entry
    rank, level, text = taken_apart(line)
    return {
        "id": str(number),
        "timestamp": at,
        "message": line + "\n",
        "log": text,
        "level": f"LOG_LEVEL_{level or 'INFO'}",
        "trialId": trial.id,
        **({"rankId": int(rank)} if rank else {}),
    }


def resources_id(allocation: Allocation, number: int = 0) -> str:
    """The name of one of an allocation's containers."""
    return f"{allocation.id}-container{number or ''}"
