"""How a rank ends after an error: its exit code, and what it says in a cluster task's log. Loads no torch."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
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
from determined_ds.rundir.signals import STOP, TRAINED

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the accelerator's memory was too small, as it will be at the same batch of another start."""
    return any(MEMORY.search(str(each)) for each in chain(error))


def _is_a(error: BaseException, names: set[str]) -> bool:
    return not names.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def came_of_other_ranks(error: BaseException) -> bool:
    """Whether the cause of an error is that another rank, or the connection to it, was lost."""
    return any(OF_OTHER_RANKS.search(str(each)) or _is_a(each, {"DistError"}) for each in chain(error))


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
        or (_is_a(each, NOT_OURS) and ASSERTED not in str(each))
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
    text = str(error).strip().partition("\n")[0]
    return (
        text if isinstance(error, DeterminedDSError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    )


# ------------------------------------------------------------------------------------------- last words


def on_cluster() -> bool:
    """Whether this process belongs to a trial on a cluster."""
    return os.environ.get("DET_TASK_TYPE") == "TRIAL"


def say_in_task_log(message: str, exit_code: int, error: BaseException) -> None:
    """Write to the task's log why this rank ends, with a last line for the log policies where no restart helps."""
    foreseen = isinstance(error, DeterminedDSError | SystemExit)
    if isinstance(error, DeterminedDSError):
        lines = error_lines(error)
    else:
        lines = lines_of(ERROR, message if foreseen else traceback.format_exception_only(error)[-1])
    if exit_code != EXIT_CRASHED:
        lines.append(OUT_OF_MEMORY if is_out_of_memory(error) else NO_RESTART_HELPS)
    if not said_by_chief(error):
        print(*([] if foreseen else [message.rstrip()]), *lines, sep="\n", file=sys.stderr, flush=True)


def said_by_chief(error: BaseException) -> bool:
    """Whether rank 0 reports why this rank ends: in a moment its launcher ends the others, unless this one is alone."""
    if os.environ.get("RANK", "0") == "0":
        return False
    if isinstance(error, ChiefFailed):
        return True
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    return STOP.wait(APART_S if on_cluster() else APART_S / 5)
