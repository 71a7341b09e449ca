"""``check`` notes where failures that no restart can help would be started again, as the experiment asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.checked import Found, report_of
from tests.package import LOG_POLICIES

OURS, OUT_OF_MEMORY = LOG_POLICIES


def noted(folder: Path, **config: Any) -> list[Found]:
    report = report_of(folder, **{"max_restarts": 2, **config})
    found = [each for each in report["findings"] if each.code == "log-policies"]
    assert {each.severity for each in found} <= {"note"}
    return found


def test_an_experiment_that_asks_for_restarts_gets_the_lines_to_paste(tmp_path: Path) -> None:
    (note,) = noted(tmp_path)
    assert "runs 3 times on a cluster" in note.message
    pasted = yaml.safe_load(note.fix.removeprefix("add "))
    assert pasted == {"log_policies": list(LOG_POLICIES)}
    assert noted(tmp_path, **pasted) == []
    (rest,) = noted(tmp_path, log_policies=[OURS, {"name": "CUDA OOM"}])
    assert yaml.safe_load(rest.fix.removeprefix("add to it: ")) == [OUT_OF_MEMORY]


@pytest.mark.parametrize(
    "config",
    [
        {"log_policies": [*LOG_POLICIES, {"name": "another", "pattern": "(?P<x>a)"}]},
        {
            "log_policies": [
                {"pattern": "^determined_ds: (another|out)", "action": {"type": "cancel_retries"}}
            ]
        },
        {"max_restarts": 0},
        {"max_restarts": None},  # a draft, such as the README's: nobody has asked for restarts
        {"max_restarts": "two"},  # reported already
    ],
)
def test_nothing_is_said_where_nothing_would_be_started_again(tmp_path: Path, config: dict[str, Any]) -> None:
    assert noted(tmp_path, **config) == []


def test_a_policy_that_ends_nothing_does_not_count(tmp_path: Path) -> None:
    for policy in ({**OURS, "action": "exclude_node"}, {**OURS, "pattern": "("}, {"name": "a"}):
        assert len(noted(tmp_path, log_policies=[OUT_OF_MEMORY, policy])) == 1
