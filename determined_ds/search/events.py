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
from typing import TYPE_CHECKING, Any

from determined_ds.documents.document import get_path
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.space import SearchSpace
from determined_ds.search.methods import Action, Create, make_search

if TYPE_CHECKING:
    from determined_ds.launch.trial_process import TrialProcess

EVENTS = "events.jsonl"
FORMAT = 5
# What becomes of a trial.
WAITING, RUNNING = "waiting", "running"
COMPLETED, STOPPED, FAILED, DROPPED = "completed", "stopped", "failed", "dropped"
ANOTHER = "start again in another --run-dir, or restore the file"


@dataclass(kw_only=True, eq=False)
class Trial:
    """A trial of a search: what its events say of it, and its process."""

    create: Create  # its number, from 1, its hyperparameters and its seed
    point: Mapping[str, Any]  # its searched hyperparameters, by dotted name
    status: str = WAITING
    why: str = ""  # it failed or was dropped
    values: dict[int, float] = field(default_factory=dict)  # batches -> the metric, as the method received it
    time: float = 0.0  # searcher.time_metric at the last of them; 0 before, and for a searcher without one
    stop_asked: bool = False  # whether the method has stopped it
    # Of the search under way.
    is_judged: bool = False  # whether its point is known to be possible
    process: TrialProcess | None = None  # while it has one
    is_ending: bool = False  # whether that has been asked to stop; twice would mean at once
    gpus: tuple[str, ...] = ()  # that it has
    steps: int | None = None  # batches trained, as far as it has reported; None before its first report

    @property
    def number(self) -> int:
        return self.create.number

    @property
    def is_open(self) -> bool:
        """Whether it has not come to its end."""
        return self.status in (WAITING, RUNNING)

    @property
    def last(self) -> int:
        """Batches trained at its last validation; -1 before the first."""
        return max(self.values, default=-1)

    def best(self, smaller_is_better: bool) -> tuple[float, int, int] | None:
        """(metric, its number, batches) of its best validation, the first of equals; None without a finite one.

        The metric is negated where the larger is the better, so that the least is the best of all trials.
        """
        sign = 1 if smaller_is_better else -1
        finite = [
            (sign * value, self.number, steps) for steps, value in self.values.items() if math.isfinite(value)
        ]
        return min(finite, default=None)


class SearchEvents:
    """The events of a search, and its trials as they have left them; the caller holds the lock of the folder.

    Raises:
        ConfigError: the file is damaged, is not that of a search, or is of another search.
    """

    def __init__(self, path: Path, searcher: Mapping[str, Any], space: SearchSpace) -> None:
        self._path, self._space = path, space
        self._metric, self._time_metric = str(searcher["metric"]), str(searcher.get("time_metric") or "")
        self._method = make_search(searcher, space)
        self.trials: list[Trial] = []  # by number
        self.dropped_in_a_row = 0  # impossible points since a trial has last shown that it can be trained
        self._num_written = 0  # trials whose creation is in the file
        begin = {"event": "search", "format": FORMAT, "searcher": as_plain(searcher)}
        self._act(self._method.start())
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content.rfind(b"\n") + 1
            lines = content[:whole].splitlines()
            for number, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                    if number > 1:
                        self._take(record)
                    elif record != begin:
                        raise ValueError("the record of something else")
                except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                    message = f"is damaged: line {number} of {len(lines)} is not one of this search"
                    raise self._problem(message, ANOTHER) from None
            if whole < len(content):
                os.truncate(path, whole)
            if not lines:
                self._write(begin)
        except OSError as error:
            fix = "give a --run-dir that can be written to"
            raise self._problem(f"cannot be opened: {error.strerror}", fix) from None
        self._write_created()

    def tell(self, event: str, trial: Trial, **more: Any) -> None:
        """Write an event down, then act on it: ``started``, ``validated`` or ``ended``."""
        record = {"event": event, "trial": trial.number, "time": datetime.now().isoformat(), **more}
        self._write(record)
        self._take(record)
        self._write_created()

    def _problem(self, message: str, fix: str) -> ConfigError:
        return ConfigError(Problem(key="", origin=str(self._path), message=message, fix=fix, code="events"))

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _write_created(self) -> None:
        """Write down the trials that the method has created; whoever replays them creates them likewise."""
        for trial in self.trials[self._num_written :]:
            created = {"seed": trial.create.seed, "point": dict(trial.point)}
            self._write(
                {"event": "created", "trial": trial.number, "time": datetime.now().isoformat(), **created}
            )
            self._num_written = trial.number

    def _take(self, record: dict[str, Any]) -> None:
        """What follows from an event, whether it is new or read. A ValueError: it is not one of this search."""
        kind, number = record["event"], record["trial"]
        trial = self.trials[number - 1]
        if number < 1 or not trial.is_open or (kind == "validated" and trial.stop_asked):
            raise ValueError("no such trial, or one that has ended")
        if kind == "created":
            if (record["seed"], record["point"]) != (trial.create.seed, dict(trial.point)):
                raise self._problem(f"holds another trial {number} than this search creates", ANOTHER)
            self._num_written = number
        elif kind == "started":
            trial.status = RUNNING
        elif kind == "validated":
            metrics = {name: float(value) for name, value in record["metrics"].items()}
            trial.values[int(record["steps"])] = metrics[self._metric]
            trial.time = metrics.get(self._time_metric, 0.0)
            self.dropped_in_a_row = 0
            self._act(self._method.validated(number, metrics))
        elif kind == "ended":
            trial.status, trial.why = record["status"], record["why"]
            self.dropped_in_a_row = self.dropped_in_a_row + 1 if trial.status == DROPPED else 0
            self._act(self._method.exited(number, record["reason"]))
        else:
            raise ValueError(kind)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Create):
                point = {axis.name: get_path(action.hparams, axis.path) for axis in self._space.axes}
                self.trials.append(Trial(create=action, point=point))
            else:
                self.trials[action.number - 1].stop_asked = True
