"""Why a task of a cluster ends, in the task's log: once, with its level, and a last line for the log policies.

The line says that no restart helps wherever ``det-ds run`` would not start the run again. Loads no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
import traceback

from determined_ds.errors import EXIT_CRASHED, ChiefFailed, DeterminedDSError
from determined_ds.runtime.master.crashes import is_out_of_memory
from determined_ds.task_log import ERROR, NO_RESTART_HELPS, OUT_OF_MEMORY, error_lines, lines_of

# How far apart ranks may fail for the same reason. A rank that fails alone says why so much later.
APART_S = 10.0
# The same under another launcher, where others wait for the end of a rank that fails alone.
APART_ELSEWHERE_S = 3.0


def on_cluster() -> bool:
    """Whether this process is of a trial on a cluster."""
    return os.environ.get("DET_TASK_TYPE") == "TRIAL"


def say_in_task_log(message: str, exit_code: int, error: BaseException | None) -> None:
    """Say why this rank ends; where others end for the same reason, rank 0 alone says it.

    Args:
        message: In words, of any number of lines.
        exit_code: What the rank ends with.
        error: What was raised; None where the trial's code left the process.
    """
    if isinstance(error, ChiefFailed):
        return
    lines = _lines(message, error)
    if exit_code != EXIT_CRASHED:
        memory = error is not None and is_out_of_memory(error)
        lines.append(OUT_OF_MEMORY if memory else NO_RESTART_HELPS)
    foreseen = error is None or isinstance(error, DeterminedDSError)
    said = "\n".join(lines if foreseen else [message.rstrip(), *lines])
    chief = os.environ.get("RANK", "0") == "0"
    if chief:
        print(said, file=sys.stderr, flush=True)
    if not _meet(lines, chief=chief) and not chief:
        print(said, file=sys.stderr, flush=True)


def said_by_chief(message: str) -> bool:
    """Whether rank 0, which has nobody to ask, ends for the same reason as this rank, and says so."""
    return _meet([message], chief=os.environ.get("RANK", "0") == "0", apart_s=APART_ELSEWHERE_S)


def _lines(message: str, error: BaseException | None) -> list[str]:
    if error is None:
        return lines_of(ERROR, message)
    if isinstance(error, DeterminedDSError):
        return error_lines(error)
    return lines_of(ERROR, traceback.format_exception_only(error)[-1])


def _meet(said: list[str], *, chief: bool, apart_s: float = APART_S) -> bool:
    """Whether rank 0 says the same; rank 0 waits until all have heard it. At most ``apart_s``."""
    found = threading.Event()
    done = threading.Event()

    def meet() -> None:
        # Their store may be gone, or on a machine that is.
        with contextlib.suppress(Exception):
            if _all_here(said, chief=chief, apart_s=apart_s):
                found.set()
        done.set()

    threading.Thread(target=meet, daemon=True).start()
    done.wait(apart_s + 1)
    return found.is_set()


def _all_here(said: list[str], *, chief: bool, apart_s: float) -> bool:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    store = dist.distributed_c10d._get_default_store()
    name = f"last words/{hashlib.sha256(repr(said).encode()).hexdigest()}"
    wanted = dist.get_world_size() - 1 if chief else 1
    own, others = (f"{name}/chief", name) if chief else (name, f"{name}/chief")
    store.add(own, 1)
    deadline = time.monotonic() + apart_s
    while (there := store.add(others, 0)) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(there >= wanted)
