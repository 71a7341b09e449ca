"""Traces written by hand, in the documented Chrome trace event format: times in microseconds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAIN, OTHER = 100, 200  # threads

Raw = dict[str, Any]


def event(
    name: str, begin: float, end: float, *, cat: str = "cpu_op", tid: int | str = MAIN, **args: Any
) -> Raw:
    """An event with a duration."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def mark(name: str, begin: float, end: float) -> Raw:
    """A range of ours, by its name without the prefix."""
    return event(f"determined_ds.{name}", begin, end, cat="user_annotation")


def written(
    folder: Path,
    events: Sequence[Raw],
    steps: Sequence[tuple[float, float]],
    *,
    rank: int = 0,
    record: Mapping[str, Any] | None = None,
    plain: bool = False,
) -> Path:
    """A trace whose steps begin and end at these times, by the clock too."""
    ranges = [mark(f"step#{index}", *span) for index, span in enumerate(steps)]
    captured = [
        {"batch": 11 + index, "seconds": (end - begin) / 1e6} for index, (begin, end) in enumerate(steps)
    ]
    content = {
        "schemaVersion": 1,
        "traceEvents": [*ranges, *events],
        "determined_ds": {"rank": rank, "ranks": 1, "steps": captured, **(record or {})},
    }
    text = json.dumps(content).encode()
    path = folder / f"rank{rank}.json{'' if plain else '.gz'}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if plain else gzip.compress(text))
    return path
