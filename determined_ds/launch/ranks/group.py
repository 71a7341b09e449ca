"""The ranks of a run: started on this machine, waited for, ended together. Loads no torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from determined_ds.checkpoints.files import VERIFIED, verified_here
from determined_ds.launch.ranks.process import Failure, Rank
from determined_ds.launch.ranks.shared_temp import SharedTemp
from determined_ds.rundir.handed_on import LAUNCHED_BY, PARENT, STORE, TERMINAL
from determined_ds.rundir.heartbeat import HEARTBEATS, make_heartbeats
from determined_ds.rundir.run_dir import RunDir

# Seconds that the other ranks have to end by themselves when one has failed.
GRACE_S = 5.0
POLL_S = 0.1
# Of another launcher that started this one: not for our ranks.
NOT_OURS = ("MASTER_ADDR", "MASTER_PORT", "DET_CHIEF_IP", LAUNCHED_BY, TERMINAL)


class Ranks:
    """The ranks of a run. They run while it is entered; on exit they and their children have ended.

    Args:
        command: What each runs.
        size: Number of ranks.
        environment: Of all of them.
        cwd: Their working directory.
        run_dir: For the logs of the ranks other than rank 0.
        keep_open: Descriptors that they inherit.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        size: int,
        environment: Mapping[str, str],
        cwd: Path,
        run_dir: RunDir,
        keep_open: Sequence[int] = (),
    ) -> None:
        self._command = command
        self._size = size
        self._environment = environment
        self._cwd = cwd
        self._run_dir = run_dir
        self._keep_open = keep_open
        self._ranks: list[Rank] = []

    def __enter__(self) -> Ranks:
        self._shared = SharedTemp()
        try:
            make_heartbeats(self.heartbeats, self._size)
            for number in range(self._size):
                self._ranks.append(self._start(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, number: int) -> Rank:
        ours = {
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "LOCAL_SIZE": str(self._size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            STORE: str(self._shared.folder / "store"),
            HEARTBEATS: str(self.heartbeats),
            PARENT: str(os.getpid()),
            VERIFIED: verified_here(),
        }
        environment = {key: value for key, value in self._environment.items() if key not in NOT_OURS}
        return Rank(
            number,
            self._command,
            environment={**environment, **ours},
            cwd=self._cwd,
            log=self._run_dir.log(number) if number else None,
            keep_open=(*self._keep_open, self._shared.descriptor),
        )

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.close()
        self._shared.remove()

    def wait(self, *look: Callable[[], None]) -> list[Failure]:
        """Wait for all of them; where one fails, end the others unless they end themselves.

        Args:
            look: Each is called several times a second.

        Returns:
            The failures, the one that came first before the others.
        """
        deadline = float("inf")
        while None in (codes := [rank.poll() for rank in self._ranks]):
            if any(codes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() >= deadline:
                self.kill()
            for each in look:
                each()
            time.sleep(POLL_S)
        failures = [failure for rank in self._ranks if (failure := rank.failure())]
        return sorted(failures, key=lambda failure: (failure.ended_by_us, failure.time))

    @property
    def heartbeats(self) -> Path:
        """The file of their signs of life."""
        return self._shared.folder / "heartbeats"

    @property
    def logs(self) -> list[Path]:
        """The log of each; rank 0 writes only its stacks there, on request."""
        return [self._run_dir.log(number) for number in range(self._size)]

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [rank.pid for rank in self._ranks]

    def send(self, number: signal.Signals) -> None:
        """Send all of them a signal."""
        for rank in self._ranks:
            rank.send(number)

    def kill(self) -> None:
        """End them at once."""
        for rank in self._ranks:
            rank.kill()
