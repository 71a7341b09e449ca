"""Ranks: forks (``forked.py``) that call a function of a test, each call in new ones, of which nothing is left.

A test hands a function of its own module to the fixture ``one_rank`` or ``two_ranks``, as in ``two_ranks.run(f, 1)``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable
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
    """As many processes as ranks for each call, on CPUs of this machine; their output goes to ``log_dir``."""

    def __init__(self, size: int, log_dir: Path) -> None:
        self.size = size
        self._log_dir = log_dir

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function at the top level of a module in every rank at once. Returns what it returned in each.

        A rank that raises, dies or hangs raises :class:`RanksFailed`, with every rank's own words.
        """
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
        replies: dict[int, tuple[bool, Any]] = {}
        with contextlib.ExitStack() as started:  # at its end they are killed, with what they have started
            pipes: dict[Any, int] = {}
            for rank in range(self.size):
                ours, theirs = multiprocessing.Pipe()
                pipes[started.enter_context(ours)] = rank
                with self._log(rank).open("a") as log, open(os.devnull) as nothing, theirs:
                    files = [nothing.fileno(), log.fileno(), log.fileno(), theirs.fileno()]
                    env = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    started.callback(Forked("tests.harness.ranks:serve", env=env, files=files).close)
            for pipe in pipes:
                with contextlib.suppress(OSError):  # it is dead, and says so below
                    pipe.send((function, args, kwargs))
            deadline = time.monotonic() + TIMEOUT_S
            while pipes and (ready := connection.wait(pipes, max(0.0, deadline - time.monotonic()))):
                for pipe in ready:
                    rank = pipes.pop(pipe)
                    try:
                        replies[rank] = pipe.recv()  # type: ignore[union-attr]
                    except (EOFError, OSError):
                        replies[rank] = False, "its process ended"
                    if not replies[rank][0]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(replies) == self.size and all(succeeded for succeeded, _ in replies.values()):
            return [replies[rank][1] for rank in range(self.size)]
        lines = [f"{function.__module__}.{function.__qualname__} in {self.size} ranks:"]
        for rank in range(self.size):
            succeeded, said = replies.get(rank, (False, "has not ended"))
            lines.append(f"--- rank {rank}: {'returned' if succeeded else said}")
            if not succeeded and (output := self.said(rank)):
                lines.append(f"its output ends:\n{output[-2000:].rstrip()}")
        raise RanksFailed("\n".join(lines))

    def said(self, rank: int) -> str:
        """What a rank has said so far, on stdout and stderr, in all calls."""
        return self._log(rank).read_text(errors="replace") if self._log(rank).exists() else ""

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"rank{rank}-of-{self.size}.log"


RanksOf = Callable[[int], Ranks]  # the fixture ``ranks_of``


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
    import deepspeed
    import deepspeed.comm as dist

    # Do without the all-reduce in shared memory that DeepSpeed would compile when it is used: in a minute or more.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    pipe: connection.Connection = connection.Connection(3)
    try:
        function, args, kwargs = pipe.recv()  # this is where the test's module is imported
        returned = function(*args, **kwargs)
        if dist.is_initialized():  # rank 0 holds the store, which the others may still need
            dist.barrier()
        sys.stdout.flush()
        pipe.send((True, returned))
    except BaseException:
        sys.stdout.flush()
        pipe.send((False, traceback.format_exc()))
