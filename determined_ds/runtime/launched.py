"""What a rank has from the ``det-ds run`` that started it, and what it tells it. Loads nothing.

Under any other launcher (torchrun, Determined's, mpirun) there is none of it, and all of this does nothing.
"""

from __future__ import annotations

import json
import os
import time

# Environment variables of a rank.
STORE = "DET_DS_STORE"  # the file by which ranks meet
ERROR_FD = "DET_DS_ERROR_FD"  # a pipe: why this rank ends, in its own words
PARENT = "DET_DS_PARENT"  # process id of the launcher
PATIENCE = "DET_DS_PATIENCE_S"  # seconds that ranks may wait for one another
# And of a rank that another launcher started, whose environment has been prepared: process id and launcher.
LAUNCHED_BY = "DET_DS_LAUNCHED_BY"
REPORT = "DET_DS_REPORT"  # of rank 0: the run is reported to the master that DET_MASTER names
TERMINAL = "DET_DS_TERMINAL_FD"  # where that launcher hears a rank whose own output goes to a file


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
