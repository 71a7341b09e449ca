"""What a master remembers: experiments, their trials, and what the trials reported. Data only."""

from __future__ import annotations

import time
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
    """A call that the master was sent.

    Args:
        at_s: When it came, by the monotonic clock.
        method: ``GET`` ...
        path: Without the query.
        query: The query's parameters.
        repeated: All values of each.
        body: What was posted, from JSON; None where nothing was.
        user: The user, or None where a task called.
        allocation: The allocation whose task called, or None.
        rank: ``RANK`` of the process that called; None where it is not known or has none.
        status: What was answered; None where no answer was given.
        fault: The fault that it met, if any.
    """

    at_s: float
    method: str
    path: str
    query: dict[str, str]
    body: Json
    repeated: dict[str, list[str]] = field(default_factory=dict)
    user: str | None = None
    allocation: str | None = None
    rank: int | None = None
    status: int | None = None
    fault: str | None = None


@dataclass(kw_only=True)
class Report:
    """Metrics that were accepted.

    Args:
        group: ``training`` or ``validation``, or a name of the user's.
        steps: ``steps_completed``.
        metrics: Name -> value.
        run_id: The run of the trial that reported them.
        archived: They were overtaken by the reports of a later run, which began before them.
    """

    group: str
    steps: int
    metrics: dict[str, Any]
    run_id: int
    archived: bool = False
    at: str = field(default_factory=now)


@dataclass(kw_only=True)
class Allocation:
    """One run of a trial's container.

    Args:
        id: ``<task id>.<run id>``.
        token: By which its processes are known.
        slots: How many it has.
        addresses: Of its machines, which have as many slots each.
        port: At which its ranks meet.
        ready: Its rendezvous is done; until then it can only be killed.
        preempted: It has been asked to stop.
        acked: It has said that it will.
        killed: It was killed by the master.
        exit_code: Of its main process; None while it runs.
        start_time: By the clock of the day.
        started_s: By the monotonic clock.
        ended_s: The same.
    """

    id: str
    token: str
    slots: int
    addresses: tuple[str, ...] = ("127.0.0.1",)
    port: int = 0
    ready: bool = False
    preempted: bool = False
    acked: bool = False
    killed: bool = False
    exit_code: int | None = None
    start_time: str = field(default_factory=now)
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None

    @property
    def wall_clock_s(self) -> float:
        """How long it has run."""
        return (self.ended_s or time.monotonic()) - self.started_s


@dataclass(kw_only=True)
class Trial:
    """A trial. ``allocations`` are its runs, of which the last one may be running."""

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
    log_policy: str = ""  # the name of the last one that its log has met
    progress: float = 0.0
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    allocations: list[Allocation] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    profiled: dict[str, list[dict[str, Any]]] = field(
        default_factory=dict
    )  # group -> what the Profiler tab shows
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
    context_files: dict[str, int]  # path -> bytes
    state: str
    username: str
    job_id: str
    parent_id: int | None = None
    archived: bool = False
    start_time: str = field(default_factory=now)
    end_time: str | None = None
    failures: int = 0
    labels: list[str] = field(default_factory=list)
    description: str = ""
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

    @property
    def size_bytes(self) -> int:
        """Of all its files."""
        return sum(int(size) for size in self.body["resources"].values())
