"""Ranks: forks (``forked.py``) that call a function of a test, each call in new ones.

A test hands a function of its own module to the fixture ``one_rank`` or ``two_ranks`` (see ``conftest.py``)::

    def sum_of_ranks(more: int) -> int:  # runs in every rank, under torchrun's environment variables
        ...

    def test_sum(two_ranks: Ranks) -> None:
        assert two_ranks.run(sum_of_ranks, 1) == [3, 3]  # what each rank returned

A rank that raises, dies or hangs fails the test that called it, with every rank's own words. Nothing is left of a call:
neither memory, which DeepSpeed's engines keep for as long as their process lives, nor a process group.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.harness.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
# No test takes as long: a guard against hangs, not a measure.
TIMEOUT_S = 600.0
# How long the other ranks may take to say something, once one has failed.
GRACE_S = 3.0
# Linux gives out those from 32768, others those from 49152.
PORTS = range(13_000, 32_000)


class RanksFailed(AssertionError):
    """A function failed in a rank; the message is what every rank has to say."""


class Ranks:
    """As many processes as ranks for each call, on this machine, on CPUs.

    Args:
        size: Ranks.
        log_dir: Where their output goes; its end is quoted where they fail.
        first: What they do before every call.
    """

    def __init__(self, size: int, log_dir: Path, *, first: Callable[[], Any] | None = None) -> None:
        self.size = size
        self._log_dir = log_dir
        self._first = first

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function`` in every rank at once.

        Args:
            function: A function at the top level of a module; it goes there by its name.
            args: Its arguments; they must pickle, and so must what it returns.

        Returns:
            What it returned in each rank, in the order of ranks.

        Raises:
            RanksFailed: it raised, ended its process, or did not end in time.
        """
        with self._started() as pipes:
            for pipe in pipes:
                with contextlib.suppress(OSError):  # it is dead, and says so below
                    pipe.send((self._first, function, args, kwargs))
            replies = _replies(pipes)
        if len(replies) == self.size and all(succeeded for succeeded, _ in replies.values()):
            return [replies[rank][1] for rank in range(self.size)]
        raise RanksFailed(self._account(function, replies))

    @contextlib.contextmanager
    def _started(self) -> Iterator[list[connection.Connection]]:
        """A pipe to each of them; at the end they are killed, with what they have started."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        with contextlib.ExitStack() as started:
            pipes = []
            for rank in range(self.size):
                ours, theirs = multiprocessing.Pipe()
                pipes.append(started.enter_context(ours))
                with self._log(rank).open("a") as log, open(os.devnull) as nothing, theirs:
                    files = [nothing.fileno(), log.fileno(), log.fileno(), theirs.fileno()]
                    env = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    started.callback(_end, Forked("tests.harness.ranks:serve", env=env, files=files))
            yield pipes

    def said(self, rank: int) -> str:
        """What a rank has said so far, on stdout and stderr, in all calls."""
        log = self._log(rank)
        return log.read_text(errors="replace") if log.exists() else ""

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"rank{rank}-of-{self.size}.log"

    def _account(self, function: Callable[..., Any], replies: dict[int, tuple[bool, Any]]) -> str:
        lines = [f"{function.__module__}.{function.__qualname__} in {self.size} ranks:"]
        for rank in range(self.size):
            succeeded, said = replies.get(rank, (False, "has not ended"))
            lines.append(f"--- rank {rank}: {'returned' if succeeded else said}")
            if not succeeded and (output := self.said(rank)):
                lines.append(f"its output ends:\n{output[-2000:].rstrip()}")
        return "\n".join(lines)


def _end(rank: Forked) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.close()


def _replies(pipes: list[connection.Connection]) -> dict[int, tuple[bool, Any]]:
    """Of each rank that replies in time: whether it succeeded, and what it returned or says."""
    replies: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(replies) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in replies}
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            replies[waiting[pipe]] = _receive(pipe)
        if not all(succeeded for succeeded, _ in replies.values()):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    return replies


def _receive(pipe: connection.Connection) -> tuple[bool, Any]:
    try:
        succeeded, value = pipe.recv()
    except (EOFError, OSError):
        return False, "its process ended"
    return succeeded, value


def free_port() -> int:
    """A TCP port that nobody has, and that nobody is given before it is used.

    It lies below those that a system gives to whoever connects: while ranks start, other tests do so all the time.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# ------------------------------------------------------------------------------------------- in a rank


def serve() -> None:
    """Make the call that comes through the pipe, which is descriptor 3."""
    pipe: connection.Connection = connection.Connection(3)
    try:
        # What was sent is unpickled here: this is where the test's module is imported.
        first, function, args, kwargs = pipe.recv()
        if first is not None:
            first()
        returned = function(*args, **kwargs)
        _wait_for_the_others()
        sys.stdout.flush()
        pipe.send((True, returned))
    except BaseException:
        sys.stdout.flush()
        pipe.send((False, traceback.format_exc()))


def compile_nothing() -> None:
    """Have DeepSpeed do without the all-reduce in shared memory that it would compile when it is used.

    That takes a minute or more on a machine which has not done it before, and would hold all ranks.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _wait_for_the_others() -> None:
    """Rank 0 holds the store of a process group: the others lose it when that ends, while they still need it."""
    if "deepspeed" not in sys.modules:
        return
    import deepspeed.comm as dist

    if dist.is_initialized():
        dist.barrier()
