"""Ranks that stay up for a whole test session: forks (``forked.py``) that call the functions of tests.

A test hands a function of its own module to the fixture ``one_rank`` or ``two_ranks`` (see ``conftest.py``)::

    def sum_of_ranks(more: int) -> int:  # runs in every rank, under torchrun's environment variables
        ...

    def test_sum(two_ranks: Ranks) -> None:
        assert two_ranks.run(sum_of_ranks, 1) == [3, 3]  # what each rank returned

Every call finds a process group yet to be joined, whatever the call before left behind. A rank that raises,
dies or hangs fails the test that called it, with every rank's own words, and the next call gets new ranks.
"""

from __future__ import annotations

import contextlib
import gc
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

from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[1]
# No test takes as long: a guard against hangs, not a measure.
TIMEOUT_S = 600.0
# How long the other ranks may take to say something, once one has failed.
GRACE_S = 3.0
# A rank with torch and DeepSpeed loaded has a quarter of it.
LARGE_PROCESS_BYTES = 2**33
# Of a tensor that no test has use for once its call is over.
LARGE_TENSOR_BYTES = 2**28
# Linux gives out those from 32768, others those from 49152.
PORTS = range(13_000, 32_000)


class RanksFailed(AssertionError):
    """A function failed in a rank; the message is what every rank has to say."""


class Ranks:
    """As many processes as ranks, on this machine, on CPUs.

    Args:
        size: Ranks.
        log_dir: Where their output goes; its end is quoted where they fail.
        first: What new ranks do before any call.
    """

    def __init__(self, size: int, log_dir: Path, *, first: Callable[[], Any] | None = None) -> None:
        self.size = size
        self._log_dir = log_dir
        self._first = first
        self._processes: list[Forked] = []
        self._pipes: list[connection.Connection] = []

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
        if not self._processes:
            self._start()
            if self._first is not None:
                self.run(self._first)
        port = free_port()
        replies: dict[int, tuple[bool, Any]] = {}
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it is dead, and says so below
                pipe.send((port, function, args, kwargs))
        deadline = time.monotonic() + TIMEOUT_S
        while len(replies) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in replies}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                replies[waiting[pipe]] = _receive(pipe)
            if not all(succeeded for succeeded, _ in replies.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if len(replies) == self.size and all(succeeded for succeeded, _ in replies.values()):
            return [replies[rank][1] for rank in range(self.size)]
        message = self._account(function, replies)
        self.stop()
        raise RanksFailed(message)

    def _start(self) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for rank in range(self.size):
            ours, theirs = multiprocessing.Pipe()
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
            }
            with self._log(rank).open("w") as log, open(os.devnull) as nothing:
                files = [nothing.fileno(), log.fileno(), log.fileno(), theirs.fileno()]
                process = Forked("tests.ranks:serve", env=environment, files=files)
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._pipes = [], []

    def said(self, rank: int) -> str:
        """What a rank has said so far, on stdout and stderr."""
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
    """Call what comes through the pipe, which is descriptor 3, until it is closed."""
    pipe: connection.Connection = connection.Connection(3)
    environment = dict(os.environ)
    while True:
        try:
            # What was sent is unpickled here: this is where the test's module is imported.
            port, function, args, kwargs = pipe.recv()
            os.environ.clear()
            os.environ.update(environment, MASTER_PORT=str(port))
            os.chdir(ROOT)
            returned = function(*args, **kwargs)
            _leave_process_group()
            pipe.send((True, returned))
        except EOFError:
            return
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def compile_nothing() -> None:
    """Load DeepSpeed, and have it do without the all-reduce in shared memory that it would compile when it is used.

    That takes a minute or more on a machine which has not done it before, and would hold all ranks.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _leave_process_group() -> None:
    """Leave nothing of DeepSpeed's that outlives its engines: groups, in its caches, in torch's."""
    if "deepspeed" not in sys.modules:
        return
    import deepspeed.comm as dist

    if dist.is_initialized():
        dist.barrier()  # rank 0 holds the store: it goes last, or the others lose it while they still need it
        dist.destroy_process_group()
    dist.comm.cdb = None
    gc.collect()
    _give_back_large_tensors()


def _give_back_large_tensors() -> None:
    """ZeRO 3 is kept alive by its hooks for ever, with a bucket of 2 GB that lies side by side with all before it.

    Nothing is ever written to most of them, but a process that has as much as the machine can start no others. A
    smaller one is left alone: the list of all objects takes megabytes too, which tests of memory would find free.
    """
    import psutil
    import torch

    if psutil.Process().memory_info().vms < LARGE_PROCESS_BYTES:
        return
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            if storage.nbytes() > LARGE_TENSOR_BYTES:
                storage.resize_(0)
