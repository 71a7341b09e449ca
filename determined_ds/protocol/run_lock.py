"""A run directory has one writer at a time, and belongs to its user."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from determined_ds.errors import ConfigError, Problem
from determined_ds.protocol.run_dir import short

LOCK = ".lock"
# The processes of a run that was killed end with it; the system may take a moment.
LEFT_S = 10.0


class RunLock:
    """Held while something writes to a run directory: by its process, and by all that inherit its descriptor.

    The system lets go of it when the last of them ends, however that ends.

    Args:
        run_dir: The run directory; made, for its user only, where there is none.

    Raises:
        ConfigError: another process writes to it, whose id is named; or it cannot be written to.
    """

    def __init__(self, run_dir: Path) -> None:
        self._descriptor = -1
        try:
            make_private(run_dir)
            self._descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _lock(self._descriptor, run_dir)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise ConfigError(unwritable(run_dir, error)) from None
        except BaseException:
            self.release()
            raise

    def fileno(self) -> int:
        """The descriptor, for those who are to hold it too."""
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


def check_not_held(run_dir: Path) -> None:
    """Refuse a run directory that another process writes to.

    Raises:
        ConfigError: its id is named.
    """
    with contextlib.suppress(
        OSError
    ):  # there is none, or it is not ours to look at: that is found when it is made
        descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(descriptor, run_dir)
        finally:
            os.close(descriptor)


def _lock(descriptor: int, run_dir: Path) -> None:
    until = time.monotonic() + LEFT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return  # a file system without locks: nothing tells of another writer
            pid, host = _holder(descriptor)
            if _has_ended(pid, host) and time.monotonic() < until:
                time.sleep(0.1)
                continue
            raise ConfigError(_held(run_dir, pid, host)) from None
        return


def _holder(descriptor: int) -> tuple[int, str]:
    """Process id and host of who holds it; 0 where that is not written yet."""
    words = os.pread(descriptor, 512, 0).decode(errors="replace").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]), words[1]
    return 0, socket.gethostname()


def _has_ended(pid: int, host: str) -> bool:
    """Whether only those that inherited the lock still hold it."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return pid == 0


def _held(run_dir: Path, pid: int, host: str) -> Problem:
    where = "" if host == socket.gethostname() else f" on {host}"
    return Problem(
        key="--run-dir",
        value=short(run_dir),
        message=f"process {pid}{where} is writing to it",
        fix="wait until that has ended, or give another --run-dir",
        code="run-dir-held",
    )


def unwritable(run_dir: Path, error: OSError) -> Problem:
    """A run directory that cannot be written to, as a problem."""
    return Problem(
        key="--run-dir",
        value=short(run_dir),
        message=f"cannot be written to: {error.strerror or error}",
        fix="give a --run-dir that can be written to",
        code="run-dir",
    )


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for its user only; one that is there stays as it is."""
    if not folder.is_dir():
        if folder.parent != folder:
            make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
