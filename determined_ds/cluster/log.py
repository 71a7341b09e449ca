"""How lines of ours look in the log of a Determined task. Loads nothing but the errors.

Determined's log shipper takes the level of a line from its beginning, ``ERROR: `` or ``WARNING: ``, after the
``[rank=N] `` that its launchers put there; the web UI hides a line without a level behind its filter. The master
matches the patterns of ``log_policies`` against what is left: a line without its rank and its level.

Source: ``level`` and ``rank`` in determined 0.38.1's ``master/static/srv/ship_logs.py``; ``monitor`` in its
``master/internal/logpattern/logpattern.go``.
"""

from __future__ import annotations

import os
import re

from determined_ds.errors import ConfigError, Problem

ERROR = "ERROR: "
WARNING = "WARNING: "
# The last line of a task that ends as its next start would. Our own exit path prints them, and nothing else does.
NO_RESTART_HELPS = f"{ERROR}determined_ds: another start would fail in the same way"
OUT_OF_MEMORY = f"{ERROR}determined_ds: out of memory, as another start would be"
# What the templates have the master do at these lines. It matches a line without its level; anchored, a pattern meets
# neither the configuration, which is in the log of each task, nor what a trial prints.
LOG_POLICIES = tuple(
    {"name": name, "pattern": f"^{line.removeprefix(ERROR).split(',')[0]}", "action": "cancel_retries"}
    for name, line in (("No restart helps", NO_RESTART_HELPS), ("CUDA OOM", OUT_OF_MEMORY))
)


def on_cluster() -> bool:
    """Whether this process belongs to a trial on a cluster."""
    return os.environ.get("DET_TASK_TYPE") == "TRIAL"


def error_lines(error: BaseException) -> list[str]:
    """The lines that say why a task ends, one for each problem: key, value, reason and fix."""
    if isinstance(error, ConfigError):
        return [_line(ERROR, problem) for problem in error.problems]
    return lines_of(ERROR, str(error) or type(error).__name__)


def lines_of(level: str, text: str) -> list[str]:
    """A message as lines that each have their level; what is indented belongs to the line above it."""
    return [_line(level, each) for each in re.split(r"\n+(?=\S)", text.strip())]


def _line(level: str, what: Problem | str) -> str:
    text = ""
    for line in filter(None, map(str.strip, str(what).splitlines())):
        if text:
            text = f"{text.rstrip('.')}; " if line.startswith("fix: ") else f"{text} "
        text += line
    for said in (level, level.lower()):  # by those who print messages without a level as well
        text = text.removeprefix(said)
    return level + text
