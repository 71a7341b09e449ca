"""How the processes of a run learn that it ends, outlive those who read them, and show that they get on.

Loads nothing, so that a rank listens from its first moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from determined_ds.rundir.handed_on import LAUNCHED_BY

# Set by SIGTERM; rank 0 reads it between two batches.
STOP = threading.Event()
# Set by the first batch that this process has trained: after a crash a restart may get further.
TRAINED = threading.Event()
# What often ends a process so.
USUAL: dict[int, str] = {
    signal.SIGKILL: "; the system kills processes when memory runs out",
    signal.SIGBUS: "; a file in memory cannot grow where /dev/shm or a disk is full",
}


NO_HOST_MEMORY = (
    "; the kernel killed it for want of host memory: use fewer data workers, smaller data or more memory"
)


def oom_kills() -> int:
    """Processes that the kernel has killed in the memory cgroup of this one; 0 where that is not known."""
    try:
        with open("/proc/self/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, path in groups:
            roots = {"": "/sys/fs/cgroup", "memory": "/sys/fs/cgroup/memory"}
            for folder in (roots[controllers] + path, roots[controllers]) if controllers in roots else ():
                for name in ("memory.events", "memory.oom_control"):
                    with contextlib.suppress(OSError), open(f"{folder}/{name}") as file:
                        counts = dict(line.split() for line in file)
                        if "oom_kill" in counts:
                            return int(counts["oom_kill"])
    except (OSError, ValueError):
        pass
    return 0


def stop_on_signal(listens: Callable[[], bool] = lambda: True) -> None:
    """From now on SIGTERM requests a stop at the next batch, or ends this process where nothing listens for one.

    SIGINT is for our launcher, which passes it on. Another launcher sends the ranks what it received: SIGINT, or what
    SLURM's ``--signal`` names, often SIGUSR1.
    """

    def stop(number: int, _frame: Any) -> None:
        STOP.set()
        if not listens():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    if LAUNCHED_BY in os.environ:
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGUSR1, stop)
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with_parent() -> None:
    """End this process when its parent is killed, so that none is left running (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_with(parent: int) -> None:
    """End this process with the one of this id that started it, also where that has ended already."""
    die_with_parent()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def survived_by_parent() -> None:
    """Go on as a child of this process, which says by which signal the child was killed, and ends as it ended.

    For ranks of launchers that are not ours, which say at most an exit code, after a traceback of their own. To be
    called before anything is loaded or started: a thread is not forked.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    killed_before = oom_kills()
    child = os.fork()
    if child == 0:
        die_with_parent()
        return
    passed_on: set[int] = set()

    def pass_on(number: int, _frame: Any) -> None:
        passed_on.add(number)
        os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        level = "ERROR: " if os.environ.get("DET_TASK_TYPE") == "TRIAL" else ""  # as the task's log takes it
        said = f"{level}rank {os.environ.get('RANK', '0')} was killed by {signal.Signals(-code).name}"
        if -code not in passed_on:  # else the launcher knows
            why = (
                NO_HOST_MEMORY
                if -code == signal.SIGKILL and oom_kills() > killed_before
                else USUAL.get(-code, "")
            )
            print(f"{said}{why}", file=sys.stderr, flush=True)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class _Outliving(io.FileIO):
    """A descriptor that leads to ``/dev/null`` once its reader is gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return len(memoryview(data))


def outlive_readers() -> None:
    """From now on, output to stdout and stderr is dropped once their reader is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError, ValueError):  # replaced by a test
            raw = _Outliving(stream.fileno(), "w", closefd=False)
            stream.flush()
            by_line = getattr(stream, "line_buffering", True) or getattr(stream, "write_through", False)
            buffered = io.BufferedWriter(raw)
            text = io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=bool(by_line))
            setattr(sys, name, text)


class Heartbeat:
    """The signs of progress of this process."""

    def __init__(self) -> None:
        self.steps = 0  # batches trained; 0 before this process has trained one
        self.beats = (
            0  # signs of progress, of which only changes matter; 0 before this rank has joined the others
        )
        self.patient = 0  # above 0 where it may take any time
        self.rests = False  # training is over

    def begin(self) -> None:
        """The ranks have joined: from now on, one that shows no progress hangs."""
        self.beats += 1

    def step(self, batches_trained: int) -> None:
        """A batch was trained; so many have been since the start of training, this one included."""
        self.steps = batches_trained
        self.beats += 1

    def beat(self) -> None:
        """There is progress between two steps: a micro-batch, a batch of a validation, a part of a checkpoint."""
        if self.beats:
            self.beats += 1

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """The user's code runs in here, or a master is asked: it may take any time."""
        self.patient += 1
        try:
            yield
        finally:
            self.patient -= 1
            self.beat()

    def rest(self) -> None:
        """Training is over: whatever follows may take any time."""
        self.patient += 1
        self.rests = True


HEART = Heartbeat()


class Interrupts:
    """Counts the signals while it is entered; what the first one begins is printed as it arrives."""

    def __init__(self, message: str) -> None:
        self._message, self._before = message, dict[int, Any]()
        self.signals: list[int] = []

    @property
    def requested(self) -> bool:
        """Whether to end in order."""
        return bool(self.signals)

    @property
    def at_once(self) -> bool:
        """Whether to end without waiting."""
        return len(self.signals) > 1

    @property
    def exit_code(self) -> int:
        """0 after the first; 128 + its number after the second."""
        return 128 + self.signals[-1] if self.at_once else 0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # signals are that thread's
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # nohup: a terminal that closes ends nothing.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        if not self.at_once:
            name = signal.Signals(number).name
            print(f"\n{name}: {self._message}; again ends at once", file=sys.stderr)
