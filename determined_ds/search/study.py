"""A search on disk: a log in its run directory, to which every event is written before it is acted on.

A line of JSON for each event. Replayed in their order, the events restore the search's method, and what is known of
its trials. A partial last line of a search that was killed is removed: nothing had followed from it.
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

from determined_ds.errors import ConfigError, Problem
from determined_ds.search.course import Event, Exited, Validated
from determined_ds.search.methods import Create

STUDY = "events.jsonl"
FORMAT = 3  # 1 and 2 were written by Optuna
BEGINS = b'{"event": "search", '
# What becomes of a trial.
WAITING, RUNNING = "waiting", "running"
COMPLETED, STOPPED, FAILED, DROPPED = "completed", "stopped", "failed", "dropped"


def study_problem(
    path: Path, message: str, fix: str = "start again in another --run-dir, or restore the file"
) -> ConfigError:
    """The error of a log that cannot be used."""
    return ConfigError(Problem(key="", origin=str(path), message=message, fix=fix, code="study"))


@dataclass(kw_only=True)
class StudyTrial:
    """What is known of a trial.

    Args:
        number: From 1.
        status: ``waiting``, ``running``, ``completed``, ``stopped``, ``failed`` or ``dropped``.
        why: It failed or was dropped; "" elsewhere.
        point: Its searched hyperparameters, by dotted name.
        seed: Its own.
        restarts: How often it was started again after a crash.
        values: Batches trained -> the searcher's metric.
        started: None before its first process.
        ended: None before its end.
    """

    number: int
    status: str = WAITING
    why: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    restarts: int = 0
    values: dict[int, float] = field(default_factory=dict)
    started: datetime | None = None
    ended: datetime | None = None

    def best(self, smaller_is_better: bool) -> tuple[int, float] | None:
        """(batches trained, metric) of its best validation, the first of equals; None without a finite one."""
        sign = 1 if smaller_is_better else -1
        finite = [(sign * value, steps) for steps, value in self.values.items() if math.isfinite(value)]
        if not finite:
            return None
        value, steps = min(finite)
        return steps, sign * value


class SearchStudy:
    """The log of a search; the process that opens it holds the lock of its folder.

    Args:
        path: Of its file; it is begun where there is none.
        metric: ``searcher.metric``.
        search: A digest of all that decides the search.

    Raises:
        ConfigError: the file is damaged, is not the log of a search, or is of another search.
    """

    def __init__(self, path: Path, *, metric: str, search: str) -> None:
        self._path, self._metric = path, metric
        self.events: list[Event] = []  # those that the method hears of, in their order
        self.trials: list[StudyTrial] = []  # by number
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content.rfind(b"\n") + 1
            if not content.startswith(BEGINS) and not BEGINS.startswith(content):
                raise study_problem(path, "is not the log of a search, or its first line is missing")
            lines = content[:whole].splitlines()
            for number, line in enumerate(lines, start=1):
                try:
                    self._read(json.loads(line), is_first=number == 1, search=search)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                    message = f"is damaged: line {number} of {len(lines)} is not what was written"
                    raise study_problem(path, message) from None
            if whole < len(content):
                os.truncate(path, whole)
            if not lines:
                self._write({"event": "search", "format": FORMAT, "search": search})
        except OSError as error:
            fix = "give a --run-dir that can be written to"
            raise study_problem(path, f"cannot be opened: {error.strerror}", fix) from None

    def _read(self, record: dict[str, Any], *, is_first: bool, search: str) -> None:
        if not is_first:
            self._take(record)
        elif record["format"] != FORMAT:
            fix = "resume with the version that began it, or use another --run-dir"
            raise study_problem(
                self._path, f"is of format {record['format']}, and this version reads {FORMAT}", fix
            )
        elif record["search"] != search:
            raise study_problem(self._path, f"is of another search than {self._path.parent} holds")

    def _take(self, record: dict[str, Any]) -> None:
        """What follows from an event, whether it is new or read."""
        kind, number, time = record["event"], record["trial"], datetime.fromisoformat(record["time"])
        if kind == "created":
            if number != len(self.trials) + 1:
                raise ValueError("a trial is missing")
            self.trials.append(StudyTrial(number=number, point=record["point"], seed=int(record["seed"])))
            return
        trial = self.trial(number)
        if kind == "started":
            trial.status, trial.started = RUNNING, time
        elif kind == "restarted":
            trial.restarts = int(record["restarts"])
        elif kind == "validated":
            metrics = {name: float(value) for name, value in record["metrics"].items()}
            self.events.append(Validated(trial_id=number, metrics=metrics, steps=int(record["steps"])))
            trial.values[int(record["steps"])] = metrics[self._metric]
        elif kind == "ended":
            self.events.append(Exited(trial_id=number, reason=record["reason"]))
            trial.status, trial.why, trial.ended = record["status"], record["why"], time
        else:
            raise ValueError(kind)

    def _write(self, record: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _tell(self, event: str, number: int, **more: Any) -> None:
        record = {"event": event, "trial": number, "time": datetime.now().isoformat(), **more}
        self._write(record)
        self._take(record)

    def trial(self, number: int) -> StudyTrial:
        """One of them."""
        if number < 1:
            raise IndexError(number)
        return self.trials[number - 1]

    def add(self, number: int, create: Create, point: Mapping[str, Any]) -> None:
        """A trial was created; its number is the next one."""
        self._tell("created", number, seed=create.seed, point=dict(point))

    def started(self, number: int) -> None:
        """A trial has got its first process."""
        self._tell("started", number)

    def restarted(self, number: int, restarts: int, why: str) -> None:
        """A trial has crashed, and is started for the so-many-th time again."""
        self._tell("restarted", number, restarts=restarts, why=why)

    def validated(self, event: Validated) -> None:
        """Write a validation; it may be acted on when this returns."""
        self._tell("validated", event.trial_id, metrics=dict(event.metrics), steps=event.steps)

    def ended(self, event: Exited, status: str, why: str = "") -> None:
        """Write a trial's end; it may be acted on when this returns."""
        self._tell("ended", event.trial_id, reason=event.reason, status=status, why=why)
