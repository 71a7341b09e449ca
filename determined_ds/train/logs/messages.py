"""What a rank and the process of its tools say to each other: JSON, one message a line. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Of a rank.
BEGIN, REPORT, END = "begin", "report", "end"
# Of the process: something for people to read, and that a tool has ended.
NOTE, WARNING, ENDED = "note", "warning", "ended"
COMPLETED, STOPPED, FAILED = "completed", "stopped", "failed"


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """The run that tools show.

    Args:
        key: 32 hexadecimal digits that stay the same when the run is resumed or restarted.
        name: What people call it.
        project: Of the experiment: where a tool puts it that is given no project.
        group: What it belongs to, e.g. a search; "" for nothing.
        tags: Of the experiment.
        notes: Of the experiment.
        continues: The batch that it continues from, where its tools have seen it before; None where it is new.
        config: The configuration, with where values came from, and the surroundings.
        folder: Where tools may write.
        kept_in: Where people find what is written there: on a cluster, where it is uploaded to.
        pid: The chief's process, whose use of the machine is the run's.
        tools: Tool -> options.
    """

    key: str
    name: str
    project: str
    group: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    continues: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "."
    kept_in: str = ""
    pid: int = 0
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def later(self, path: str) -> str:
        """Where people find a file, or a folder, that a tool writes."""
        inside = self.kept_in and Path(path).is_relative_to(self.folder)
        return f"{self.kept_in}/{Path(path).relative_to(self.folder)}".removesuffix("/.") if inside else path


@dataclass(frozen=True)
class NumbersAt:
    """Metrics of one moment.

    Args:
        step: Batches trained.
        time: Seconds since the epoch.
        metrics: Whole name -> number, which may be NaN or infinite.
    """

    step: int
    time: float
    metrics: Mapping[str, float]


def line_of(kind: str, content: Any) -> bytes:
    """A message as a line."""
    if isinstance(content, (ShownRun, NumbersAt)):
        content = asdict(content)
    return (json.dumps([kind, content], default=str) + "\n").encode()


def message_in(line: bytes) -> tuple[str, Any]:
    """The kind of a message, and what it says."""
    kind, content = json.loads(line)
    if kind == BEGIN:
        return kind, ShownRun(**{**content, "tags": tuple(content["tags"])})
    return kind, NumbersAt(**content) if kind == REPORT else content
