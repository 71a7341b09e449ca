"""A run in processes of its own: started, followed, stopped, and never left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_ds.documents.document import Document
from determined_ds.documents.writing import write_whole
from determined_ds.experiment.secrets import secrets_of, stored_yaml
from determined_ds.protocol.run_dir import GIVEN, METRICS, OUTPUT
from determined_ds.protocol.run_lock import make_private

MAX_REASON = 300
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|cannot allocate memory|Unable to allocate|can't allocate memory|bad_alloc"
    r"|MemoryError|exitcode: -9|SIGKILL|_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


class TrialProcess:
    """One ``det-ds run``. It ends with this process, however this one ends.

    Args:
        experiment: What it is to run.
        context_dir: The folder with the code.
        run_dir: Its run directory.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.
        arguments: More arguments of ``det-ds run``, e.g. ``--resume``.
        environment: More environment variables.
    """

    def __init__(
        self,
        *,
        experiment: Document,
        context_dir: Path,
        run_dir: Path,
        accelerator: str | None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._experiment = experiment
        self._context_dir = context_dir
        self.run_dir = run_dir
        self._arguments = [*(["--accelerator", accelerator] if accelerator else []), *arguments]
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._read_to = 0
        self._read_from: int | None = None  # inode: a run that goes on replaces the file
        self._output_from = 0  # what stands before was written by an earlier start

    def start(self) -> None:
        """Write what is asked for into the run directory, and start."""
        make_private(self.run_dir)
        given = self.run_dir / GIVEN
        write_whole(given, stored_yaml(self._experiment.data))
        command = [sys.executable, "-m", "determined_ds.cli", "run", str(given), str(self._context_dir)]
        command += ["--run-dir", str(self.run_dir), "--parent", str(os.getpid()), *self._arguments]
        metrics = self.run_dir / METRICS
        self._read_to = 0
        if "--resume" in self._arguments and metrics.is_file():
            self._read_to, self._read_from = metrics.stat().st_size, metrics.stat().st_ino
        with (self.run_dir / OUTPUT).open("ab") as output:
            self._output_from = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **secrets_of(self._experiment.data), **self._environment},
                start_new_session=True,  # Ctrl-C at a terminal is for the process that has started it
            )

    def poll(self) -> int | None:
        """The exit code when it has ended; 128 + the number of the signal that ended it."""
        assert self._process is not None, "not started"
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def new_metrics(self) -> list[dict[str, Any]]:
        """The records that it has written to ``metrics.jsonl`` since the last call."""
        records = []
        path = self.run_dir / METRICS
        with contextlib.suppress(FileNotFoundError):
            there = path.stat()
            # Of another file, or a shorter one: it went on from a checkpoint, and has forgotten what came after that.
            if self._read_from not in (None, there.st_ino) or there.st_size < self._read_to:
                self._read_to = 0
            self._read_from = there.st_ino
            if there.st_size == self._read_to:
                return []
            with path.open("rb") as file:
                file.seek(self._read_to)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._read_to += len(line)
                    with contextlib.suppress(ValueError):
                        records.append(json.loads(line))
        return records

    def stop(self) -> None:
        """Have it finish its batch, write a checkpoint and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all of its processes at once, and wait for it: its ranks end with it."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def output(self) -> str:
        """What it has written to its terminal since it was started."""
        with contextlib.suppress(OSError), (self.run_dir / OUTPUT).open("rb") as file:
            file.seek(self._output_from)
            return file.read().decode(errors="replace")
        return ""

    def ran_out_of_memory(self) -> bool:
        """Whether its end was for want of memory, by its own words or by the kernel's signal."""
        return bool(OUT_OF_MEMORY.search(self.output()))

    def reason(self) -> str:
        """Why it failed, in a sentence or two of its own."""
        return reason_of(self.output()) or f"it ended with exit code {self.poll()} and said nothing"


def reason_of(output: str) -> str:
    """The sentence that says why a run failed: its first error, its own message, or the last line of a traceback."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if line.startswith("error: "):
            return _shortened(line.removeprefix("error: "))
    for line, after in itertools.pairwise(lines):
        if re.fullmatch(r"rank \d+ failed first:", line) and not after.startswith(
            ("Traceback", "it ended", "the last lines")
        ):
            return _shortened(after)
    raised = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b", line)]
    if raised:
        return _shortened(raised[-1])
    ended = [line for line in lines if line.startswith("it ended without a word")]
    return _shortened((ended or lines[-1:] or [""])[-1])


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."
