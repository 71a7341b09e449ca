"""Trials of a Determined cluster as recorded runs, read from a master by Determined's own client."""

from __future__ import annotations

import getpass
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.secrets import masked
from determined_ds.protocol.best import as_number
from determined_ds.protocol.checkpoint_files import Checkpoint
from determined_ds.protocol.conclusion import COMPLETED, FAILED, STOPPED, RunResult
from determined_ds.protocol.kept_warnings import KeptWarning, counted
from determined_ds.protocol.launches import RESTART, RESUME, START, Launch
from determined_ds.protocol.metrics_file import NOT_FINITE, Record
from determined_ds.protocol.recorded_run import RecordedRun

GROUPS = ("training", "validation")
SUMMARIES = {"avg_metrics": "training", "validation_metrics": "validation"}  # the names of their summaries
ENDED = {"COMPLETED": COMPLETED, "CANCELED": STOPPED, "PAUSED": STOPPED, "ERROR": FAILED}
RESTART_OR_RESUME = f"{RESTART} or {RESUME}"  # the kind of a start
MOST_LINES = 5000  # of a log, at level WARNING and above; the last ones
LOGIN = "log in: det user login NAME; or export DET_USER and DET_PASS"


class Cluster:
    """A master that is asked for trials.

    Args:
        master: Its address; None: that of ``DET_MASTER``.

    Raises:
        ConfigError: no master answers, or it refuses the user.
    """

    def __init__(self, master: str | None = None) -> None:
        from determined.experimental import Determined

        self._address = master
        with self._explained("--master", master), mock.patch.object(getpass, "getpass", _refuse_to_ask):
            self._client = Determined(master=master)

    def trials_of(self, experiment_id: int) -> list[int]:
        """The trials of an experiment.

        Raises:
            ConfigError: there is no such experiment, or it has no trial yet.
        """
        with self._explained("--experiment", experiment_id):
            found = sorted(trial.id for trial in self._client.get_experiment(experiment_id).iter_trials())
        if not found:
            raise _problem("--experiment", experiment_id, "has no trial yet", "wait until one was created")
        return found

    def trial(self, trial_id: int) -> tuple[RecordedRun, tuple[KeptWarning, ...]]:
        """A trial with its metrics, checkpoints and result; and the warnings in its log.

        Raises:
            ConfigError: there is no such trial, or the master cannot be asked.
        """
        from determined.common.api import bindings

        with self._explained("--trial", trial_id):
            trial = self._client.get_trial(trial_id)
            found = bindings.get_GetTrial(trial._session, trialId=trial_id).trial
            experiment = trial.get_experiment()
            summaries = [SUMMARIES.get(name, name) for name in trial.summary_metrics or {}]
            records = _records(trial, dict.fromkeys([*GROUPS, *summaries]))
            run = RecordedRun(
                path=Path(f"trial-{trial_id}"),
                config={**dict(experiment.config or {}), "name": experiment.name},
                ds_config={},
                launches=tuple(_launches(_launch(found, experiment), found, _starts(trial, found), records)),
                records=tuple(records),
                checkpoints=tuple(_checkpoints(trial)),
                result=_result(found),
                is_running=_state(found) not in ENDED,
            )
            return run, _warnings(trial)

    def _explained(self, key: str, value: object) -> _Explained:
        return _Explained(key, value, self._address)


