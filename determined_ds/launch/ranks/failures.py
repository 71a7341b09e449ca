"""A failed run, in words for the user."""

from __future__ import annotations

import re
import signal
import sys

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.errors import EXIT_CONFIG
from determined_ds.launch.ranks.hang import Hang
from determined_ds.launch.ranks.process import Failure
from determined_ds.rundir.handed_on import in_words, since
from determined_ds.rundir.run_dir import RunDir

MOST_STACKS = 8  # that are shown; all are in the logs


def show_failure(first: Failure, run_dir: RunDir) -> None:
    """Print why the first rank failed on stderr, and where the rest is."""
    if first.exit_code == EXIT_CONFIG:
        for problem in re.split(r"\n(?=\S)", first.message.rstrip()):
            print(f"error: {problem}", file=sys.stderr)
        return
    others = ""
    if any(log.stat().st_size for log in run_dir.logs.glob("rank*.log")):
        others = f" (the output of the other ranks is in {run_dir.logs})"
    print(f"\nrank {first.rank} failed first{others}:\n\n{words_of(first)}", file=sys.stderr)


def show_hang(hang: Hang, run_dir: RunDir, resume_with: str) -> None:
    """Print which rank hangs, where, and how to resume, on stderr."""
    if len(hang.behind) == 1:
        stacks = f"its stack is in {run_dir.log(hang.behind[0])}, those of the others are beside it"
    else:
        stacks = f"their stacks are in {run_dir.logs}"
    kept = checkpoints_in(run_dir.checkpoints)
    others = [rank for rank in range(len(hang.stacks)) if rank not in hang.behind]
    shown = [rank for rank in (*hang.behind, *others)[:MOST_STACKS] if hang.stacks[rank]]
    lines = [
        f"\n{reason_of_hang(hang)}; {stacks}",
        *(f"rank {rank}, innermost call first:\n{hang.stacks[rank]}" for rank in shown),
        f"the last checkpoint is {kept[0].path}" if kept else "no checkpoint was made yet",
        *([f"  fix: resume from it with: {resume_with}"] if kept else []),
        "  fix: if a step may take longer, add --hang-timeout MINUTES (0: no limit)",
    ]
    print("\n".join(lines), file=sys.stderr)


def reason_of_hang(hang: Hang) -> str:
    """A hang in one sentence."""
    who = f"rank {hang.behind[0]} hangs" if len(hang.behind) == 1 else "the ranks hang"
    return f"{who}: nothing has moved for {in_words(hang.seconds)}, {since(hang.steps)}"


def reason_of_failure(failure: Failure) -> str:
    """A failure in one sentence."""
    return failure.reason or f"it ended without a message: {how_ended(failure.code)}"


def words_of(failure: Failure) -> str:
    """Why a rank failed: its own message, or what its exit code and log show."""
    if failure.message:
        return failure.message.rstrip()
    words = reason_of_failure(failure)
    return f"the last lines of its log:\n{failure.last_lines}\n\n{words}" if failure.last_lines else words


def how_ended(code: int) -> str:
    """An exit code of a process in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = {
        "SIGKILL": "; the system kills processes when memory runs out",
        "SIGBUS": "; a file in memory cannot grow where /dev/shm or a disk is full",
    }
    return f"killed by {name}{why.get(name, '')}"
