"""A run in processes of its own: started, followed, stopped, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_ds.documents.document import Document
from determined_ds.documents.files import write_whole
from determined_ds.experiment.secrets import secrets_of, stored_yaml
from determined_ds.rundir.metrics_file import MetricsReader
from determined_ds.rundir.records import CRASH, FAILED, KILLED, RunResult, read_result, status_of
from determined_ds.rundir.run_dir import RunDir, make_private


class TrialProcess:
    """One ``det-ds run``. It ends with this process, however this one ends.

    Args:
        experiment: What to run.
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
        self.run_dir = run_dir
        self._experiment, self._context_dir = experiment, context_dir
        self._there = RunDir(run_dir)
        self._arguments = [*(["--accelerator", accelerator] if accelerator else []), *arguments]
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._metrics = MetricsReader(self._there.metrics)
        if "--resume" in self._arguments:
            self._metrics.new_records()  # those of an earlier launch

    def start(self) -> None:
        """Start it. What was given to it is kept in the run directory, and so is what it prints."""
        make_private(self.run_dir)
        write_whole(self._there.given, stored_yaml(self._experiment.data))
        self._there.result.unlink(missing_ok=True)  # of an earlier launch
        command = [sys.executable, "-m", "determined_ds.cli", "run", str(self._there.given)]
        command += [str(self._context_dir), "--run-dir", str(self.run_dir), "--parent", str(os.getpid())]
        with self._there.output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
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
        return self._metrics.new_records()

    def stop(self) -> None:
        """Have it finish its batch, write a checkpoint and end."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End all of its processes at once, and wait for it: its ranks end with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def result(self) -> RunResult:
        """How it ended: its ``result.json``; where it was killed before it could write that, the exit code."""
        code = self.poll()
        assert code is not None, "still running"
        written = read_result(self._there)
        if written is not None:
            return written
        cause = KILLED if code == 128 + signal.SIGKILL else CRASH
        reason = f"it ended with exit code {code}; its output is in {self._there.output}"
        return RunResult(status=status_of(code) if code else FAILED, cause=cause, reason=reason)
