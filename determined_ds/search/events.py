"""A search on disk: a file to which every event is appended before it is acted on, and the state that follows from it.

A line of JSON for each event. The search's method decides by the events alone, so replaying them restores a search
that was interrupted. A partial last line, of a search that was killed, is removed: nothing had followed from it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from determined_ds.documents.document import get_path
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.space import SearchSpace
from determined_ds.search.methods import Action, Create, Reason, make_search

EVENTS = "events.jsonl"
FORMAT = 3  # 1 and 2 were written by Optuna
BEGINS = b'{"event": "search", '
# What becomes of a trial.
WAITING, RUNNING = "waiting", "running"
COMPLETED, STOPPED, FAILED, DROPPED = "completed", "stopped", "failed", "dropped"


@dataclass(kw_only=True)
class Trial:
    """A trial of a search.

    Args:
        number: From 1, in the order of creation.
        create: Its hyperparameters and its seed.
        point: Its searched hyperparameters, by dotted name.
        status: ``waiting``, ``running``, ``completed``, ``stopped``, ``failed`` or ``dropped``.
        why: It failed or was dropped; "" elsewhere.
        restarts: How often it was started again after a crash.
        values: Batches trained -> the searcher's metric, of the validations that the method has received.
        time: ``searcher.time_metric`` at the last of them; 0 before, and for a searcher without one.
        stop_asked: Whether the method has stopped it.
        started: None before its first process.
        ended: None before its end.
    """

    number: int
    create: Create
    point: Mapping[str, Any]
    status: str = WAITING
    why: str = ""
    restarts: int = 0
    values: dict[int, float] = field(default_factory=dict)
    time: float = 0.0
    stop_asked: bool = False
    started: datetime | None = None
    ended: datetime | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has not come to its end."""
        return self.status in (WAITING, RUNNING)

    @property
    def last(self) -> int:
        """Batches trained at its last validation; -1 before the first."""
        return max(self.values, default=-1)

    def best(self, smaller_is_better: bool) -> tuple[int, float] | None:
        """(batches trained, metric) of its best validation, the first of equals; None without a finite one."""
        sign = 1 if smaller_is_better else -1
        finite = [(sign * value, steps) for steps, value in self.values.items() if math.isfinite(value)]
        if not finite:
            return None
        value, steps = min(finite)
        return steps, sign * value


