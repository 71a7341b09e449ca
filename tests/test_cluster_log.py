"""The log policies of an experiment know the last line of a task for which no restart helps, and no other line."""

from __future__ import annotations

import json
import re

from tests.cluster.state import taken_apart
from tests.harness.command import ROOT
from tests.package import LOG_POLICIES, NO_RESTART_HELPS, OUT_OF_MEMORY


def matched(line: str) -> list[str]:
    """The names of our policies that match a line of a task."""
    return [policy["name"] for policy in LOG_POLICIES if re.search(policy["pattern"], taken_apart(line)[2])]


def test_the_master_knows_the_last_line_by_its_policy() -> None:
    for prefix in ("", "[rank=3] "):
        assert matched(f"{prefix}{NO_RESTART_HELPS}\n") == ["No restart helps"]
        assert matched(f"{prefix}{OUT_OF_MEMORY}\n") == ["CUDA OOM"]


def test_no_other_line_is_taken_for_it() -> None:
    """Not the configuration in the log, our source in a traceback, nor what a trial prints."""
    lines = [
        *(json.dumps(policy) for policy in LOG_POLICIES),
        *(policy["pattern"] for policy in LOG_POLICIES),
        *(ROOT / "experiments/gpt2/const.yaml").read_text().splitlines(),
        *(line for path in (ROOT / "determined_ds").rglob("*.py") for line in path.read_text().splitlines()),
        f"print({NO_RESTART_HELPS!r})",
        f"ValueError: {NO_RESTART_HELPS}",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    ]
    assert [line for line in lines if matched(line)] == []
