"""The machine as the probes see it: where they look, and how they ask its programs. Tests give them another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from determined_ds.rundir.limits import SHARED_MEMORY

ASK_S = 20.0  # an nvidia-smi whose driver hangs never answers


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where to look.

    Args:
        environment: Variables, ``PATH`` among them.
        python: The interpreter that ranks run in.
        shared_memory: The tmpfs that processes share memory by.
        cuda: Where the CUDA toolkit is installed by default.
        working_dir: Of the ranks: the context directory.
        run_dir: Of the run; it need not exist.
        clock: The machine's, in seconds.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    shared_memory: Path = SHARED_MEMORY
    cuda: Path = Path("/usr/local/cuda")
    working_dir: Path = Path()
    run_dir: Path = Path("runs")
    clock: Callable[[], float] = time.time

    def which(self, program: str) -> str | None:
        """The file of a program on ``PATH``."""
        return shutil.which(program, path=self.environment.get("PATH", os.defpath))

    def variable(self, name: str) -> str:
        """The value of an environment variable; "" where it is not set."""
        return self.environment.get(name, "")

    def ask(self, words: Sequence[str], *, stdin: str = "", timeout_s: float = ASK_S) -> Answer:
        """Run a program to its end, in the ranks' environment and folder."""
        program = self.which(words[0])
        if program is None:
            return Answer(code=None, said=f"there is no {words[0]} on PATH")
        try:
            done = subprocess.run(
                [program, *words[1:]],
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                env=dict(self.environment),
                cwd=self.working_dir,
            )
        except subprocess.TimeoutExpired:
            return Answer(code=None, said=f"it did not answer within {timeout_s:.0f} s")
        except OSError as error:
            return Answer(code=None, said=str(error.strerror))
        return Answer(code=done.returncode, said=done.stdout, complained=done.stderr)

    def with_variables(self, variables: Mapping[str, str | None]) -> Host:
        """The same with an experiment's environment variables; None for one that ranks must not have."""
        merged = {**self.environment, **variables}
        return replace(self, environment={name: value for name, value in merged.items() if value is not None})

    @property
    def in_task(self) -> bool:
        """Whether this is the container of a task on a Determined cluster."""
        return bool(self.variable("DET_MASTER") and self.variable("DET_TASK_ID"))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program said.

    Args:
        code: Its exit code; None where it could not be run to its end.
        said: On stdout, or why it could not be run.
        complained: On stderr.
    """

    code: int | None
    said: str
    complained: str = ""

    @property
    def worked(self) -> bool:
        return self.code == 0

    @property
    def last_line(self) -> str:
        """The line that says most, where it failed."""
        lines = (self.complained.strip() or self.said.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


def existing(path: Path) -> Path:
    """A path, or the nearest folder above it that exists."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there
