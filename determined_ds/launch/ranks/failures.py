"""A failed rank, in words for the user."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

from determined_ds.errors import EXIT_CONFIG
from determined_ds.launch.ranks.hang import Hang
from determined_ds.launch.ranks.process import Failure
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.handed_on import in_words
from determined_ds.protocol.run_dir import CHECKPOINTS, LOGS


def say_failure(first: Failure, run_dir: Path) -> None:
    """Show the first failure's own words on stderr, and say where the rest is."""
    if first.exit_code == EXIT_CONFIG:
        for problem in re.split(r"\n(?=\S)", first.message.rstrip()):
            print(f"error: {problem}", file=sys.stderr)
        return
    others = ""
    if any(log.stat().st_size for log in (run_dir / LOGS).glob("rank*.log")):
        others = f" (what the other ranks wrote is in {run_dir / LOGS})"
    print(f"\nrank {first.rank} failed first{others}:\n\n{words_of(first)}", file=sys.stderr)


def say_hang(hang: Hang, run_dir: Path, go_on_with: str) -> None:
    """Say on stderr which rank hangs, where, and how to go on."""
    logs = run_dir / LOGS
    if len(hang.behind) == 1:
        who, stacks = f"rank {hang.behind[0]} hangs", f"its stack is in {logs / f'rank{hang.behind[0]}.log'}"
        stacks += ", those of the others are beside it"
    else:
        who, stacks = "the ranks hang", f"their stacks are in {logs}"
    kept = checkpoints_in(run_dir / CHECKPOINTS)
    lines = [
        f"\n{who}: nothing has moved for {in_words(hang.seconds)}, since batch {hang.steps}; {stacks}",
        *([f"rank {hang.behind[0]}, innermost call first:", hang.stack] if hang.stack else []),
        f"the last checkpoint is {kept[0].path}" if kept else "no checkpoint was made yet",
        *([f"  fix: go on from it with: {go_on_with}"] if kept else []),
        "  fix: a step that may take longer is waited for by --hang-timeout MINUTES (0: for ever)",
    ]
    print("\n".join(lines), file=sys.stderr)


def words_of(failure: Failure) -> str:
    """Why a rank failed: its own words, or what its end tells."""
    if failure.message:
        return failure.message.rstrip()
    words = f"it ended without a word: {how_ended(failure.code)}"
    if failure.last_lines:
        words = f"the last lines of its log:\n{failure.last_lines}\n\n{words}"
    return words


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
