"""A trial's process within a search, and what its files and the system know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from determined_ds.errors import ConfigError
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.search.course import CourseTrial

TRIALS = "trials"


def run_dir_of(folder: Path, number: int) -> Path:
    """The run directory of a trial of the search in ``folder``."""
    return folder / TRIALS / f"{number:04d}"


@dataclass(kw_only=True)
class RunningTrial:
    """A trial with a process.

    Args:
        trial: Of the course.
        process: Its own.
        length: Batches in all, where that is known.
        from_checkpoint: Whether it resumed from one.
        gpus: That it has.
        steps: Batches trained, as far as it has reported; None before its first report.
        is_asked: Whether it has been asked to stop; ``det-ds run`` takes a second time for an order to end at once.
    """

    trial: CourseTrial
    process: TrialProcess
    length: int | None
    from_checkpoint: bool
    gpus: tuple[str, ...] = ()
    steps: int | None = None
    is_asked: bool = False

    def ask_to_stop(self) -> None:
        """Have it finish its batch, write a checkpoint and end."""
        if not self.is_asked:
            self.is_asked = True
            self.process.stop()


def processes_below(folder: Path) -> list[int]:
    """Ids of the processes of this library that were started with a folder below this one."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            ours = any(word.startswith("determined_ds") for word in words)
            if ours and any(f"{folder}/" in word for word in words):
                found.append(process.pid)  # a zombie has no words
        except psutil.Error:
            continue
    return found


def set_aside(folder: Path) -> None:
    """Rename a folder, so that it is not found where it was, and not lost."""
    number = 1
    while (there := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    folder.rename(there)


def in_a_line(error: ConfigError) -> str:
    """Why a point is impossible, all reasons in a line."""
    return "; ".join(str(problem).splitlines()[0] for problem in error.problems)
