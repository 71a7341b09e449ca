"""Tracebacks that begin in the author's code, and calls of ``exit`` in it. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from determined_ds.errors import ChiefFailed, ConfigError, DeterminedDSError, lines_of_error

PACKAGE = str(Path(__file__).resolve().parents[1])
FIX = "raise an exception to say what is wrong, or call context.set_stop_requested(True) to end training in good order"


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


def exit_of_author(error: SystemExit, files: AuthorsFiles) -> str | None:
    """The message about an ``exit(7)`` in the author's code; None where it was called elsewhere."""
    return files.exited(f"exit({error.code!r})", reversed(list(traceback.walk_tb(error.__traceback__))))


@contextlib.contextmanager
def os_exit_reported(files: AuthorsFiles, say: Callable[[str, int], None]) -> Iterator[None]:
    """In here ``os._exit`` in the author's code is a failure, whatever its code.

    Args:
        files: The author's.
        say: Called with the message and the exit code.
    """
    real, process = os._exit, os.getpid()

    def os_exit(status: int) -> NoReturn:
        said = files.exited(f"os._exit({status!r})", traceback.walk_stack(sys._getframe(1)))
        if said is None or os.getpid() != process:  # also in a process that was forked from this one
            real(status)
        say(said, 1)
        sys.stdout.flush()
        sys.stderr.flush()
        real(1)

    os._exit = os_exit
    try:
        yield
    finally:
        os._exit = real


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
