"""Trials of a Determined cluster as recorded runs, read from a master by Determined's own client."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from determined_ds.checkpoints.files import Checkpoint, as_number
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.secrets import masked
from determined_ds.rundir import records as r
from determined_ds.rundir.metrics_file import NOT_FINITE, Record
from determined_ds.rundir.records import (
    RESTART,
    RESUME,
    START,
    Fault,
    Launch,
    RecordedRun,
    RunResult,
    faults_in,
)

if TYPE_CHECKING:
    from determined.experimental import Determined

SUMMARIES = {"avg_metrics": "training", "validation_metrics": "validation"}  # the names of their summaries


def recorded_trials(
    trials: Sequence[int], experiments: Sequence[int], master: str | None
) -> list[tuple[int, RecordedRun]]:
    """Trials by their ids, and all those of experiments, each once; ``master`` is as for :func:`master_client`.

    Raises:
        ConfigError: no master answers, it refuses the user, or it has no such trial or experiment.
    """
    with _explained("--master", master, master):
        client = master_client(master)
    wanted, runs = dict.fromkeys(trials), dict[int, RecordedRun]()
    for number in experiments:
        with _explained("--experiment", number, master):
            found = sorted(trial.id for trial in client.get_experiment(number).iter_trials())
        if not found:
            raise _problem("--experiment", number, "has no trial yet", "wait until one was created")
        wanted |= dict.fromkeys(found)
    for number in wanted:
        with _explained("--trial", number, master):
            runs[number] = recorded(client.get_trial(number))
    return list(runs.items())


def master_client(master: str | None = None) -> Determined:
    """Log in to a master, that of ``DET_MASTER`` if None, as ``det`` does but without asking for a password.

    Raises:
        PermissionError: nobody is logged in.
        determined.common.api.errors.APIException: the master cannot be reached, or refuses the user.
    """
    from determined.experimental import Determined

    def refuse(*_: object) -> str:
        raise PermissionError("nobody is logged in")

    with mock.patch.object(getpass, "getpass", refuse):
        return Determined(master=master)


@contextlib.contextmanager
def _explained(key: str, value: object, master: str | None) -> Iterator[None]:
    """Within, what the client raises becomes an error with a fix."""
    from determined.common.api import errors

    try:
        yield
    except errors.NotFoundException:
        what = key.removeprefix("--")
        fix = "list those that there are: det experiment list"
        raise _problem(key, value, f"the master knows no such {what}", fix) from None
    except (errors.UnauthenticatedException, PermissionError) as error:
        fix = "log in: det user login NAME; or export DET_USER and DET_PASS"
        raise _problem("--master", master, f"the master refuses the user: {error}", fix) from None
    except (errors.APIException, errors.BadRequestException, errors.BadResponseException, OSError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "export DET_MASTER=http://HOST:8080"
        raise _problem("--master", master, f"the master cannot be asked: {first}", fix) from None


def _problem(key: str, value: object, message: str, fix: str) -> ConfigError:
    given = NOT_GIVEN if value is None else value
    return ConfigError(Problem(key=key, value=given, message=message, fix=fix, code="master"))


def recorded(trial: Any) -> RecordedRun:
    """A trial of Determined's client with its metrics, checkpoints and result."""
    from determined.common.api import bindings
    from determined.common.experimental.checkpoint import CheckpointState

    found = bindings.get_GetTrial(trial._session, trialId=trial.id).trial
    experiment = trial.get_experiment()
    config = {**dict(experiment.config or {}), "name": experiment.name}

    # Reports that count: those that a later allocation trained again are left out by the master.
    records: list[Record] = []
    for group in dict.fromkeys(
        [*SUMMARIES.values(), *(SUMMARIES.get(each, each) for each in trial.summary_metrics or {})]
    ):
        for report in trial.iter_metrics(group):
            metrics, time = report.metrics or {}, report.end_time.timestamp()
            for name, value in metrics.items():
                if isinstance(value, str) and value in NOT_FINITE:  # what JSON lacks is a word
                    metrics[name] = float(value)
            steps = report.steps_completed
            records.append({"group": group, "steps_completed": steps, "metrics": metrics, "time": time})
    records.sort(key=lambda record: (record["steps_completed"], record["group"]))

    faults = faults_in(each["metrics"] for each in records if each["group"] == r.RECOVERY).all
    saved = [each for each in trial.list_checkpoints() if each.report_time]
    kept = [each for each in saved if each.state == CheckpointState.COMPLETED]
    found_at = {each.uuid: int(as_number((each.metadata or {}).get("steps_completed")) or 0) for each in kept}
    newest_first = sorted(found_at.items(), key=lambda item: item[1], reverse=True)
    checkpoints = tuple(Checkpoint(uuid=own, steps_completed=at, path=Path(own)) for own, at in newest_first)

    state = str(found.state.value).removeprefix("STATE_").removeprefix("STOPPING_")
    ended = {
        "COMPLETED": (r.COMPLETED, None),
        "CANCELED": (r.STOPPED, "it was canceled"),
        "PAUSED": (r.STOPPED, f"it is paused; to resume it: det experiment activate {found.experimentId}"),
        "ERROR": (r.FAILED, f"it ended with an error; to see its log: det trial logs {found.id}"),
    }
    batches, result = int(found.totalBatchesProcessed or 0), None
    if state in ended:
        status, reason = ended[state]
        result = RunResult(status=status, reason=reason, steps_completed=batches)

    return RecordedRun(
        path=Path(f"trial-{trial.id}"),
        config=config,
        ds_config={},
        launches=_launches(trial, found, config, records, saved, faults),
        records=tuple(records),
        faults=faults,
        checkpoints=checkpoints,
        result=result,
        is_running=result is None,
    )


