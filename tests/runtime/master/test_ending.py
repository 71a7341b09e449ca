"""How a rank ends: its exit code, and what it says in a cluster task's log."""

from __future__ import annotations

import contextlib
import errno
import io
import time
import traceback
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from determined.common.api import errors as of_master

from determined_ds.cluster_log import NO_RESTART_HELPS, OUT_OF_MEMORY
from determined_ds.errors import (
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_TRAINING_FAILED,
    CheckpointError,
    ChiefFailed,
    ConfigError,
    NotFiniteError,
    Problem,
)
from determined_ds.protocol.signals import TRAINED
from determined_ds.runtime.checkpoints.contents import explained
from determined_ds.runtime.master import ending
from determined_ds.runtime.master.ending import cause_of, exit_code_of, reason_of
from tests.ranks import Ranks

# As gloo of torch 2.13 has it, where a rank was killed.
LOST = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:11968."
)
MISTAKE = ConfigError(Problem(key="data.path", value="/nowhere", message="no such folder", fix="check it"))


@pytest.fixture(params=[False, True], ids=["before the first batch", "trained"])
def trained(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param:
        TRAINED.set()
    yield request.param
    TRAINED.clear()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MISTAKE, EXIT_CONFIG),
        (NotFiniteError("the loss was not finite"), EXIT_TRAINING_FAILED),
        (CheckpointError("damaged"), EXIT_TRAINING_FAILED),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), EXIT_TRAINING_FAILED),
        (RuntimeError("CUDA error: out of memory"), EXIT_TRAINING_FAILED),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            EXIT_TRAINING_FAILED,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), EXIT_TRAINING_FAILED),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("trained")
def test_what_was_diagnosed_is_the_same_the_next_time(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        of_master.MasterNotFoundException("no answer"),
        OSError(errno.ESTALE, "Stale file handle"),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("trained")
def test_what_is_not_of_this_process_may_be_gone(error: Exception) -> None:
    assert exit_code_of(error) == EXIT_CRASHED
    wrapped = ValueError("while reading")
    wrapped.__cause__ = error
    assert exit_code_of(wrapped) == EXIT_CRASHED


@pytest.mark.parametrize(
    "error",
    [
        TypeError("unsupported operand"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
    ],
    ids=repr,
)
def test_any_other_error_is_the_authors_until_a_batch_was_trained(error: Exception, trained: bool) -> None:
    assert exit_code_of(error) == (EXIT_CRASHED if trained else EXIT_TRAINING_FAILED)


def test_a_rank_that_dies_while_a_checkpoint_is_loaded_is_no_fault_of_the_checkpoint() -> None:
    with pytest.raises(ConfigError) as refused, explained("a1", own_method=False):
        raise LOST
    assert exit_code_of(refused.value) == EXIT_CRASHED


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
            "out of memory",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "out of memory",
        ),
        (RuntimeError("std::bad_alloc"), "out of memory"),
        (MemoryError(), "out of memory"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "out of memory"),
        (RuntimeError("[/pytorch/third_party/gloo/x.cc] Connection closed by peer"), "lost machine"),
        (NotFiniteError("the loss was not finite"), "error"),
        (ConfigError(Problem(key="x", message="is wrong")), "configuration"),
        (ValueError("no such file"), "crash"),
    ],
)
def test_the_cause_of_an_error_in_result_json(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


def test_the_reason_is_one_sentence() -> None:
    assert reason_of(ValueError("first\nsecond")) == "ValueError: first"
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert reason_of(ConfigError(Problem(key="x", message="is wrong", fix="write y"))) == "x: is wrong"


SAID = ["ERROR: data.path = '/nowhere': no such folder; fix: check it", NO_RESTART_HELPS]


def said(error: BaseException | None, code: int, message: str = "") -> list[str]:
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        ending.say_in_task_log(message or str(error), code, error)
    return text.getvalue().splitlines()


def test_a_refusal_is_its_problems_and_the_last_line() -> None:
    assert said(MISTAKE, EXIT_CONFIG) == SAID


def test_an_error_that_nobody_foresaw_has_its_traceback_first() -> None:
    with pytest.raises(KeyError) as found:
        raise KeyError("x")
    trace = "".join(traceback.format_exception(found.value))
    lines = [*trace.splitlines(), "ERROR: KeyError: 'x'"]
    assert said(found.value, EXIT_TRAINING_FAILED, trace) == [*lines, NO_RESTART_HELPS]
    assert said(found.value, EXIT_CRASHED, trace) == lines


def test_out_of_memory_has_a_last_line_of_its_own() -> None:
    lines = said(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), EXIT_TRAINING_FAILED)
    assert lines[-2:] == ["ERROR: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB", OUT_OF_MEMORY]


def test_an_exit_of_the_authors_is_said() -> None:
    lines = said(None, EXIT_TRAINING_FAILED, "the trial called exit(7)\n  fix: raise")
    assert lines == ["ERROR: the trial called exit(7); fix: raise", NO_RESTART_HELPS]


# -------------------------------------------------------------------------------------- ranks


def in_a_rank(wrong: str) -> list[str]:
    """What a rank says at its end; they fail up to half a second apart."""
    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group

    rank = join_process_group(detect_accelerator("cpu")).rank
    ending.APART_S = 20.0 if wrong == "all" else 0.5
    if wrong == "all":
        time.sleep(0.5 * (1 - rank))  # rank 1 is the first
        return said(MISTAKE, EXIT_CONFIG)
    if wrong == "the chief's step":
        return said(ChiefFailed("rank 0: OSError()") if rank else OSError(), EXIT_CRASHED)
    return said(MISTAKE, EXIT_CONFIG) if wrong == f"rank {rank}" else []


@pytest.mark.parametrize(
    ("wrong", "by_rank"),
    [
        ("all", [SAID, []]),
        ("rank 0", [SAID, []]),
        ("rank 1", [[], SAID]),
        ("the chief's step", [["", "ERROR: OSError"], []]),
    ],
)
def test_what_all_ranks_say_rank_0_says_alone(wrong: str, by_rank: list[list[str]], two_ranks: Ranks) -> None:
    assert two_ranks.run(in_a_rank, wrong) == by_rank