class _Explained:
    """Within, what the client raises becomes an error with a fix."""

    def __init__(self, key: str, value: object, master: str | None) -> None:
        self._key, self._value, self._master = key, value, master

    def __enter__(self) -> None:
        """Nothing is prepared."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from determined.common.api import errors

        if isinstance(error, errors.NotFoundException):
            what = self._key.removeprefix("--")
            fix = (
                f"list those that there are: det {what} list"
                if what == "experiment"
                else "see det experiment list"
            )
            raise _problem(self._key, self._value, f"the master knows no such {what}", fix) from None
        if isinstance(error, errors.UnauthenticatedException):
            raise _problem("--master", self._master, f"the master refuses the user: {error}", LOGIN) from None
        if isinstance(error, PermissionError):
            raise _problem("--master", self._master, str(error), LOGIN) from None
        if isinstance(
            error, (errors.APIException, errors.BadRequestException, errors.BadResponseException, OSError)
        ):
            message = (
                f"the master cannot be asked: {next(iter(str(error).splitlines()), type(error).__name__)}"
            )
            raise _problem("--master", self._master, message, "export DET_MASTER=http://HOST:8080") from None


def _state(found: Any) -> str:
    return str(found.state.value).removeprefix("STATE_").removeprefix("STOPPING_")


def _launch(found: Any, experiment: Any) -> Launch:
    """What the master knows of how it was launched."""
    config = experiment.config or {}
    hyperparameters = masked({"hyperparameters": dict(found.hparams or {})})["hyperparameters"]
    batch = hyperparameters.get("global_batch_size")
    return Launch(
        time=_seconds(found.startTime) or 0.0,
        name=experiment.name or "",
        runs=_words(config.get("entrypoint")),
        slots=int((config.get("resources") or {}).get("slots_per_trial") or 0),
        machines=0,
        accelerator="",
        global_batch_size=batch if isinstance(batch, int) else 0,
        hyperparameters=hyperparameters,
    )


def _starts(trial: Any, found: Any) -> list[float]:
    """When each of its allocations has started, in order."""
    from determined.common.api import bindings

    tasks = [bindings.get_GetTask(trial._session, taskId=each).task for each in found.taskIds or ()]
    # As of 0.38.1 these times are of UTC, and do not say so.
    times = [
        f"{each.startTime.removesuffix('Z')}Z"
        for task in tasks
        for each in task.allocations
        if each.startTime
    ]
    return sorted(at for time in times if (at := _seconds(time)) is not None)


def _launches(
    launch: Launch, found: Any, starts: Sequence[float], records: Sequence[Record]
) -> Iterator[Launch]:
    """One for each allocation. Which of them are restarts a master says only where all of them are, or none."""
    again = len(starts) - 1
    kind = RESTART if found.restarts == again else RESTART_OR_RESUME if found.restarts else RESUME
    for number, start in enumerate(starts or [launch.time]):
        done = [record["steps_completed"] for record in records if record["time"] < start] if number else []
        yield replace(
            launch, time=start, kind=kind if number else START, steps_completed=max(done, default=0)
        )


def _words(entrypoint: Any) -> str:
    return " ".join(map(str, entrypoint)) if isinstance(entrypoint, list) else str(entrypoint or "")


def _records(trial: Any, groups: Iterable[str]) -> list[Record]:
    """The reports that count: those that a later allocation trained again are left out by the master."""
    found = [
        {
            "group": group,
            "steps_completed": report.steps_completed,
            "metrics": {name: _number(value) for name, value in (report.metrics or {}).items()},
            "time": report.end_time.timestamp(),
        }
        for group in groups
        for report in trial.iter_metrics(group)
    ]
    return sorted(found, key=lambda record: (record["steps_completed"], record["group"]))


def _number(value: Any) -> Any:
    """What JSON lacks is a word, here as in ``metrics.jsonl``."""
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


def _checkpoints(trial: Any) -> Iterator[Checkpoint]:
    """Those that are there, the newest first."""
    from determined.common.experimental.checkpoint import CheckpointState

    kept = [each for each in trial.list_checkpoints() if each.state == CheckpointState.COMPLETED]
    steps = {each.uuid: int(as_number((each.metadata or {}).get("steps_completed")) or 0) for each in kept}
    for uuid in sorted(steps, key=steps.__getitem__, reverse=True):
        yield Checkpoint(uuid=uuid, steps_completed=steps[uuid], path=Path(uuid))


def _result(found: Any) -> RunResult | None:
    state = _state(found)
    if state not in ENDED:
        return None
    reasons = {
        "CANCELED": "it was canceled",
        "PAUSED": f"it is paused; to resume it: det experiment activate {found.experimentId}",
        "ERROR": f"it ended with an error; to see its log: det trial logs {found.id}",
    }
    steps = int(found.totalBatchesProcessed or 0)
    return RunResult(status=ENDED[state], reason=reasons.get(state), steps_completed=steps)


def _warnings(trial: Any) -> tuple[KeptWarning, ...]:
    """Lines of the log at level WARNING or above; of those of a rank of ours, the level is its own."""
    from determined.common.api import bindings, logs

    lines = logs.trial_logs(trial._session, trial.id, tail=MOST_LINES, min_level=bindings.v1LogLevel.WARNING)
    return counted(_warning(line) for line in lines)


def _warning(line: Any) -> KeptWarning:
    level = str(line.level.value).removeprefix("LOG_LEVEL_")
    at = _seconds(line.timestamp) or 0.0
    message = (line.log or line.message).strip().removeprefix(f"{level}: ")
    ranks = () if line.rankId is None else (line.rankId,)
    return KeptWarning(message=message, source="task log", level=level, ranks=ranks, time=at, last_time=at)


def _seconds(timestamp: str | None) -> float | None:
    if not timestamp:
        return None
    from determined.common import util

    at: datetime = util.parse_protobuf_timestamp(timestamp)
    return at.timestamp()


def _refuse_to_ask(*_: object) -> str:
    raise PermissionError("not logged in")


def _problem(key: str, value: object, message: str, fix: str) -> ConfigError:
    given: Mapping[str, Any] = {} if value is None else {"value": value}
    return ConfigError(Problem(key=key, message=message, fix=fix, code="master", **given))


def recorded_trials(
    trials: Sequence[int], experiments: Sequence[int], master: str | None
) -> list[tuple[int, RecordedRun, tuple[KeptWarning, ...]]]:
    """Trials by their ids, and all those of experiments, each once.

    Raises:
        ConfigError: as of :class:`Cluster`.
    """
    cluster = Cluster(master)
    wanted = dict.fromkeys([*trials, *(trial for each in experiments for trial in cluster.trials_of(each))])
    return [(trial, *cluster.trial(trial)) for trial in wanted]
