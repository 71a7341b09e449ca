"""A rank as a process: it listens to its launcher, and reports why it ends. Loads no torch.

The exit code of an error says whether another start may get further.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from determined_ds.cluster import log
from determined_ds.errors import (
    EXIT_CRASHED,
    EXIT_TRAINING_FAILED,
    ChiefFailed,
    ConfigError,
    DeterminedDSError,
    lines_of_error,
)
from determined_ds.rundir.handed_on import LAUNCHED_BY, PARENT, copy_to_terminal, report_failure
from determined_ds.rundir.limits import chain, exhausted
from determined_ds.rundir.records import CONFIGURATION, CRASH, ERROR, LOST_MACHINE, OUT_OF_MEMORY
from determined_ds.rundir.run_dir import RunDir
from determined_ds.rundir.signals import (
    STOP,
    TRAINED,
    die_with_parent,
    end_with,
    outlive_readers,
    stop_on_signal,
)
from determined_ds.train.group.watch import leave_watch

PACKAGE = Path(__file__).resolve().parents[1]
FIX = "raise an exception to say what is wrong, or call context.set_stop_requested(True) to end training in good order"
NOT_ENDED = f"training had not ended\n  fix: {FIX}"
# Classes, and those derived from them, of errors from outside this process: another rank, the network, the master, a
# disk or a device. The names are Python's, torch's, Determined's, and those of requests and httpx.
NOT_OURS = {
    *("ConnectionError", "TimeoutError", "Timeout", "TransportError"),
    *("AcceleratorError", "APIException", "MasterNotFoundException"),
}
ERRNOS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ENETUNREACH, errno.EHOSTUNREACH)
# Errors of gloo and NCCL that torch raises as RuntimeError.
OF_OTHER_RANKS = re.compile(r"/gloo/|\bNCCL\b|closed by peer|reset by peer|connectFullMesh|Broken pipe")
ASSERTED = "device-side assert"  # an index that is out of range looks so on a GPU
# Of torch, and of cuBLAS and its sisters, which allocate memory themselves.
MEMORY = re.compile(r"(CUDA|HIP)( driver)?( error:)? out of memory|(CU|HIP)[A-Z]+_STATUS_ALLOC_FAILED")
# Of the machine's memory: torch's, numpy's, C++'s, and a data loader whose worker the kernel has killed.
HOST_MEMORY = re.compile(
    r"(can't|cannot) allocate memory|Unable to allocate|bad_alloc|MemoryError|killed by signal: Killed",
    re.IGNORECASE,
)
# How long rank 0 may take to report what all ranks fail of: its launcher then ends the others.
APART_S = 10.0

# ------------------------------------------------------------------------------------------- why a rank ends


class Ending(NamedTuple):
    """How a rank ends after an error."""

    code: int  # EXIT_CRASHED where another start may get further
    cause: str  # of determined_ds.rundir.records
    reason: str  # one sentence; of an error that is not ours it begins with the type
    used_up: str | None = None  # the message about a disk, or a limit, that is
    out_of_memory: bool = False  # the accelerator's, as at the same batch of another start


def ending_of(error: BaseException, run_dir: Path | None = None) -> Ending:
    """How a rank ends after an error.

    Another start may get further after an unexpected error behind a trained batch, and after one from outside this
    process. A diagnosed error is the same the next time, unless another rank's end caused it; so is an error before
    the first trained batch.

    Args:
        error: What was raised.
        run_dir: Where the run writes.
    """
    errors = list(chain(error))
    said = [f"{type(each).__name__}: {each}" for each in errors]
    kinds = [{kind.__name__ for kind in type(each).__mro__} for each in errors]
    diagnosed = isinstance(error, DeterminedDSError)
    used_up = None if diagnosed else exhausted(error, run_dir or Path.cwd())
    of_others = any("DistError" in kind for kind in kinds) or any(map(OF_OTHER_RANKS.search, said))
    out_of_memory = any(map(MEMORY.search, said))
    from_outside = any(
        (isinstance(each, OSError) and each.errno in ERRNOS)
        or (kind & NOT_OURS and ASSERTED not in str(each))
        for each, kind in zip(errors, kinds, strict=True)
    )
    if isinstance(error, DeterminedDSError):
        code = EXIT_CRASHED if of_others else error.exit_code
    elif out_of_memory or used_up:
        code = EXIT_TRAINING_FAILED
    else:
        code = EXIT_CRASHED if TRAINED.is_set() or of_others or from_outside else EXIT_TRAINING_FAILED
    cause = ERROR if diagnosed or used_up else CRASH
    if isinstance(error, ConfigError):
        cause = CONFIGURATION
    elif out_of_memory or any(map(HOST_MEMORY.search, said)):
        cause = OUT_OF_MEMORY
    elif of_others:
        cause = LOST_MACHINE
    text = str(error).strip().partition("\n")[0]
    reason = text if diagnosed else f"{type(error).__name__}: {text}".removesuffix(": ")
    return Ending(code, cause, used_up or reason, used_up, out_of_memory)


def _said_by_chief(error: BaseException) -> bool:
    """Whether rank 0 reports why this rank ends: in a moment its launcher ends the others, unless this one is alone."""
    if os.environ.get("RANK", "0") == "0":
        return False
    if isinstance(error, ChiefFailed):
        return True
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    return STOP.wait(APART_S if log.on_cluster() else APART_S / 5)


# ------------------------------------------------------------------------------------------- the process


def rank_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The options that a launcher hands to each rank, be it of a trial or of a script."""
    parser = argparse.ArgumentParser(prog=f"python3 -m {module}", description=description)
    add = parser.add_argument
    add("--run-dir", type=Path, help="where an off-cluster run writes (det-ds run sets it)")
    add("--accelerator", choices=("cpu", "cuda"), help="default: CUDA if available")
    add("--test", action="store_true", help="one batch, one validation, one checkpoint")
    add("--resume", metavar="UUID", help="checkpoint to resume from")
    add("--resume-from", metavar="DIR", type=Path, help="its folder, where it is another run's")
    add("--fork", metavar="DIR", type=Path, help="checkpoint of another run, to start from")
    steps: dict[str, Any] = {"metavar": "STEPS", "type": int}
    add("--measure", **steps, help="measure this many steps, instead of training to the end")
    add("--warmup", **steps, default=5, help="steps before those measured")
    add("--profile", action="store_true", help="record the measured steps by torch's profiler")
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
        self._context_dir = Path.cwd().resolve()
        self._run_dir = None if run_dir is None else RunDir(run_dir)
        if self._run_dir is None:
            return
        if PARENT in os.environ:
            end_with(int(os.environ[PARENT]))
        else:
            die_with_parent()
        stop_on_signal(listens)
        outlive_readers()
        show = threading.excepthook
        # TensorBoard's thread meets a full disk too; the one that trains says it.
        threading.excepthook = lambda error: (
            None if error.exc_value and exhausted(error.exc_value, Path.cwd()) else show(error)
        )

    def run(self, work: Callable[[], None], *, exit_of: Callable[[SystemExit], str | None]) -> int:
        """Do the work of this rank, and report why it ends where it fails. Returns the exit code.

        Args:
            work: It.
            exit_of: The message about an ``exit`` in it that is a failure; None for any other.
        """
        try:
            try:
                work()
            finally:
                # Data-loader workers may end in any way now; torch would report that as another error.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except KeyboardInterrupt:
            return 130
        except GeneratorExit:
            raise
        except SystemExit as error:
            message = exit_of(error)
            if message is None:
                raise
            return self._report(message, error, Ending(EXIT_TRAINING_FAILED, ERROR, message))
        except BaseException as error:  # Determined's InvalidExperimentException is not an Exception
            ending = ending_of(error, None if self._run_dir is None else self._run_dir.path)
            message = str(error) if isinstance(error, ConfigError) else f"error: {error}"
            if not isinstance(error, DeterminedDSError):
                message = ending.used_up or self._traceback(error)
            return self._report(message, error, ending)
        leave_watch()
        return 0

    def exit_of_author(self, error: SystemExit) -> str | None:
        """The message about an ``exit(7)`` in the author's code; None where it was called elsewhere."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if self._is_authors(frame.filename):
                path = (self._context_dir / frame.filename).resolve().relative_to(self._context_dir)
                at = f"{path}:{frame.lineno}, in {frame.name}"
                return f"the trial called exit({error.code!r}) at {at}: {NOT_ENDED}"
        return None

    @contextlib.contextmanager
    def os_exit_reported(self) -> Iterator[None]:
        """In here ``os._exit`` in the author's code is a failure, whatever its code."""
        real, process = os._exit, os.getpid()

        def os_exit(status: int) -> NoReturn:
            frames = traceback.extract_stack() if os.getpid() == process else []  # not forked from it
            if any(self._is_authors(frame.filename) for frame in frames):
                message = f"the trial called os._exit({status!r}): {NOT_ENDED}"
                status = self._report(
                    message, SystemExit(status), Ending(EXIT_TRAINING_FAILED, ERROR, message)
                )
                sys.stdout.flush()
                sys.stderr.flush()
            real(status)

        os._exit = os_exit
        try:
            yield
        finally:
            os._exit = real

    def _is_authors(self, file: str) -> bool:
        """Whether a file is in the context directory, and of no package that is installed there."""
        path = (self._context_dir / file).resolve()
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        is_code = not file.startswith("<") and path.is_relative_to(self._context_dir)
        return is_code and not installed and not path.is_relative_to(PACKAGE)

    def _traceback(self, error: BaseException) -> str:
        """An error's traceback from the author's first frame on, with all of it in a file of the run."""
        whole = traceback.TracebackException.from_exception(error)
        text, left, any_of_author = "".join(whole.format()), [whole], False
        while left:
            each = left.pop()
            left += filter(
                None, (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ()))
            )
            own = [index for index, frame in enumerate(each.stack) if self._is_authors(frame.filename)]
            any_of_author = any_of_author or bool(own)
            del each.stack[: own[0] if own else len(each.stack)]
        trimmed = "".join(whole.format())
        if self.debug or not any_of_author or trimmed == text:
            return text
        with contextlib.suppress(OSError):
            if self._run_dir is not None:
                keep = self._run_dir.traceback(int(os.environ.get("RANK", "0")))
                keep.parent.mkdir(parents=True, exist_ok=True)
                keep.write_text(text)
                trimmed += f"\nfull traceback: {keep}\n"
        return trimmed

    def _report(self, message: str, error: BaseException, ending: Ending) -> int:
        """Report why this rank ends: to our launcher, in the task's log on a cluster, or else on stderr."""
        sys.unraisablehook = lambda _: None  # errors of destructors say nothing new
        code = ending.code
        if report_failure(message, code, cause=ending.cause, reason=ending.reason):
            return code
        if not log.on_cluster():
            print(message, file=sys.stderr, flush=True)
            if LAUNCHED_BY in os.environ and not _said_by_chief(error):
                copy_to_terminal(message)
            return code
        if _said_by_chief(error):
            return code
        foreseen = isinstance(error, DeterminedDSError | SystemExit)
        if isinstance(error, DeterminedDSError):
            lines = log.error_lines(error)
        else:
            lines = log.lines_of(
                log.ERROR, message if foreseen else traceback.format_exception_only(error)[-1]
            )
        if code != EXIT_CRASHED:  # a last line for the log policies
            lines.append(log.OUT_OF_MEMORY if ending.out_of_memory else log.NO_RESTART_HELPS)
        print(*([] if foreseen else [message.rstrip()]), *lines, sep="\n", file=sys.stderr, flush=True)
        return code


def end_process(code: int) -> NoReturn:
    """End this process without waiting for threads of the process group, which may wait for a peer that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def show_own_errors() -> None:
    """From now on an error of this library that ends the script is printed without a traceback."""
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return  # the interpreter stays
    outer = sys.excepthook

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