class SearchEvents:
    """The events of a search, and its trials as they have left them; the caller holds the lock of the folder.

    Args:
        path: Of the file; it is begun where there is none.
        searcher: The ``searcher`` section, defaults filled in.
        space: What is searched.
        digest: Of all that decides the search.

    Raises:
        ConfigError: the file is damaged, is not that of a search, or is of another search.
    """

    def __init__(self, path: Path, searcher: Mapping[str, Any], space: SearchSpace, digest: str) -> None:
        self._path, self._space = path, space
        self._metric, self._time_metric = str(searcher["metric"]), str(searcher.get("time_metric") or "")
        self._method = make_search(searcher, space)
        self.trials: list[Trial] = []  # by number
        self.dropped_in_a_row = 0  # impossible points since a trial has last shown that it can be trained
        self._num_written = 0  # trials whose creation is in the file
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content.rfind(b"\n") + 1
            if not content.startswith(BEGINS) and not BEGINS.startswith(content):
                raise self.problem("is not the record of a search, or its first line is missing")
            self._act(self._method.start())
            lines = content[:whole].splitlines()
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                    if number == 1:
                        self._check_begin(record, digest)
                    else:
                        self._take(record)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                    message = f"is damaged: line {number} of {len(lines)} is not what was written"
                    raise self.problem(message) from None
            if whole < len(content):
                os.truncate(path, whole)
            if not lines:
                self._write({"event": "search", "format": FORMAT, "search": digest})
        except OSError as error:
            fix = "give a --run-dir that can be written to"
            raise self.problem(f"cannot be opened: {error.strerror}", fix) from None
        self._write_created()

    def problem(
        self, message: str, fix: str = "start again in another --run-dir, or restore the file"
    ) -> ConfigError:
        """The error of a file that cannot be used."""
        return ConfigError(Problem(key="", origin=str(self._path), message=message, fix=fix, code="events"))

    def _check_begin(self, record: dict[str, Any], digest: str) -> None:
        if record["format"] != FORMAT:
            message = f"is of format {record['format']}, and this version reads {FORMAT}"
            fix = "resume with the version that began it, or use another --run-dir"
            raise self.problem(message, fix)
        if record["search"] != digest:
            raise self.problem(f"is of another search than {self._path.parent} holds")

    def _write(self, record: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _tell(self, event: str, trial: Trial, **more: Any) -> None:
        record = {"event": event, "trial": trial.number, "time": datetime.now().isoformat(), **more}
        self._write(record)
        self._take(record)
        self._write_created()

    def _write_created(self) -> None:
        """Write down the trials that the method has created; whoever replays them creates them likewise."""
        for trial in self.trials[self._num_written :]:
            created = {"seed": trial.create.seed, "point": dict(trial.point)}
            now = datetime.now().isoformat()
            self._write({"event": "created", "trial": trial.number, "time": now, **created})
            self._num_written = trial.number

    def _take(self, record: dict[str, Any]) -> None:
        """What follows from an event, whether it is new or read.

        Raises:
            ValueError: it is not one of this search.
        """
        kind, number, time = record["event"], record["trial"], datetime.fromisoformat(record["time"])
        if not 1 <= number <= len(self.trials):
            raise ValueError("no such trial")
        trial = self.trials[number - 1]
        if kind == "created":
            if number != self._num_written + 1:
                raise ValueError("a trial is missing")
            if (record["seed"], record["point"]) != (trial.create.seed, dict(trial.point)):
                raise self.problem(f"holds another trial {number} than this search creates")
            self._num_written = number
            return
        if not trial.is_open:
            raise ValueError("the trial has ended")
        if kind == "started":
            trial.status, trial.started = RUNNING, time
        elif kind == "restarted":
            trial.restarts = int(record["restarts"])
        elif kind == "validated":
            if trial.stop_asked:
                raise ValueError("the trial was stopped")
            metrics = {name: float(value) for name, value in record["metrics"].items()}
            trial.values[int(record["steps"])] = metrics[self._metric]
            trial.time = metrics.get(self._time_metric, 0.0)
            self.dropped_in_a_row = 0
            self._act(self._method.validated(number, metrics))
        elif kind == "ended":
            trial.status, trial.why, trial.ended = record["status"], record["why"], time
            reason: Reason | None = record["reason"]
            self.dropped_in_a_row = self.dropped_in_a_row + 1 if reason == "INVALID_HP" else 0
            self._act(self._method.exited(number, reason))
        else:
            raise ValueError(kind)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Create):
                point = {axis.name: get_path(action.hparams, axis.path) for axis in self._space.axes}
                self.trials.append(Trial(number=len(self.trials) + 1, create=action, point=point))
                self._act(self._method.created(len(self.trials), action))
            else:
                self.trials[action.trial_id - 1].stop_asked = True

    # -------------------------------------------------------------------- written first, then acted on

    def started(self, trial: Trial) -> None:
        """A trial has got its first process."""
        self._tell("started", trial)

    def restarted(self, trial: Trial, why: str) -> None:
        """A trial has crashed, and is started again."""
        self._tell("restarted", trial, restarts=trial.restarts + 1, why=why)

    def validated(self, trial: Trial, steps: int, metrics: Mapping[str, float]) -> None:
        """A trial has reported a validation after ``steps`` batches."""
        self._tell("validated", trial, metrics=dict(metrics), steps=steps)

    def ended(self, trial: Trial, status: str, why: str = "", reason: Reason | None = None) -> None:
        """A trial has come to its end; ``reason`` where that was not its own."""
        self._tell("ended", trial, reason=reason, status=status, why=why)
