"""What a scenario asks of a cluster, be it ours (``fake.py``) or a real master's (``client.RealCluster``)."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Json = dict[str, Any]
Metrics = list[tuple[int, dict[str, Any]]]  # steps completed, name -> value


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial as the master described it last."""

    id: int
    state: str  # by the names of the API, less their ``STATE_``
    restarts: int  # after failures; being paused does not count
    hparams: Json
    batches: int  # so many it has reported
    best: dict[str, Any]  # the metrics of its best validation, if any
    tasks: tuple[str, ...]  # of which ``det experiment continue`` begins another


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that the master lists as complete, the batch it was written at, and the names of its files."""

    uuid: str
    batch: int
    files: tuple[str, ...]


class Cluster(Protocol):
    """A cluster with two CPU slots or more, asked by the real ``det`` and by the API of its master."""

    def det(self, *arguments: str | Path | int, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``det`` in the repository's root, to its end; with ``check`` it has to succeed."""

    def create(
        self,
        config: str | Path,
        *overrides: str,
        context: Path = ...,
        include: Path | None = None,
        paused: bool = False,
    ) -> int:
        """``det experiment create CONFIG CONTEXT --config OVERRIDE ...``; ``include`` joins the context.

        Returns:
            The experiment's id.
        """

    def activate(self, experiment_id: int) -> None:
        """``det experiment activate``."""

    def reached(self, batch: int, *experiment_ids: int) -> AbstractContextManager[None]:
        """Activate experiments that are paused, each of one trial, and wait until these have reported a batch.

        Within the block they are still training: ours holds them, a real one needs a training that is long enough.
        """

    def stop(self, experiment_id: int, *, at: int, how: str = "pause") -> int:
        """``det experiment pause`` or ``cancel`` after that batch, until no container is left.

        Returns:
            The batch of the last checkpoint.
        """

    def continue_(self, experiment_id: int, *overrides: str) -> None:
        """``det experiment continue ID --config OVERRIDE ...``, until the master has taken it up."""

    def wait(self, experiment_id: int, state: str = "COMPLETED") -> list[Trial]:
        """Wait until an experiment ends, in this state and no other. Returns its trials."""

    def experiment(self, experiment_id: int) -> Json:
        """As the master describes it."""

    def trials(self, experiment_id: int) -> list[Trial]:
        """Its trials, in the order of creation."""

    def trial(self, experiment_id: int) -> Trial:
        """Its only trial."""

    def num_starts(self, trial: Trial) -> int:
        """How often the containers of a trial were started."""

    def reports(self, trial: Trial, group: str) -> Metrics:
        """The reports of a group that count, in the order of training."""

    def metrics(self, trial: Trial) -> dict[str, Metrics]:
        """Group (``training``, ``validation``) -> reports, but what differs from run to run."""

    def checkpoints(self, trial: Trial) -> list[Checkpoint]:
        """Those that are there, in the order of training."""

    def log(self, trial: Trial) -> str:
        """A trial's whole log."""

    def errors(self, trial: Trial) -> list[str]:
        """The lines of a trial's log that the web UI shows under its filter "Error"."""

    def slots(self) -> list[str]:
        """The agent of each slot that may be used."""
