"""``logs/warnings-rank<R>.jsonl``: what the ranks of a run have warned of, for a later look.

A line says how often a warning came since the line before it that has its text; a rank writes at the first time, at
the second, the fourth, the eighth and so on, and what is left at its end. So the file stays small whatever warns.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from determined_ds.rundir.metrics_file import append_record
from determined_ds.rundir.run_dir import RunDir

LONGEST = 2000  # characters of a message that are kept


@dataclass(frozen=True, kw_only=True)
class KeptWarning:
    """A warning, however often it came and from however many ranks.

    Args:
        message: As it came first.
        source: The logger, or the category of a Python warning with its place.
        level: ``WARNING``, ``ERROR`` or ``CRITICAL``.
        count: How often it came, at least: what a killed rank had not written yet is not in it.
        ranks: Those it came from.
        time: Of the first one, seconds since the epoch.
        last_time: Of the last one that was written.
        steps_completed: Batches that had been trained when it came first; 0 before the first one of a process.
    """

    message: str
    source: str = ""
    level: str = "WARNING"
    count: int = 1
    ranks: tuple[int, ...] = ()
    time: float = 0.0
    last_time: float = 0.0
    steps_completed: int = 0


def kind_of(source: str, message: str) -> tuple[str, str]:
    """What two warnings have in common that are counted together: they differ in numbers at most."""
    return re.sub(r"\d+", "0", source), re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "0", message)


def append_warning(folder: Path, warning: KeptWarning, rank: int) -> None:
    """Append a line about a warning; where it cannot be written, training matters more.

    Args:
        folder: ``logs`` of a run directory.
        warning: It; its ``count`` is since the line before.
        rank: That has warned.
    """
    record = {
        "time": round(warning.last_time, 3),
        "rank": rank,
        "steps_completed": warning.steps_completed,
        "level": warning.level,
        "source": warning.source,
        "message": warning.message[:LONGEST],
        "count": warning.count,
    }
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        append_record(folder / f"warnings-rank{rank}.jsonl", record)


def read_warnings(run_dir: RunDir) -> tuple[KeptWarning, ...]:
    """The warnings of all ranks, in the order in which they came first; lines that are torn are left out."""
    return counted(_lines(run_dir.logs))


def counted(warnings: Iterable[KeptWarning]) -> tuple[KeptWarning, ...]:
    """Warnings with those of one kind counted together, in the order in which they came first."""
    found: dict[tuple[str, str], KeptWarning] = {}
    for warning in warnings:
        kind = kind_of(warning.source, warning.message)
        known = found.get(kind)
        found[kind] = warning if known is None else _together(known, warning)
    return tuple(sorted(found.values(), key=lambda each: each.time))


def _together(known: KeptWarning, warning: KeptWarning) -> KeptWarning:
    return replace(
        min(known, warning, key=lambda each: each.time),
        count=known.count + warning.count,
        ranks=tuple(sorted({*known.ranks, *warning.ranks})),
        last_time=max(known.last_time, warning.last_time),
    )


def _lines(folder: Path) -> Iterator[KeptWarning]:
    for path in folder.glob("warnings-rank*.jsonl"):
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    yield _of_line(json.loads(line))


def _of_line(line: Mapping[str, Any]) -> KeptWarning:
    return KeptWarning(
        message=str(line["message"]),
        source=str(line["source"]),
        level=str(line["level"]),
        count=int(line["count"]),
        ranks=(int(line["rank"]),),
        time=float(line["time"]),
        last_time=float(line["time"]),
        steps_completed=int(line["steps_completed"]),
    )
