"""Tracebacks that begin in the author's code, and calls of ``exit`` in it. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from determined_ds.errors import ChiefFailed, ConfigError, DeterminedDSError, lines_of_error

PACKAGE = str(Path(__file__).resolve().parents[1])
HEADER = re.compile(r"^(?P<indent>.*?)(Original )?Traceback \(most recent call last\):$")
FRAME = re.compile(r'^ *File "(?P<file>.+?)", line \d+')
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

    def shown(self, file: str) -> str:
        """A file by its path in the context directory."""
        return str((self._context_dir / file).resolve().relative_to(self._context_dir))


# ------------------------------------------------------------------------------------------- tracebacks


def authors_traceback(text: str, files: AuthorsFiles) -> str:
    """A traceback from the author's first frame on; so are those chained to it or quoted in it (by a data loader).

    All of it where no frame is in the author's files.
    """
    blocks = list(_blocks(text.splitlines()))
    if not any(_first_of_author(frames, files) is not None for _, frames in blocks):
        return text
    lines = []
    for before, frames in blocks:
        lines += before
        first = _first_of_author(frames, files)
        lines += [line for frame in frames[first:] for line in frame] if first is not None else []
    return "\n".join(lines) + "\n"


def _blocks(lines: list[str]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Lines up to the header of a traceback, and its frames, each several lines; the rest has no frames."""
    before: list[str] = []
    at = 0
    while at < len(lines):
        before.append(lines[at])
        at += 1
        if HEADER.match(before[-1]):
            frames: list[list[str]] = []
            while at < len(lines) and (FRAME.match(lines[at]) or (frames and _belongs(lines[at]))):
                if FRAME.match(lines[at]):
                    frames.append([])
                frames[-1].append(lines[at])
                at += 1
            yield before, frames
            before = []
    yield before, []


def _belongs(line: str) -> bool:
    """Whether a line belongs to the frame above it: its code, marks under it, or how often it is repeated."""
    return line.startswith(("    ", "  [Previous line repeated"))


def _first_of_author(frames: list[list[str]], files: AuthorsFiles) -> int | None:
    for index, (head, *_) in enumerate(frames):
        found = FRAME.match(head)
        if found and found["file"] in files:
            return index
    return None


def trimmed_traceback(error: BaseException, files: AuthorsFiles, keep: Path | None) -> str:
    """An error's traceback from the author's first frame on; all of it is written to the file ``keep``, unless None."""
    text = "".join(traceback.format_exception(error))
    trimmed = authors_traceback(text, files)
    if keep is None or trimmed == text:
        return trimmed
    with contextlib.suppress(OSError):
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_text(text)
        return f"{trimmed}\nfull traceback: {keep}\n"
    return trimmed


# ------------------------------------------------------------------------------------------- exits


def exit_of_author(error: SystemExit, files: AuthorsFiles) -> str | None:
    """The message about an ``exit(7)`` in the author's code; None where it was called elsewhere."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return _exited(f"exit({error.code!r})", reversed(frames), files)


@contextlib.contextmanager
def os_exit_reported(files: AuthorsFiles, say: Callable[[str, int], None]) -> Iterator[None]:
    """In here ``os._exit`` in the author's code is a failure, whatever its code.

    Args:
        files: The author's.
        say: Called with the message and the exit code.
    """
    real, process = os._exit, os.getpid()

    def os_exit(status: int) -> NoReturn:
        caller = sys._getframe(1)
        said = _exited(f"os._exit({status!r})", traceback.walk_stack(caller), files)
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


def _exited(call: str, frames: Iterator[tuple[types.FrameType, int]], files: AuthorsFiles) -> str | None:
    """The message of an exit; the frames begin at the innermost."""
    for frame, line in frames:
        code = frame.f_code
        if code.co_filename in files:
            place = f"{files.shown(code.co_filename)}:{line}, in {code.co_name}"
            return f"the trial called {call} at {place}: training had not ended\n  fix: {FIX}"
    return None


# ------------------------------------------------------------------------------------------- scripts


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
