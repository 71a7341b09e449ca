"""What a rank receives from the ``det-ds run`` that started it, and how it reports its failure. Loads no torch.

Under any other launcher (torchrun, Determined's, mpirun) only the hang timeout is set.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from determined_ds.errors import ConfigError, Problem

# Environment variables of a rank.
STORE = "DET_DS_STORE"  # the file by which ranks meet
ERROR_FD = "DET_DS_ERROR_FD"  # a pipe: why this rank ends
PARENT = "DET_DS_PARENT"  # process id of the launcher
# And of a rank that another launcher started, whose environment has been prepared: process id and launcher.
LAUNCHED_BY = "DET_DS_LAUNCHED_BY"
REPORT = "DET_DS_REPORT"  # of rank 0: the run is reported to the master that DET_MASTER names
TERMINAL = "DET_DS_TERMINAL_FD"  # stderr of that launcher, for a rank whose own output goes to a file
# The user's, of any rank: minutes without progress, or without a sign of life, after which a run ends; 0: never.
HANG_TIMEOUT = "DETERMINED_DS_HANG_TIMEOUT"  # DET_... is not the user's to set on a cluster
HANG_TIMEOUT_MINUTES = 10.0

# Words for a checkpoint of a run directory, of --resume, --evaluate and --checkpoint.
BEST, LAST = "best", "last"

# What is left to do for this process where it has to end from another thread; each is called with the exit code.
LAST_ACTS: list[Callable[[int], object]] = []
# What this process has reported; rank 0 of another launcher writes result.json itself.
REPORTED: dict[str, Any] = {}


def stated_s(name: str, minutes: float, environment: Mapping[str, str | None] = os.environ) -> float:
    """The minutes that an environment variable states, in seconds.

    Raises:
        ConfigError: it is not a number of minutes.
    """
    stated = environment.get(name) or minutes
    with contextlib.suppress(ValueError):
        if 0 <= float(stated) < math.inf:
            return 60 * float(stated)
    message, fix = "must be a number of minutes, 0 or more", f"export {name}={minutes:g}"
    raise ConfigError(Problem(key=name, value=stated, message=message, fix=fix, code="launcher"))


def hang_timeout_s(environment: Mapping[str, str | None] = os.environ) -> float:
    """How long nothing may move, in seconds, by an environment that may state it; 0: no limit."""
    return stated_s(HANG_TIMEOUT, HANG_TIMEOUT_MINUTES, environment)


def report_failure(message: str, exit_code: int, *, cause: str, reason: str) -> bool:
    """Report why this rank ends, by a pipe: neither a full disk nor too many open files can be in its way.

    Args:
        message: For people, of any number of lines.
        exit_code: What the launcher should end with.
        cause: A cause of :mod:`determined_ds.rundir.records`.
        reason: The message; its first line is kept.

    Returns:
        False where no launcher of ours reads it.
    """
    how = {"message": message, "exit_code": exit_code, "cause": cause, "reason": shortened(reason)}
    REPORTED.update(how, time=time.time())
    descriptor = os.environ.get(ERROR_FD)
    rest = b"" if descriptor is None else json.dumps(REPORTED).encode()
    while rest:
        rest = rest[os.write(int(descriptor or 0), rest) :]
    return descriptor is not None


def shortened(reason: str) -> str:
    """The first line of a message, without ``error:``, at most 300 characters."""
    line = next(iter(reason.strip().splitlines()), "").removeprefix("error: ")
    return line if len(line) <= 300 else f"{line[:297]}..."


def copy_to_terminal(message: str) -> None:
    """Show why a rank of another launcher ends where it was launched, too."""
    descriptor = os.environ.get(TERMINAL)
    if descriptor is not None:
        os.write(int(descriptor), f"rank {os.environ['RANK']}: {message}\n".encode())


def in_words(seconds: float) -> str:
    """A time as people say it."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
