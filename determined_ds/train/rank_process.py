"""A rank as a process: it listens to its launcher, and reports why it ends, from the author's code on. No torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from determined_ds.errors import (
    EXIT_TRAINING_FAILED,
    ChiefFailed,
    ConfigError,
    DeterminedDSError,
    lines_of_error,
)
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
from determined_ds.train.warning_keeper import KEEPER

PACKAGE = str(Path(__file__).resolve().parents[1])
FIX = "raise an exception to say what is wrong, or call context.set_stop_requested(True) to end training in good order"


def rank_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The options that a launcher hands to each rank, be it of a trial or of a script."""
    parser = argparse.ArgumentParser(prog=f"python3 -m {module}", description=description)
    add = parser.add_argument
    add("--run-dir", type=Path, help="where an off-cluster run writes (det-ds run sets it)")
    add("--accelerator", choices=("cpu", "cuda"), help="default: CUDA if available")
    add("--test", action="store_true", help="one batch, one validation, one checkpoint")
    add("--resume", metavar="UUID", help="checkpoint to resume from")
    add("--resume-from", metavar="DIR", type=Path, help="its folder, where it is another run's")
    add("--reset-optimizer", action="store_true", help="without its optimizer's state")
    add("--fork", metavar="DIR", type=Path, help="checkpoint of another run, to start from")
    steps: dict[str, Any] = {"metavar": "STEPS", "type": int}
    add("--measure", **steps, help="measure this many steps, instead of training to the end")
    add("--warmup", **steps, default=5, help="steps before those measured")
    add("--profile", action="store_true", help="record the measured steps by torch's profiler")
    add("--parts", **steps, default=0, help="record so many further steps by torch's profiler")
    return parser


class RankProcess:
    """This process, as a rank.

    Args:
        run_dir: Where an off-cluster run writes; None on a cluster.
        listens: Whether anything looks for a request to stop.

    Attributes:
        debug: Whether a traceback is shown as it is.
    """

    def __init__(self, run_dir: Path | None, listens: Callable[[], bool] = lambda: True) -> None:
        self.debug = False
        self._files = AuthorsFiles(os.getcwd())
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

    def exit_of_author(self, error: SystemExit) -> str | None:
        """The message about an ``exit(7)`` in the author's code; None where it was called elsewhere."""
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
        return self._files.exited(f"exit({error.code!r})", frames)

    @contextlib.contextmanager
    def os_exit_reported(self) -> Iterator[None]:
        """In here ``os._exit`` in the author's code is a failure, whatever its code."""
        real, process = os._exit, os.getpid()

        def os_exit(status: int) -> NoReturn:
            said = self._files.exited(f"os._exit({status!r})", traceback.walk_stack(sys._getframe(1)))
            if said is None or os.getpid() != process:  # also in a process that was forked from this one
                real(status)
            self.report_exit(said, EXIT_TRAINING_FAILED)
            sys.stdout.flush()
            sys.stderr.flush()
            real(EXIT_TRAINING_FAILED)

        os._exit = os_exit
        try:
            yield
        finally:
            os._exit = real

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
            message = trimmed_traceback(error, self._files, keep)
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


# ------------------------------------------------------------------------------------------- tracebacks and exits


class AuthorsFiles:
    """The author's files: those in the context directory, except packages that are installed there."""

    def __init__(self, context_dir: str | os.PathLike[str]) -> None:
        self._context_dir = Path(context_dir).resolve()

    def __contains__(self, file: str) -> bool:
        if file.startswith("<"):  # code without a file
            return False
        path = (self._context_dir / file).resolve()
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        return path.is_relative_to(self._context_dir) and not path.is_relative_to(PACKAGE) and not installed

    def exited(self, call: str, frames: Iterable[tuple[types.FrameType, int]]) -> str | None:
        """The message about an exit in the author's code; None where it was called elsewhere. Innermost frame first."""
        for frame, line in frames:
            code = frame.f_code
            if code.co_filename in self:
                path = (self._context_dir / code.co_filename).resolve().relative_to(self._context_dir)
                at = f"{path}:{line}, in {code.co_name}"
                return f"the trial called {call} at {at}: training had not ended\n  fix: {FIX}"
        return None


def trimmed_traceback(error: BaseException, files: AuthorsFiles, keep: Path | None) -> str:
    """An error's traceback from the author's first frame on, and so are those that it is chained to.

    All of it where no frame is the author's. Else all of it is written to the file ``keep``, unless that is None.
    """
    whole = traceback.TracebackException.from_exception(error)
    text, left, any_of_author = "".join(whole.format()), [whole], False
    while left:
        each = left.pop()
        left += filter(None, (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ())))
        own = [index for index, frame in enumerate(each.stack) if frame.filename in files]
        any_of_author = any_of_author or bool(own)
        del each.stack[: own[0] if own else len(each.stack)]
    if not any_of_author:
        return text
    trimmed = "".join(whole.format())
    if keep is not None and trimmed != text:
        with contextlib.suppress(OSError):
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.write_text(text)
            return f"{trimmed}\nfull traceback: {keep}\n"
    return trimmed


def show_own_errors() -> None:
    """From now on an error of this library that ends the script is printed without a traceback."""
    outer = sys.excepthook
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return  # the interpreter stays

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if not isinstance(error, DeterminedDSError):
            outer(kind, error, traceback)
            return
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0 or not isinstance(error, (ConfigError, ChiefFailed)):  # rank 0 has the same
            lines = [f"rank {rank}: {line}" if rank else line for line in lines_of_error(error)]
            # Not to sys.stderr, which torch collects, to put the rank before each line.
            print(*lines, sep="\n", file=sys.__stderr__, flush=True)
        sys.stdout.flush()
        os._exit(error.exit_code)

    sys.excepthook = hook
