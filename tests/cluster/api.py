"""The master's REST API: what ``det``, a trial's processes and ``core_v2`` ask, as one table of routes.

A call holds the master's state while it is answered, but where it waits (``Master.wait``).
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from determined.common import util
from determined.util import merge_dicts

from tests.cluster.http import Call, Json, Refused
from tests.cluster.state import TERMINAL, Checkpoint, Experiment, Report, Trial, taken_apart
from tests.package import schema_problems

if TYPE_CHECKING:
    from tests.cluster.master import Master

VERSION = "0.38.1"
# What a real master filled in, without the lists of its own configuration.
DEFAULTS = json.loads((Path(__file__).with_name("recorded") / "defaults.json").read_text())
USERNAME = "determined"  # the only user, without a password
OPEN = ("/info", "/api/v1/master", "/api/v1/auth/login")  # without a token
VERBS = {"activate": "ACTIVE", "pause": "PAUSED", "cancel": "STOPPING_CANCELED", "kill": "STOPPING_KILLED"}
LONGEST_HOLD_S = 120.0


def answer(master: Master, call: Call) -> Json | Iterator[Json]:
    """Obey a call."""
    if call.user is None and call.allocation is None and call.path not in OPEN:
        raise Refused(401, "invalid credentials")
    with master.lock():
        return _answer(master, call, call.body)


def _answer(master: Master, call: Call, body: Json) -> Json | Iterator[Json]:
    match (call.method, *call.path.removeprefix("/api/v1").split("/")[1:]):
        # --- The master, users
        case "GET", "info":
            return {"cluster_id": master.cluster_id, "cluster_name": "test", "version": VERSION}
        case "GET", "master":
            ids = dict.fromkeys(("masterId", "clusterId"), master.cluster_id)
            off = dict.fromkeys(("hasCustomLogo", "strictJobQueueControl"), False)
            return {**ids, **off, "clusterName": "test", "version": VERSION}
        case "POST", "auth", "login":
            if body["username"] != USERNAME or body.get("password"):
                raise Refused(401, "invalid credentials")
            token = f"user-{uuid.uuid4()}"
            master.tokens[token] = USERNAME
            return {"token": token, "user": user()}
        case "GET", "me":
            return {"user": user()}

        # --- Experiments
        case "POST", "experiments":
            return create(master, call)
        case "POST", "experiments", "continue":
            return continue_(master, body)
        case "GET", "experiments", number:
            return shown(master.experiments[int(number)])
        case "POST", "experiments", number, verb if verb in VERBS:
            return master.set_state(master.experiments[int(number)], VERBS[verb])
        case "GET", "experiments", number, "trials":
            return page("trials", [trial.view() for trial in master.experiments[int(number)].trials])
        case "GET", "experiments", number, "searcher", "best_searcher_validation_metric":
            experiment = master.experiments[int(number)]
            if (best := experiment.best_validation(*experiment.trials)) is None:
                raise Refused(404, "no validations for experiment")
            metric = best.metrics[experiment.config["searcher"]["metric"]]
            return {"metric": float(str(numpy.float32(metric)))}  # the answer has no more digits

        # --- A task
        case "GET", "tasks", name, "context_directory":
            return {"b64Tgz": base64.b64encode(of_task(master, name).experiment.context_tgz).decode()}
        case "GET", "tasks", name:
            trial = of_task(master, name)
            allocations = [  # the newest first, in UTC without saying so
                {
                    "taskId": trial.task_id,
                    "allocationId": each.id,
                    "state": "STATE_TERMINATED" if each.end_time else "STATE_RUNNING",
                    "startTime": each.start_time.removesuffix("Z"),
                    **({"endTime": each.end_time.removesuffix("Z")} if each.end_time else {}),
                    "slots": 0,
                }
                for each in reversed(trial.allocations)
            ]
            kept = {"taskId": trial.task_id, "taskType": "TASK_TYPE_TRIAL", "startTime": trial.start_time}
            return {"task": {**kept, "allocations": allocations}}
        case "POST", "task", "logs":
            for line in body["logs"]:
                master.log(of_task(master, line["task_id"]), line["log"].rstrip("\n"))
        case "POST", "allocations", name, "acceleratorData":
            master.allocation(name)
        case "GET", "allocations", name, "resources", container, "rendezvous":
            _, allocation = master.allocation(name)
            assert container == allocation.container
            allocation.ready = True
            there = {"addresses": ["127.0.0.1"], "rank": 0, "slots": [allocation.slots]}
            return {"rendezvousInfo": there}
        case "GET", "allocations", name, "signals", "preemption":
            _, allocation = master.allocation(name)
            timeout_s = min(60.0, float(call.query.get("timeout_seconds", ["60"])[0]))
            ended = master.wait(lambda: allocation.preempted or allocation.exit_code is not None, timeout_s)
            return {"preempt": ended}
        case "POST", "allocations", name, "signals", "ack_preemption":
            master.allocation(name)[1].acked = True

        # --- A trial
        case "POST", "runs", "start":
            assert master.trials[int(body["runId"])]
            return {"storageId": 1}
        case "GET", "trials", "metrics", "trial_metrics":
            # Source: ``GetMetrics`` in determined 0.38.1's ``master/internal/db/postgres_trial_metrics.go``.
            trial = master.trials[int(call.query["trialIds"][0])]
            found = [trial.report_view(report) for report in trial.of_group(call.query["group"][0])]
            return iter([{"metrics": found}] if found else [])
        case "GET", "trials", number:
            return {"trial": master.trials[int(number)].view()}
        case "GET", "trials", number, "checkpoints":
            trial = master.trials[int(number)]
            return page("checkpoints", map(trial.checkpoint_view, trial.checkpoints.values()))
        case "GET", "trials", number, "logs":
            return logs(master, master.trials[int(number)], call)
        case "POST", "trials", number, "runner", "metadata":
            assert master.trials[int(number)]
        case "POST", "trials", number, "metrics":
            trial, reported, group = master.trials[int(number)], body["metrics"], body["group"]
            if reported.get("stepsCompleted") is not None:  # others are of the machine, not of the training
                values = reported["metrics"]["avgMetrics"]
                steps, run_id = int(reported["stepsCompleted"]), int(reported["trialRunId"])
                master.report(trial, Report(group=group, steps=steps, metrics=values, run_id=run_id))
        case "POST", "trials", number, "progress":
            trial, value = master.trials[int(number)], float(body["progress"])
            if not 0.0 <= value <= 1.0:
                raise Refused(400, f"progress {value} is not between 0 and 1")
            trial.progress = value
        case "POST", "trials", number, "early_exit":
            if body["reason"] not in ("EXITED_REASON_INVALID_HP", "EXITED_REASON_INIT_INVALID_HP"):
                raise Refused(400, f"unhandled early exit reason: {body['reason']}")
            master.trials[int(number)].invalid_hp = True

        # --- Checkpoints
        case "POST", "checkpoints":
            trial, new = of_task(master, body["taskId"]), Checkpoint(body=body)
            if any(new.uuid in each.checkpoints for each in master.trials.values()):
                raise Refused(500, f"inserting checkpoint model: duplicate key {new.uuid}")
            trial.checkpoints[new.uuid] = new
            hold(master, trial)
        case "PATCH", "checkpoints":  # a trial has deleted some of a checkpoint's files, or all
            for patch in body["checkpoints"]:
                left = (patch.get("resources") or {}).get("resources")
                checkpoint = owner(master, patch["uuid"]).checkpoints[patch["uuid"]]
                checkpoint.state = "PARTIALLY_DELETED" if left else "DELETED"
        case "GET", "checkpoints", name:
            trial = owner(master, name)
            return {"checkpoint": trial.checkpoint_view(trial.checkpoints[name])}

        # --- Unmanaged: the same external id is the same experiment, and the same trial
        # Source: ``master/internal/api_experiment.go`` and ``api_trials.go`` of determined v0.38.1.
        case "PUT", "experiments", "by-external-id", name:
            if name not in master.unmanaged:
                number, text = len(master.experiments) + 1, body["config"]
                config = {**parse(text), "resources": {}}
                new = Experiment(id=number, config=config, original_config=text, username=USERNAME)
                master.experiments[number] = master.unmanaged[name] = new
            return shown(master.unmanaged[name])
        case "PUT", "trials":
            external, asked = f"trial {body['externalTrialId']}", body["createTrialRequest"]
            if external not in master.unmanaged:
                number, experiment = len(master.trials) + 1, master.experiments[int(asked["experimentId"])]
                made = {"hparams": asked["hparams"], "seed": 0, "task_id": f"unmanaged-{number}"}
                trial = Trial(id=number, experiment=experiment, **made)
                experiment.trials.append(trial)
                master.trials[number] = master.unmanaged[external] = trial
            return {"trial": master.unmanaged[external].view()}
        case "POST", "trials", number, "start":
            trial = master.trials[int(number)]
            if trial.run_id and not body.get("resume"):
                raise Refused(400, "trial has been started already")
            trial.run_id, trial.state, latest = trial.run_id + 1, "RUNNING", trial.latest
            known = {"trialRunId": trial.run_id, "stepsCompleted": latest.steps if latest else 0}
            return {**known, "latestCheckpoint": latest.uuid} if latest else known
        case "PATCH", "trials", number:  # a heartbeat; with a state, its beginning or its end
            trial = master.trials[int(number)]
            trial.state = (body.get("state") or trial.state).removeprefix("STATE_")
            return {"trial": trial.view()}
        case _:
            raise Refused(404, f"no such call: {call.method} {call.path}")
    return None


def of_task(master: Master, name: str) -> Trial:
    return master.trial_with(lambda trial: trial.task_id == name)


def owner(master: Master, uuid: str) -> Trial:
    """The trial that has reported a checkpoint."""
    return master.trial_with(lambda trial: uuid in trial.checkpoints)


def user() -> Json:
    return {"id": 2, "username": USERNAME, "admin": True, "active": True}


def page(name: str, items: Iterable[Any]) -> Json:
    """A list, which is always given whole."""
    found = [*items]
    return {name: found, "pagination": {"startIndex": 0, "endIndex": len(found), "total": len(found)}}


def shown(experiment: Experiment) -> Json:
    return {"experiment": experiment.view(), "config": experiment.config}


def parse(text: str) -> Json:
    """YAML 1.2, as Go and Determined's client read it: 1e+30 is a number."""
    return util.safe_load_yaml_with_exceptions(text)


