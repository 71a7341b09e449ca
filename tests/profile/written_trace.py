"""Traces written by hand, in the documented Chrome trace event format: times in microseconds."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAIN, OTHER = 100, 200  # threads
PARTS = {"data", "forward", "backward", "communication", "optimizer", "pipeline", "idle", "other"}

COMPUTE, NCCL = 7, 20  # streams

Raw = dict[str, Any]
_correlations = itertools.count(1)


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


def kernel(
    name: str, begin: float, end: float, *, launched: float, stream: int = COMPUTE, tid: int = MAIN
) -> list[Raw]:
    """A kernel and the call that launched it, on a thread of the host."""
    number = next(_correlations)
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return [
        event("cudaLaunchKernel", launched, launched + 1, cat="cuda_runtime", tid=tid, correlation=number),
        event(name, begin, end, cat=cat, tid=stream, correlation=number, stream=stream),
    ]


def nccl(name: str, begin: float, end: float, *, launched: float) -> list[Raw]:
    """A kernel of a collective."""
    return kernel(f"ncclDevKernel_{name}", begin, end, launched=launched, stream=NCCL)


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
