"""The run directory: each path in it is made here, and nowhere else."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, Problem

RUNS = Path("runs")
EXPERIMENT = "experiment.yaml"
SUPERSEDED = "superseded.json"  # in ``next``: the checkpoints that will be
CHECKPOINTS = "checkpoints"
PARTIAL_FILE = ".partial"  # suffix of a file that is being written
LEFT_S = 10.0  # the processes of a run that was killed end with it; the system may take a moment
WRITABLE = "give a --run-dir that can be written to"


class RunDir:
    """The files of one run.

    A run that resumes writes to ``next`` until its checkpoint is loaded. One that ends before, because the checkpoint
    is of another model or the data cannot be read, leaves the run as it was.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"
        self.next = path / ".next"
        self.experiment = path / EXPERIMENT  # what was run, overrides included
        self.deepspeed_config = path / "deepspeed_config.json"  # what DeepSpeed was given
        self.partition = path / "partition.json"  # of a pipeline whose layers are shared out by their times
        self.metrics = path / "metrics.jsonl"
        self.loggers = path / "logging.json"  # what identifies the run in the tools that it is reported to
        self.launches = path / "launches.jsonl"  # each start of its ranks, with what was decided
        self.recoveries = path / "recoveries.jsonl"  # each fault that it recovers from by itself
        self.result = path / "result.json"  # how it ended
        self.checkpoints = path / CHECKPOINTS
        self.superseded = path / "superseded"  # a run of the checkpoints after one that was resumed from
        self.exported = path / "exported"  # what `det-ds checkpoint export` makes of its checkpoints
        self.tensorboard = path / "tensorboard"
        self.logs = path / "logs"
        self.master = path / "master.json"  # of a run that is reported to a master: the name it has there
        self.measured = path / "measured.json"  # of a run that is measured
        self.output = path / "output.log"  # of a run that another process started
        self.given = path / "given.yaml"  # what that process requested

    def log(self, rank: int) -> Path:
        """What a rank writes; rank 0, which writes to the terminal, only its stacks."""
        return self.logs / f"rank{rank}.log"

    def traceback(self, rank: int) -> Path:
        """The whole traceback of a rank that failed."""
        return self.logs / f"traceback-rank{rank}.txt"

    def is_empty(self) -> bool:
        """Whether no run has begun in it: it does not exist, or holds at most a lock."""
        return not self.path.exists() or (self.path.is_dir() and {*self.path.iterdir()} <= {self.lock})

    def trial_id(self) -> int:
        """The id of a script's trial, by which it is distinguished from that of any other run: when it began."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            return int(1000 * json.loads(self.launches.read_text().splitlines()[0])["time"]) % 2**31
        return 0

    # ------------------------------------------------------------------------------- a run that resumes

    def make_next(self) -> RunDir:
        """The run directory of the next launch, empty."""
        self.remove_next()
        self.next.mkdir(mode=0o700)
        return RunDir(self.next)

    def remove_next(self) -> None:
        """Remove what an earlier launch left in ``next``."""
        shutil.rmtree(self.next, ignore_errors=True)

    @property
    def is_replaced(self) -> bool:
        """Whether the ranks have taken over the run: ``next`` is gone."""
        return not self.next.exists()

    def current(self, path: Path) -> Path:
        """A file of the run as it will be, in ``next`` where it is there; of the run itself, the folder to write to."""
        replaced = self.next if path == self.path else self.next / path.name
        return replaced if replaced.exists() else path

    def supersede(self, uuids: Sequence[str]) -> None:
        """Have :meth:`adopt_next` move checkpoints to ``superseded``, the newest first: it may be killed meanwhile."""
        write_whole(self.next / SUPERSEDED, json.dumps(list(uuids)) + "\n")

    def adopt_next(self) -> bool:
        """Move what ``next`` has and lists to its place; returns whether there was anything to move."""
        if not self.next.is_dir():
            return False
        listed = self.next / SUPERSEDED
        for uuid in json.loads(listed.read_bytes()) if listed.is_file() else ():
            there, target = self.checkpoints / uuid, RunDir(self.superseded).checkpoints / uuid
            if there.is_dir():
                make_private(target.parent)
                shutil.rmtree(target, ignore_errors=True)
                there.rename(target)
        listed.unlink(missing_ok=True)
        for file in sorted(self.next.iterdir()):
            file.replace(self.path / file.name)
        self.result.unlink(missing_ok=True)
        self.next.rmdir()
        return True


def short(path: Path) -> str:
    """A path as people would type it from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def slug(name: str) -> str:
    """An experiment's name as that of a folder."""
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in name).strip(".") or "run"


def new_run_dir(folder: Path, now: datetime) -> Path:
    """A path named for the time that does not exist yet: two runs may start in the same second."""
    stem = now.strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(folder / name for name in names if not (folder / name).exists())


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, for this user only; one that exists is not changed."""
    if not folder.is_dir():
        if folder.parent != folder:
            make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def existing(path: Path) -> Path:
    """A path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def unwritable(run_dir: Path, error: OSError) -> Problem:
    """The problem of a run directory that the system refused to write to."""
    return run_dir_problem(run_dir, f"cannot be written to: {error.strerror or error}", WRITABLE)


def run_dir_problem(run_dir: Path, message: str, fix: str, code: str = "run-dir") -> Problem:
    """A problem of a run directory."""
    return Problem(key="--run-dir", value=short(run_dir), message=message, fix=fix, code=code)


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
            _take(self._descriptor, run_dir)
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
    there = existing(run_dir.resolve())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = f"no permission to write in {short(there)}" if there.is_dir() else f"{short(there)} is a file"
        raise ConfigError(run_dir_problem(run_dir, why, WRITABLE))
    with contextlib.suppress(OSError):  # there is none, or it may not be opened: found when it is made
        descriptor = os.open(RunDir(run_dir).lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            _take(descriptor, run_dir)
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


def _take(descriptor: int, run_dir: Path) -> None:
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
        has_ended = is_here and not Path("/proc", pid).exists()
        if (pid and not has_ended) or time.monotonic() >= until:
            message = f"process {pid}{'' if is_here else f' on {host}'} is writing to it"
            fix = "wait until that has ended, or give another --run-dir"
            raise ConfigError(run_dir_problem(run_dir, message, fix, "run-dir-held"))
        time.sleep(0.1)
