"""The memory of ranks: what each holds now and has held at most, and the metrics that say it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from determined_ds.memory.units import GIB

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank, in bytes. On a CPU all of them are resident memory of its process.

    Args:
        peak_bytes: The most that it has held: in tensors on its GPU.
        allocated_bytes: Held now, in tensors on its GPU.
        reserved_bytes: Held now by torch's allocator on its GPU, in tensors or not.
    """

    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int


def rank_memory(device: torch.device) -> RankMemory:
    """The memory of this rank.

    Args:
        device: What it computes on.
    """
    if device.type == "cuda":
        return RankMemory(
            peak_bytes=int(torch.cuda.max_memory_allocated(device)),
            allocated_bytes=int(torch.cuda.memory_allocated(device)),
            reserved_bytes=int(torch.cuda.memory_reserved(device)),
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident = int(psutil.Process().memory_info().rss)
    return RankMemory(
        peak_bytes=max(resident, peak if sys.platform == "darwin" else peak * 1024),
        allocated_bytes=resident,
        reserved_bytes=resident,
    )


def memory_metrics(ranks: Sequence[RankMemory]) -> dict[str, float]:
    """The metrics. Numbers and no lists, which the web UI does not draw: of the ranks with most and least.

    Args:
        ranks: All of them; at least one.
    """
    peaks = [each.peak_bytes for each in ranks]
    return {
        "peak_memory_gib": max(peaks) / GIB,
        "peak_memory_gib_min": min(peaks) / GIB,
        "memory_allocated_gb": max(each.allocated_bytes for each in ranks) / GB,
        "memory_reserved_gb": max(each.reserved_bytes for each in ranks) / GB,
    }
