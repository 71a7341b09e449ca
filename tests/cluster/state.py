"""What a master remembers: experiments, their trials, and what the trials reported. Data only."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

Json = Any

VERSION = "0.38.1"
USERNAME = "determined"  # the only user, without a password

# States by the names of the API, less their ``STATE_``. A trial and an experiment share them.
TERMINAL = frozenset({"COMPLETED", "CANCELED", "ERROR"})
STOPPING = {
    "STOPPING_COMPLETED": "COMPLETED",
    "STOPPING_CANCELED": "CANCELED",
    "STOPPING_KILLED": "CANCELED",
    "STOPPING_ERROR": "ERROR",
}


def now() -> str:
    """The time as the API writes it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


@dataclass(kw_only=True)
class Call:
    """A call that the master was sent, by a user or by a task."""

    method: str
    path: str  # without the query
    query: dict[str, str]
    repeated: dict[str, list[str]]  # all values of each of the query's parameters
    body: Json = None  # what was posted, from JSON
    user: str | None = None
    allocation: str | None = None  # whose task called
    rank: int | None = None  # ``RANK`` of the process that called, where it has one
    status: int | None = None  # None where no answer was given


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
class Allocation:
    """One run of a trial's container."""

    id: str  # ``<task id>.<run id>``
    token: str  # by which its processes are known
    slots: int
    addresses: tuple[str, ...] = ("127.0.0.1",)  # of its machines, which have as many slots each
    port: int = 0  # at which its ranks meet
    ready: bool = False  # its rendezvous is done; until then it can only be killed
    preempted: bool = False  # it has been asked to stop
    acked: bool = False  # it has said that it will
    killed: bool = False  # by the master
    exit_code: int | None = None  # None while it runs
    start_time: str = field(default_factory=now)
    end_time: str | None = None


@dataclass(kw_only=True)
class Trial:
    """A trial. ``allocations`` are its runs, of which the last one may be running.

    ``gate``: from its report of that batch on it waits, in the call after it, until the event is set.
    """

    id: int
    experiment_id: int
    hparams: dict[str, Json]
    seed: int
    task_id: str
    state: str = "ACTIVE"
    restarts: int = 0
    run_id: int = 0
    warm_start: str | None = None
    runner_state: str = "UNSPECIFIED"
    invalid_hp: bool = False
    stopped_by_searcher: bool = False
    closed: bool = False
    dont_retry: bool = False  # by a log policy
    progress: float = 0.0
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    allocations: list[Allocation] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    profiled: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # group -> the Profiler tab's
    gate: tuple[int, threading.Event] | None = None
    logs: list[tuple[str, str]] = field(default_factory=list)  # time, line

    @property
    def running(self) -> Allocation | None:
        """Its run that has not ended, if any."""
        last = self.allocations[-1] if self.allocations else None
        return last if last is not None and last.exit_code is None else None

    def of_group(self, group: str) -> list[Report]:
        """The reports of a group that count, in the order of training."""
        found = [report for report in self.reports if report.group == group and not report.archived]
        return sorted(found, key=lambda report: report.steps)


@dataclass(kw_only=True)
class Experiment:
    """An experiment, its config with the cluster's defaults filled in."""

    id: int
    config: dict[str, Json]
    original_config: str
    context_tgz: bytes
    state: str
    username: str
    job_id: str
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    failures: int = 0
    name: str = ""

    @property
    def searcher(self) -> dict[str, Json]:
        """The config's section."""
        section: dict[str, Json] = self.config["searcher"]
        return section

    @property
    def slots_per_trial(self) -> int:
        """``resources.slots_per_trial``."""
        return int(self.config["resources"]["slots_per_trial"])


@dataclass(kw_only=True)
class Checkpoint:
    """A checkpoint that was reported."""

    uuid: str
    trial_id: int
    run_id: int
    steps: int
    body: dict[str, Json]
    state: str = "COMPLETED"
    at: str = field(default_factory=now)

    @property
    def size_bytes(self) -> int:
        """Of all its files."""
        return sum(int(size) for size in self.body["resources"].values())
