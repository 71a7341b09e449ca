"""A rank as a process: it listens to its launcher, and reports why it ends. Loads no torch."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from determined_ds.errors import EXIT_TRAINING_FAILED, ConfigError, DeterminedDSError
from determined_ds.rundir.handed_on import LAUNCHED_BY, PARENT, copy_to_terminal, report_failure
from determined_ds.rundir.limits import exhausted, leave_reporting_to_main_thread
from determined_ds.rundir.records import ERROR, EXHAUSTED
from determined_ds.rundir.run_dir import RunDir
from determined_ds.rundir.signals import (
    die_with_parent,
    end_with,
    let_workers_end,
    outlive_readers,
    stop_on_signal,
)
from determined_ds.train.ending import (
    came_of_other_ranks,
    cause_of,
    exit_code_of,
    on_cluster,
    reason_of,
    said_by_chief,
    say_in_task_log,
)
from determined_ds.train.group.watch import leave_watch, say_missing_ranks, watch_from_start
from determined_ds.train.tracebacks import AuthorsFiles, trimmed_traceback
from determined_ds.train.warning_keeper import KEEPER


class RankProcess:
    """This process, as a rank.

    Args:
        run_dir: Where an off-cluster run writes; None on a cluster.
        listens: Whether anything looks for a request to stop.

    Attributes:
        debug: Whether a traceback is shown as it is.
        files: The author's, whose frames tracebacks begin with.
    """

    def __init__(self, run_dir: Path | None, listens: Callable[[], bool] = lambda: True) -> None:
        self.debug = False
        self.files = AuthorsFiles(os.getcwd())
        self._rank = int(os.environ.get("RANK", "0"))
        self._run_dir = None if run_dir is None else RunDir(run_dir)
        if self._run_dir is None:
            return
        if PARENT in os.environ:
            end_with(int(os.environ[PARENT]))
            watch_from_start()
        else:
            die_with_parent()
        stop_on_signal(listens)
        outlive_readers()
        leave_reporting_to_main_thread(self._run_dir.path)
        KEEPER.begin(self._run_dir.logs, self._rank)

    def run(self, work: Callable[[], None], *, exit_of: Callable[[SystemExit], str | None]) -> int:
        """Do the work of this rank, and report why it ends where it fails.

        Args:
            work: It.
            exit_of: The message about an ``exit`` in it that is a failure; None for any other.

        Returns:
            The exit code.
        """
        try:
            try:
                work()
            finally:
                let_workers_end()
                KEEPER.end()
        except KeyboardInterrupt:
            return 130
        except GeneratorExit:
            raise
        except SystemExit as error:
            message = exit_of(error)
            if message is None:
                raise
            self.report_exit(message, EXIT_TRAINING_FAILED)
            return EXIT_TRAINING_FAILED
        except BaseException as error:  # Determined's InvalidExperimentException is not an Exception
            return self._failed(error)
        leave_watch()
        return 0

    def report_exit(self, message: str, exit_code: int) -> None:
        """Report that the author's code has ended this process."""
        self._report(message, exit_code, ERROR, message)

    def _failed(self, error: BaseException) -> int:
        """Report why this rank ends. Returns its exit code."""
        run_dir = self._run_dir
        used_up = None if run_dir is None else exhausted(error, run_dir.path)
        if used_up:  # first: it may look like an error of the trial
            self._report(used_up, EXIT_TRAINING_FAILED, EXHAUSTED, used_up)
            return EXIT_TRAINING_FAILED
        if isinstance(error, DeterminedDSError):
            message = str(error) if isinstance(error, ConfigError) else f"error: {error}"
        elif self.debug:
            message = "".join(traceback.format_exception(error))
        else:  # from the author's first line on
            keep = None if run_dir is None else run_dir.traceback(self._rank)
            message = trimmed_traceback(error, self.files, keep)
        code = exit_code_of(error)
        self._report(message, code, cause_of(error), reason_of(error), error)
        return code

    def _report(
        self, message: str, exit_code: int, cause: str, reason: str, error: BaseException | None = None
    ) -> None:
        """Report why this rank ends: to our launcher, in the task's log on a cluster, or else on stderr."""
        sys.unraisablehook = lambda _: None  # errors of destructors say nothing new
        if error is not None and came_of_other_ranks(error):
            say_missing_ranks()
        if report_failure(message, exit_code, cause=cause, reason=reason):
            return
        if on_cluster():
            say_in_task_log(message, exit_code, error)
        else:
            print(message, file=sys.stderr, flush=True)
            if LAUNCHED_BY in os.environ and not said_by_chief(message):
                copy_to_terminal(message)


def end_process(code: int) -> NoReturn:
    """End this process without waiting for threads of the process group, which may wait for a peer that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
