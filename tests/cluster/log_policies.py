"""What becomes of a line of a task: its level, and the policies of the experiment that it meets.

Source: determined 0.38.1's ``master/static/srv/ship_logs.py`` and ``master/internal/logpattern/logpattern.go``.
"""

from __future__ import annotations

import re

from tests.cluster.state import Json

# The rank, the level and the rest of a line.
SHIPPED = re.compile(r"(?: ?\[rank=(\d+)\] ?)?(?: ?(DEBUG|INFO|WARNING|ERROR|CRITICAL): ?)?(.*)", re.DOTALL)
# The master passes over the line that has an experiment's configuration.
CONFIGURATION = '"log_policies":'


def taken_apart(line: str) -> tuple[str, str, str]:
    """The rank and the level of a line, empty where it has none, and the rest, which the log shipper sends."""
    rank, level, text = SHIPPED.fullmatch(line).groups("")  # type: ignore[union-attr]  # it matches any line
    return rank, level, text


def shipped(line: str) -> str:
    """A line as the log shipper sends it, its rank and its level taken off."""
    return taken_apart(line)[2]


def policies_met(config: dict[str, Json], line: str) -> list[dict[str, Json]]:
    """The log policies of an experiment that a line of its task meets, the cluster's defaults among them.

    Args:
        config: Of the experiment, with the defaults filled in.
        line: As the task wrote it.
    """
    text = shipped(line)
    if CONFIGURATION in text:
        return []
    policies = [policy for policy in config["log_policies"] if policy.get("pattern")]
    return [policy for policy in policies if re.search(policy["pattern"], text)]
