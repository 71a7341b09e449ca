"""``det-ds run`` as a fork: a second where a start of it and its ranks, each loading torch and DeepSpeed, is four.

For tests that start many runs of which some begin as a user's do (``command.py``). A process that has loaded what
ranks load forks ``det-ds``, which forks its ranks; from there on it is what it always is, but that the launcher
starts functions and not programs. The process has one thread and does nothing else, so that a fork is as good as new.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from unittest import mock

import psutil

from tests.ranks import Ranks

LOADED = (
    "torch._dynamo",
    "torch.utils.tensorboard",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "determined_ds.cli.run",
    "determined_ds.runtime.loop.fit",
)
# The last of a run's processes are killed with it; on a busy machine they take a moment to end.
END_S = 10.0


class Forked:
    """Starts ``det-ds`` by forking.

    Args:
        folder: An empty folder, for what it says.
    """

    def __init__(self, folder: Path) -> None:
        self._rank = Ranks(1, folder)
        self._files = [folder / "stdout", folder / "stderr"]

    def det_ds(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As ``tests.command.det_ds``: run it on CPUs to its end, and leave no process behind.

        What loading said, in the process that forks, is in its ``stderr`` too.
        """
        words = [*map(str, arguments), "--accelerator", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        [code] = self._rank.run(fork_det_ds, words, environment, [str(file) for file in self._files])
        stdout, stderr = (file.read_text(errors="replace") for file in self._files)
        return subprocess.CompletedProcess(words, code, stdout, self._rank.said(0) + stderr)

    def stop(self) -> None:
        """End the process that forks."""
        self._rank.stop()


# ------------------------------------------------------------------------------------------- in the rank


def fork_det_ds(words: list[str], environment: dict[str, str], files: list[str]) -> int:
    """Fork ``det-ds`` and wait for its end; none of its processes may be left. Returns the exit code."""
    _load()
    assert len(os.listdir("/proc/self/task")) == 1, "with threads, a fork may hang"
    pid = os.fork()
    if pid == 0:
        _be_det_ds(words, environment, files)
    _, status = os.waitpid(pid, 0)
    deadline = time.monotonic() + END_S
    while left := [process for process in psutil.process_iter() if _lives_in(process, pid)]:
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(status)


def _lives_in(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def _load() -> None:
    """Whatever a rank loads, it finds loaded."""
    for name in LOADED:
        importlib.import_module(name)


def _be_det_ds(words: list[str], environment: dict[str, str], files: list[str]) -> NoReturn:
    """In the fork: what the command's own process does."""
    code = 70
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        for descriptor, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        import numpy

        from determined_ds.cli.main import main
        from determined_ds.launch.ranks import process as rank
        from determined_ds.protocol.signals import die_with_parent

        die_with_parent()
        numpy.random.seed()  # torch's generator is as in any new process, and Python seeds its own after a fork
        mock.patch.object(rank, "start_process", ForkedRank).start()
        main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkedRank:
    """In place of ``rank.start_process``: the same, but that the process is forked. Like a ``Popen``.

    Args:
        command: Of ``determined_ds.train``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path,
        log: Path | None,
        keep_open: Sequence[int],
    ) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(list(command), environment, cwd, log)
        with contextlib.suppress(OSError):  # it may have ended
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.02)
        assert self._code is not None
        return self._code


def _be_rank(command: list[str], environment: Mapping[str, str], cwd: Path, log: Path | None) -> NoReturn:
    """In a fork of the fork: what ``python3 -m determined_ds.train`` does."""
    code = 70
    try:
        os.setpgid(0, 0)  # and not a session, by which it is found if it is left behind
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        from determined_ds.train import main

        code = main(command[command.index("determined_ds.train") + 1 :])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