def as_go(value: Any) -> Any:
    """Numbers as Go writes them in JSON: 1.0 is 1."""
    if isinstance(value, dict):
        return {key: as_go(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_go(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e21
    return int(value) if is_whole else value


def judged(master: Master, config: Json) -> Json:
    """A config with its defaults, unless the slots or our own check, held to a master's verdicts, refuse it."""
    errors, _ = schema_problems(config)
    if errors:
        found = [f"<config>.{problem.key}: {problem.message}" for problem in errors]
        raise Refused(400, "invalid experiment configuration: " + "; ".join(found))
    complete = as_go(completed(json.loads(json.dumps(config)), master.storage))
    slots = complete["resources"]["slots_per_trial"]
    if master.agent is not None and slots > master.agent.slots:
        raise Refused(400, f"slots requested ({slots}) exceeds cluster capacity ({master.agent.slots})")
    return complete


def completed(config: Json, cluster_storage: Json) -> Json:
    """A config over what the master fills in; a null counts as absent."""
    config = {"name": "Experiment (named by the master)", **_given(config)}
    storage = config.get("checkpoint_storage", {})
    if storage.get("type", cluster_storage["type"]) == cluster_storage["type"]:
        storage = {**cluster_storage, **storage}
    saved = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
    environment = dict(config.get("environment", {}))
    variables = environment.get("environment_variables", [])
    if isinstance(variables, list):
        environment["environment_variables"] = {"cpu": variables, "cuda": variables}
    policies = config.get("log_policies", [])
    names = [policy.get("name") for policy in policies]
    policies += [each for each in DEFAULTS["experiment"]["log_policies"] if each["name"] not in names]
    own = {
        "reproducibility": {"experiment_seed": 0},  # the master takes the time
        "hyperparameters": {},
        **config,
        "searcher": {**DEFAULTS["searchers"][config["searcher"]["name"]], **config["searcher"]},
        "checkpoint_storage": {**saved, **storage},
        "environment": environment,
    }
    return {**merge_dicts(DEFAULTS["experiment"], own), "log_policies": policies}


def _given(value: Json) -> Json:
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if item is not None}
    return {key: item if key == "hyperparameters" else _given(item) for key, item in kept.items()}


def create(master: Master, call: Call) -> Json:
    packed = io.BytesIO()  # the context as the task gets it
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in call.body.get("modelDefinition") or []:
            content = base64.b64decode(file.get("content") or "")
            entry = tarfile.TarInfo(file["path"])
            entry.type, entry.mode = bytes([int(file["type"])]), int(file["mode"]) & 0o7777
            entry.mtime = int(file.get("mtime") or time.time())
            entry.size = len(content) if entry.isfile() else 0
            archive.addfile(entry, io.BytesIO(content))
    experiment = Experiment(
        id=len(master.experiments) + 1,
        config=judged(master, parse(call.body["config"])),
        original_config=call.body["config"],
        context_tgz=packed.getvalue(),
        state="ACTIVE" if call.body.get("activate") else "PAUSED",
        username=call.user or "",
    )
    master.add(experiment)
    return {**shown(experiment), "warnings": []}


def continue_(master: Master, body: Json) -> Json:
    experiment = master.experiments[int(body["id"])]
    if experiment.state not in TERMINAL:
        raise Refused(400, f"experiment in non terminal state '{experiment.state}', try again later")
    override = parse(body.get("overrideConfig") or "") or {}
    config = judged(master, merge_dicts(parse(experiment.original_config), override))
    experiment.config = config
    master.revive(experiment)
    return {**shown(experiment), "warnings": []}


def hold(master: Master, trial: Trial) -> None:
    """Hold a trial that has reported the batch of its gate: it waits for this answer, and for none to a report."""
    gate = trial.gate
    # The metrics before it may come a moment later.
    if gate is not None and master.wait(
        lambda: any(report.steps >= gate for report in trial.of_group("training")), 0.3
    ):
        master.wait(lambda: trial.gate is None, LONGEST_HOLD_S)


def logs(master: Master, trial: Trial, call: Call) -> Iterator[Json]:
    """The lines; and those to come until the trial's end, where it is followed."""
    levels, sent, is_closed = call.query.get("levels"), 0, False
    is_followed = call.query.get("follow") == ["true"]
    while not is_closed:
        if is_followed:
            master.wait(lambda sent=sent: sent < len(trial.logs) or trial.end_time, timeout_s=10)  # type: ignore[misc]
        is_closed = bool(trial.end_time) or not is_followed
        new = trial.logs[sent:]
        for number, (at, line) in enumerate(new, start=sent):
            rank, level, text = taken_apart(line)
            level = f"LOG_LEVEL_{level or 'INFO'}"
            shown = {"message": f"{line}\n", "log": text, "level": level, "trialId": trial.id}
            shown |= {"rankId": int(rank)} if rank else {}
            if levels is None or level in levels:
                yield {"id": str(number), "timestamp": at, **shown}
        sent += len(new)
