"""The last lines of a task: why it ends, once and not by each rank, and whether another start could help."""

from __future__ import annotations

import contextlib
import io
import time
import traceback

import pytest

from determined_ds.errors import (
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_TRAINING_FAILED,
    ChiefFailed,
    ConfigError,
    Problem,
)
from determined_ds.runtime.master import ending
from determined_ds.task_log import NO_RESTART_HELPS, OUT_OF_MEMORY
from tests.ranks import Ranks

MISTAKE = ConfigError(Problem(key="data.path", value="/nowhere", message="no such folder", fix="check it"))
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
