"""Whether another start may come further than the one that an error has ended. Loads no torch."""

from __future__ import annotations

import errno
import re

from determined_ds.errors import EXIT_CRASHED, EXIT_TRAINING_FAILED, DeterminedDSError
from determined_ds.protocol.exhausted import chain
from determined_ds.protocol.signals import TRAINED

# Of what is not in this process: another rank, the network, the master, a disk or a device. By their names, which are
# Python's, torch's, Determined's, and those of requests and httpx; so are the classes that are derived from them.
NOT_OURS = {
    "ConnectionError",
    "TimeoutError",
    "Timeout",
    "TransportError",
    "AcceleratorError",
    "APIException",
    "MasterNotFoundException",
}
ERRNOS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ENETUNREACH, errno.EHOSTUNREACH)
# Errors of gloo and NCCL that torch raises as RuntimeError.
OF_OTHER_RANKS = re.compile(r"/gloo/|\bNCCL\b|closed by peer|reset by peer|connectFullMesh|Broken pipe")
# An index that is out of range looks so on a GPU.
ASSERTED = "device-side assert"
# cuBLAS and its sisters take memory of their own, and have words of their own for its want.
OUT_OF_MEMORY = re.compile(r"(CUDA|HIP)( driver)?( error:)? out of memory|(CU|HIP)[A-Z]+_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the accelerator's memory was too small: so it is at the same batch of another start."""
    return any(OUT_OF_MEMORY.search(str(each)) is not None for each in chain(error))


def came_of_other_ranks(error: BaseException) -> bool:
    """Whether an error is that another rank, or the way to it, was lost."""
    return any(map(_is_of_other_ranks, chain(error)))


def exit_code_of(error: BaseException) -> int:
    """What a rank ends with after an error: ``EXIT_CRASHED`` where another start may come further.

    So it may where the rank had trained and did not expect the error, and where the error is not of this process.
    What was diagnosed is the same the next time, unless it came of another rank's end; and so is what is raised before
    the first batch is trained.
    """
    if isinstance(error, DeterminedDSError):
        return EXIT_CRASHED if came_of_other_ranks(error) else error.exit_code
    if is_out_of_memory(error):
        return EXIT_TRAINING_FAILED
    return EXIT_CRASHED if TRAINED.is_set() or any(map(_is_not_ours, chain(error))) else EXIT_TRAINING_FAILED


def _is_of_other_ranks(error: BaseException) -> bool:
    return "DistError" in _names(error) or OF_OTHER_RANKS.search(str(error)) is not None


def _is_not_ours(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in ERRNOS:
        return True
    is_foreign = bool(NOT_OURS & _names(error)) and ASSERTED not in str(error)
    return is_foreign or _is_of_other_ranks(error)


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}
