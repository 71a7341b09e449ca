"""An error ends a rank with a code that says whether another start may get further, and with a cause."""

from __future__ import annotations

import errno

import pytest
import torch
import torch.distributed as dist
from determined.common.api import errors as of_master

from determined_ds.errors import EXIT_CONFIG as CONFIG
from determined_ds.errors import EXIT_CRASHED as CRASHED
from determined_ds.errors import EXIT_TRAINING_FAILED as FAILED
from determined_ds.errors import CheckpointError, ConfigError, NotFiniteError, Problem
from tests.package import ending_of

# As gloo of torch 2.13 has it, where a rank was killed.
LOST = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:11968."
)
MISTAKE = ConfigError(Problem(key="data.path", value="/nowhere", message="no such folder", fix="check it"))
BLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
WORKER = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
CAUSED = CheckpointError("cannot be read")
CAUSED.__cause__ = LOST
ENDINGS: list[tuple[Exception, int, int, str]] = [
    # What was diagnosed is the same the next time.
    (MISTAKE, CONFIG, CONFIG, "configuration"),
    (NotFiniteError("the loss"), FAILED, FAILED, "error"),
    (OUT_OF_MEMORY, FAILED, FAILED, "out of memory"),
    (BLAS, FAILED, FAILED, "out of memory"),
    # What is not of this process may be gone.
    (LOST, CRASHED, CRASHED, "lost machine"),
    (dist.DistBackendError("NCCL communicator was aborted on rank 0."), CRASHED, CRASHED, "lost machine"),
    (torch.AcceleratorError("CUDA error: uncorrectable ECC error"), CRASHED, CRASHED, "crash"),
    (of_master.MasterNotFoundException("no answer"), CRASHED, CRASHED, "crash"),
    (OSError(errno.ESTALE, "Stale file handle"), CRASHED, CRASHED, "crash"),
    (CAUSED, CRASHED, CRASHED, "lost machine"),
    # Any other error is the author's until a batch was trained.
    (TypeError("unsupported operand"), FAILED, CRASHED, "crash"),
    (torch.AcceleratorError("CUDA error: device-side assert triggered"), FAILED, CRASHED, "crash"),
    (WORKER, FAILED, CRASHED, "out of host memory"),
]


@pytest.mark.parametrize(("error", "code", "once_trained", "cause"), ENDINGS, ids=repr)
def test_the_exit_code_says_whether_another_start_may_get_further(
    error: Exception, code: int, once_trained: int, cause: str
) -> None:
    assert (ending_of(error), ending_of(error, trained=True)) == ((code, cause), (once_trained, cause))
