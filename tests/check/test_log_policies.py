"""``check`` warns of an experiment whose failures a master would start again for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from determined_ds.check.log_policies import missing_policies
from determined_ds.cluster_log import LOG_POLICIES
from determined_ds.documents.document import Document

OURS, OUT_OF_MEMORY = LOG_POLICIES


def warned(**config: Any) -> list[str]:
    return [str(problem) for problem in missing_policies(Document(name="a.yaml", data=config))]


def test_a_yaml_without_the_policies_gets_the_lines_to_paste() -> None:
    [warning] = warned(max_restarts=2)
    assert warning.startswith("log_policies: a failure that no restart can help")
    assert "runs 3 times on a cluster" in warning
    assert yaml.safe_load(warning.partition("fix: add ")[2]) == {"log_policies": list(LOG_POLICIES)}
    assert "runs 6 times" in warned()[0]  # by the master's default


def test_what_is_there_is_not_asked_for() -> None:
    [warning] = warned(log_policies=[OURS, {"name": "CUDA OOM"}])
    assert yaml.safe_load(warning.partition("fix: add to it: ")[2]) == [OUT_OF_MEMORY]


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
        {"max_restarts": "two"},  # said already
    ],
)
def test_nothing_is_said_where_nothing_would_be_started_again(config: dict[str, Any]) -> None:
    assert warned(**config) == []


@pytest.mark.parametrize(
    "policy", [{**OURS, "action": "exclude_node"}, {**OURS, "pattern": "("}, {"name": "a"}, "a"]
)
def test_a_policy_that_ends_nothing_does_not_count(policy: Any) -> None:
    assert len(warned(log_policies=[OUT_OF_MEMORY, policy])) == 1
