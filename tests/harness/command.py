"""``det-ds`` run by tests: as a fork, or as the program that its users start."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.harness.forked import MARK, Forked, marked

ROOT = Path(__file__).resolve().parents[2]
DET_DS = Path(sys.executable).with_name("det-ds")
# No test takes as long: a guard against hangs, not a measure.
TIMEOUT_S = 600.0
# The last of a run's processes are killed with it; on a busy machine they take a moment to end.
END_S = 10.0


def det_ds(
    *arguments: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``det-ds`` on CPUs to its end, as a fork with more environment variables."""
    words = [*map(str, arguments), "--accelerator", "cpu"]
    return run_forked("tests.harness.forked:det_ds", words, env=_environment(env), cwd=cwd)


class Started(Forked):
    """A ``det-ds`` under way on CPUs, as a fork; its output, ``merged`` or not, is read as a ``Popen``'s."""

    def __init__(self, *arguments: str | Path, merged: bool = False) -> None:
        outputs = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (os.fdopen(read, errors="replace") for read, _ in outputs)
        writes = [write for _, write in outputs]
        words = [*map(str, arguments), "--accelerator", "cpu"]
        environment = _environment(None)
        self._mark = environment[MARK]
        with open(os.devnull) as nothing:
            files = [nothing.fileno(), writes[0], writes[0 if merged else 1]]
            super().__init__("tests.harness.forked:det_ds", words, env=environment, files=files)
        for write in writes:
            os.close(write)

    def processes(self) -> dict[int, str]:
        """It, and all that it has started."""
        return marked(self._mark)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of its stdout and stderr, once it has ended."""
        with ThreadPoolExecutor(2) as threads:
            said = [threads.submit(file.read) for file in (self.stdout, self.stderr)]
            self.wait(timeout)
            return said[0].result(), said[1].result()


def run_forked(
    function: str, words: list[str], *, env: Mapping[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a program of ``forked.py``, ``module:name``, to its end. No process that it has started may be left."""
    with (
        open(os.devnull) as nothing,
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        files = [file.fileno() for file in (nothing, out, err)]
        mark = secrets.token_hex(16)
        process = Forked(function, words, env={**env, MARK: mark}, cwd=cwd, files=files)
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.close()
        nothing_left(mark)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def nothing_left(mark: str) -> None:
    """Fail if a process with this mark does not end within some seconds."""
    deadline = time.monotonic() + END_S
    while left := marked(mark):
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.02)


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", MARK: secrets.token_hex(16), **(more or {})}


def det_ds_program(
    *arguments: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    accelerator: str = "cpu",
) -> subprocess.CompletedProcess[str]:
    """Run ``det-ds`` to its end as its users start it, with ranks that are programs: seconds, each of them."""
    words = [str(argument) for argument in arguments]
    environment = _environment(env)
    done = subprocess.run(
        [str(DET_DS), *words, "--accelerator", accelerator],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    nothing_left(environment[MARK])
    return done
