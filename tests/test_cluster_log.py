"""Lines in the log of a task: each has its level, and holds a whole problem; the last one is for the master."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from determined_ds.cluster_log import (
    LOG_POLICIES,
    MAX_LINE_BYTES,
    NO_RESTART_HELPS,
    OUT_OF_MEMORY,
    error_lines,
    warning_line,
)
from determined_ds.errors import CheckpointError, ConfigError, Problem
from tests.cluster.log_policies import shipped

BATCH = Problem(
    key="hyperparameters.global_batch_size",
    value=33,
    origin="const.yaml:12",
    message="is not divisible by 2 replicas",
    fix="use 32 or 34",
)
DATA = Problem(
    key="data.path", value="/nowhere", message="there is no such file", fix="check it\n  or leave it out"
)


def test_a_problem_is_one_line_with_key_value_reason_and_fix() -> None:
    assert error_lines(ConfigError([BATCH, DATA])) == [
        "ERROR: hyperparameters.global_batch_size = 33 (const.yaml:12): is not divisible by 2 replicas; "
        "fix: use 32 or 34",
        "ERROR: data.path = '/nowhere': there is no such file; fix: check it or leave it out",
    ]
    assert warning_line(BATCH) == error_lines(ConfigError(BATCH))[0].replace("ERROR: ", "WARNING: ")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            CheckpointError("cannot be read\n  back\n  fix: take another"),
            "cannot be read back; fix: take another",
        ),
        (ValueError(""), "ValueError"),
        (ValueError("error: no space left"), "no space left"),
    ],
)
def test_any_other_error_is_one_line(error: Exception, line: str) -> None:
    assert error_lines(error) == [f"ERROR: {line}"]


def test_what_is_not_indented_has_a_level_of_its_own() -> None:
    lines = error_lines(CheckpointError("two are damaged:\n  a\n  b\n\nerror: take another"))
    assert lines == ["ERROR: two are damaged: a b", "ERROR: take another"]


def test_a_line_is_never_cut_by_the_shipper() -> None:
    """It would lose its level; the shipper counts bytes."""
    [line] = error_lines(ValueError("ü" * 10_000))
    assert MAX_LINE_BYTES - 4 < len(line.encode()) <= MAX_LINE_BYTES
    assert line.endswith("ü...")


# ------------------------------------------------------------------------------------------------- policies


def matched(line: str) -> list[str]:
    """The names of our policies that match a line of a task."""
    return [policy["name"] for policy in LOG_POLICIES if re.search(policy["pattern"], shipped(line))]


@pytest.mark.parametrize("prefix", ["", "[rank=3] "])
@pytest.mark.parametrize(
    ("line", "name"), [(NO_RESTART_HELPS, "No restart helps"), (OUT_OF_MEMORY, "CUDA OOM")]
)
def test_the_master_knows_our_last_line_by_its_policy(prefix: str, line: str, name: str) -> None:
    assert matched(f"{prefix}{line}\n") == [name]


def test_no_other_line_is_taken_for_it() -> None:
    """Not the configuration in the log, our source in a traceback, nor what a trial prints."""
    lines = [
        *(json.dumps(policy) for policy in LOG_POLICIES),
        *(policy["pattern"] for policy in LOG_POLICIES),
        *Path("experiments/gpt2/const.yaml").read_text().splitlines(),
        *Path("determined_ds/cluster_log.py").read_text().splitlines(),
        f"print({NO_RESTART_HELPS!r})",
        f"ValueError: {NO_RESTART_HELPS}",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    ]
    assert [line for line in lines if matched(line)] == []
