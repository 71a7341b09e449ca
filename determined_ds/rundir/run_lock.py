"""A run directory has one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

from determined_ds.errors import ConfigError
from determined_ds.rundir.run_dir import RunDir, check_writable, make_private, run_dir_problem, unwritable

LEFT_S = 10.0  # the processes of a run that was killed end with it; the system may take a moment


class RunLock:
    """Held while a process, or one that inherits its descriptor, writes to a run directory.

    The system releases it when the last of them ends, for whatever reason.

    Args:
        run_dir: The run directory; made, for its user only, if missing.

    Raises:
        ConfigError: another process writes to it (its id is named), or it cannot be written to.
    """

    def __init__(self, run_dir: Path) -> None:
        self._descriptor = -1
        try:
            make_private(run_dir)
            self._descriptor = os.open(RunDir(run_dir).lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _lock(self._descriptor, run_dir)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise ConfigError(unwritable(run_dir, error)) from None
            raise

    def fileno(self) -> int:
        """The descriptor, for processes that are to hold it too."""
        return self._descriptor

    def release(self) -> None:
        """Let another process have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def check_run_dir(run_dir: Path) -> None:
    """Check that a run directory can be written to, and that no other process does.

    Raises:
        ConfigError: it cannot, or one does, whose id is named.
    """
    check_writable(run_dir)
    with contextlib.suppress(OSError):  # there is none, or it may not be opened: found when it is made
        descriptor = os.open(RunDir(run_dir).lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(descriptor, run_dir)
        finally:
            os.close(descriptor)


def is_held(run_dir: Path) -> bool:
    """Whether a process writes to a run directory."""
    with contextlib.suppress(OSError), RunDir(run_dir).lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock(descriptor: int, run_dir: Path) -> None:
    """Take the lock; wait a moment where the process that wrote its id into the file has ended."""
    until = time.monotonic() + LEFT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError:
            return  # a file system without locks
        pid, _, host = os.pread(descriptor, 512, 0).decode(errors="replace").strip().partition(" ")
        is_here = host == socket.gethostname()
        if (pid and not (is_here and not Path("/proc", pid).exists())) or time.monotonic() >= until:
            message = f"process {pid}{'' if is_here else f' on {host}'} is writing to it"
            fix = "wait until that has ended, or give another --run-dir"
            raise ConfigError(run_dir_problem(run_dir, message, fix, "run-dir-held"))
        time.sleep(0.1)