def _launches(
    trial: Any,
    found: Any,
    config: dict[str, Any],
    records: Sequence[Record],
    saved: Sequence[Any],
    faults: Sequence[Fault],
) -> tuple[Launch, ...]:
    """A launch for each of its allocations. Which of them are restarts a master says only where all are, or none."""
    from determined.common import util
    from determined.common.api import bindings

    tasks = [bindings.get_GetTask(trial._session, taskId=each).task for each in found.taskIds or ()]

    def seconds(time: str) -> float:  # as of 0.38.1 times of allocations are of UTC, and do not say so
        says_so = time.endswith("Z") or "+" in time
        return util.parse_protobuf_timestamp(time if says_so else f"{time}Z").timestamp()

    starts = [start for task in tasks for each in task.allocations if (start := each.startTime)]
    first, *others = sorted(map(seconds, starts or [found.startTime]))
    hyperparameters = masked({"hyperparameters": dict(found.hparams or {})})["hyperparameters"]
    entrypoint, batch = config.get("entrypoint") or "", hyperparameters.get("global_batch_size")
    entrypoint = entrypoint if isinstance(entrypoint, list) else [entrypoint]
    launch = Launch(
        time=first,
        kind=START,
        name=config["name"] or "",
        runs=" ".join(map(str, entrypoint)),
        slots=int((config.get("resources") or {}).get("slots_per_trial") or 0),
        machines=0,
        accelerator="",
        global_batch_size=batch if isinstance(batch, int) else 0,
        hyperparameters=hyperparameters,
    )
    again = {0: RESUME, len(others): RESTART}.get(found.restarts, f"{RESTART} or {RESUME}")
    launches = [launch]
    written = [
        (seconds(each.report_time), each.uuid, (each.metadata or {})["steps_completed"]) for each in saved
    ]
    for time in others:
        fault = next((each for each in reversed(faults) if launches[-1].time <= each.time < time), None)
        back_to = fault.back_to if fault is not None and fault.skip else None
        at = [steps for when, own, steps in sorted(written) if when < time and back_to in (None, own)]
        before = [record["steps_completed"] for record in records if record["time"] < time]
        trained = max([*before, fault.batch if fault else 0])
        steps = at[-1] if at else max(before, default=0) if back_to is None else 0
        launches.append(replace(launch, time=time, kind=again, steps_completed=steps, trained_before=trained))
    return tuple(launches)
