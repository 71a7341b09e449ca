"""What a rank has from the ``det-ds run`` that started it, and what it tells it. Loads no torch.

Under any other launcher (torchrun, Determined's, mpirun) there is none of it but the hang timeout.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping

from determined_ds.errors import ConfigError, Problem

# Environment variables of a rank.
STORE = "DET_DS_STORE"  # the file by which ranks meet
ERROR_FD = "DET_DS_ERROR_FD"  # a pipe: why this rank ends, in its own words
PARENT = "DET_DS_PARENT"  # process id of the launcher
# And of a rank that another launcher started, whose environment has been prepared: process id and launcher.
LAUNCHED_BY = "DET_DS_LAUNCHED_BY"
REPORT = "DET_DS_REPORT"  # of rank 0: the run is reported to the master that DET_MASTER names
TERMINAL = "DET_DS_TERMINAL_FD"  # where that launcher hears a rank whose own output goes to a file
# The user's, of any rank: minutes without progress, or without a sign of life, after which a run ends; 0: never.
HANG_TIMEOUT = "DETERMINED_DS_HANG_TIMEOUT"  # DET_... is not the user's to set on a cluster
HANG_TIMEOUT_MINUTES = 10.0


def hang_timeout_s(environment: Mapping[str, str | None] = os.environ) -> float:
    """For how long nothing may move, in seconds; 0: for ever.

    Args:
        environment: That may state it.

    Raises:
        ConfigError: the environment variable is not a number of minutes.
    """
    stated = environment.get(HANG_TIMEOUT) or HANG_TIMEOUT_MINUTES
    with contextlib.suppress(ValueError):
        if 0 <= float(stated) < math.inf:
            return 60 * float(stated)
    message, fix = "must be a number of minutes, 0 or more", f"export {HANG_TIMEOUT}=10, or 0 for no limit"
    raise ConfigError(Problem(key=HANG_TIMEOUT, value=stated, message=message, fix=fix))


# What is left to do for this process where it has to end from another thread; each is called with the exit code.
LAST_ACTS: list[Callable[[int], object]] = []


def tell_launcher(message: str, exit_code: int) -> bool:
    """Say why this rank ends. By a pipe: neither a full disk nor too many open files can be in its way.

    Returns:
        False where there is no launcher of ours to hear it.
    """
    descriptor = os.environ.get(ERROR_FD)
    if descriptor is None:
        return False
    record = {"message": message, "exit_code": exit_code, "time": time.time()}
    rest = json.dumps(record).encode()
    while rest:
        rest = rest[os.write(int(descriptor), rest) :]
    return True


def tell_terminal(message: str) -> None:
    """Say why a rank of another launcher ends, there where it was started, too."""
    descriptor = os.environ.get(TERMINAL)
    if descriptor is not None:
        os.write(int(descriptor), f"rank {os.environ['RANK']}: {message}\n".encode())


def in_words(seconds: float) -> str:
    """A time as people say it."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
