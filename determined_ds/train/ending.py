"""How a rank ends after an error: its exit code, and what it says in a cluster task's log. Loads no torch.

The exit code says whether another start may get further. The task's log has the reason once, with its level, and a last
line for the log policies where no restart helps, by the same rule as that of ``det-ds run``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import sys
import threading
import time
import traceback

from determined_ds.cluster.log import ERROR, NO_RESTART_HELPS, OUT_OF_MEMORY, error_lines, lines_of
from determined_ds.errors import (
    EXIT_CRASHED,
    EXIT_TRAINING_FAILED,
    ChiefFailed,
    ConfigError,
    DeterminedDSError,
)
from determined_ds.rundir import records as result
from determined_ds.rundir.limits import chain
from determined_ds.rundir.signals import TRAINED

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
# How far apart ranks may fail for the same reason. A rank that fails alone reports it so much later.
APART_S = 10.0
# The same under another launcher, where others wait for the end of a rank that fails alone.
APART_ELSEWHERE_S = 3.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the accelerator's memory was too small, as it will be at the same batch of another start."""
    return any(MEMORY.search(str(each)) for each in chain(error))


def came_of_other_ranks(error: BaseException) -> bool:
    """Whether the cause of an error is that another rank, or the connection to it, was lost."""
    return any(OF_OTHER_RANKS.search(str(each)) or "DistError" in _kinds(each) for each in chain(error))


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def exit_code_of(error: BaseException) -> int:
    """The exit code of a rank after an error: ``EXIT_CRASHED`` where another start may get further.

    That is so for an unexpected error after a trained batch, and for one from outside this process. A diagnosed error
    is the same the next time, unless another rank's end caused it; so is an error before the first trained batch.
    """
    of_others = came_of_other_ranks(error)
    if isinstance(error, DeterminedDSError):
        return EXIT_CRASHED if of_others else error.exit_code
    if is_out_of_memory(error):
        return EXIT_TRAINING_FAILED
    from_outside = any(
        (isinstance(each, OSError) and each.errno in ERRNOS)
        or (NOT_OURS & _kinds(each) and ASSERTED not in str(each))
        for each in chain(error)
    )
    return EXIT_CRASHED if TRAINED.is_set() or of_others or from_outside else EXIT_TRAINING_FAILED


def cause_of(error: BaseException) -> str:
    """Why a rank ends, as ``result.json`` names it."""
    if isinstance(error, ConfigError):
        return result.CONFIGURATION
    words = [f"{type(each).__name__}: {each}" for each in chain(error)]
    if is_out_of_memory(error) or any(map(HOST_MEMORY.search, words)):
        return result.OUT_OF_MEMORY
    if came_of_other_ranks(error):
        return result.LOST_MACHINE
    return result.ERROR if isinstance(error, DeterminedDSError) else result.CRASH


def reason_of(error: BaseException) -> str:
    """An error in one sentence; one that is not ours begins with its type."""
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, DeterminedDSError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


# ------------------------------------------------------------------------------------------- last words


def on_cluster() -> bool:
    """Whether this process belongs to a trial on a cluster."""
    return os.environ.get("DET_TASK_TYPE") == "TRIAL"


def say_in_task_log(message: str, exit_code: int, error: BaseException | None) -> None:
    """Write to the task's log why this rank ends; of ranks that end for the same reason, only rank 0 does.

    Args:
        message: Any number of lines.
        exit_code: Of this rank.
        error: What was raised; None where the trial's code left the process.
    """
    if isinstance(error, ChiefFailed):
        return
    if isinstance(error, DeterminedDSError):
        lines = error_lines(error)
    else:
        lines = lines_of(ERROR, message if error is None else traceback.format_exception_only(error)[-1])
    if exit_code != EXIT_CRASHED:
        lines.append(OUT_OF_MEMORY if error is not None and is_out_of_memory(error) else NO_RESTART_HELPS)
    foreseen = error is None or isinstance(error, DeterminedDSError)
    text = "\n".join(lines if foreseen else [message.rstrip(), *lines])
    is_chief = os.environ.get("RANK", "0") == "0"
    if is_chief:
        print(text, file=sys.stderr, flush=True)
    if not _meet(lines, APART_S) and not is_chief:
        print(text, file=sys.stderr, flush=True)


def said_by_chief(message: str) -> bool:
    """Whether rank 0 ends for the same reason as this rank, and reports it."""
    return _meet([message], APART_ELSEWHERE_S)


def _meet(said: list[str], within_s: float) -> bool:
    """Whether rank 0 says the same; rank 0 waits until all have seen it."""
    found = threading.Event()

    def meet() -> None:
        import torch.distributed as dist

        with contextlib.suppress(Exception):  # the store may be gone
            if not dist.is_initialized() or dist.get_world_size() == 1:
                return
            others = f"last words/{hashlib.sha256(repr(said).encode()).hexdigest()}"
            own, theirs, wanted = others, f"{others}/chief", 1
            if os.environ.get("RANK", "0") == "0":
                own, theirs, wanted = theirs, others, dist.get_world_size() - 1
            if seen_in_store(own, theirs, wanted, within_s=within_s):
                found.set()

    # In a thread: the store may be on a machine that does not answer.
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(within_s + 1)
    return found.is_set()


def seen_in_store(own: str, others: str, wanted: int, *, within_s: float) -> bool:
    """Count this rank under one name in the store, and wait until another name has enough of them.

    Args:
        own: The name to count this rank under.
        others: The name to watch; may be the same.
        wanted: Ranks to wait for.
        within_s: How long to wait.
    """
    import torch.distributed as dist

    found = dist.distributed_c10d._get_default_store()
    found.add(own, 1)
    deadline = time.monotonic() + within_s
    while (there := found.add(others, 0)) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(there >= wanted)
