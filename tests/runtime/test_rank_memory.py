"""The memory of ranks: of the one with most and of the one with least, in metrics that a web UI draws."""

from __future__ import annotations

import psutil
import pytest
import torch

from determined_ds.memory.units import GIB
from determined_ds.runtime.rank_memory import RankMemory, memory_metrics, rank_memory


def test_the_metrics_are_of_the_rank_with_most() -> None:
    ranks = [
        RankMemory(peak_bytes=2 * GIB, allocated_bytes=1_000_000_000, reserved_bytes=4_000_000_000),
        RankMemory(peak_bytes=3 * GIB, allocated_bytes=2_500_000_000, reserved_bytes=3_000_000_000),
    ]
    assert memory_metrics(ranks) == {
        "peak_memory_gib": 3.0,
        "peak_memory_gib_min": 2.0,
        "memory_allocated_gb": 2.5,
        "memory_reserved_gb": 4.0,
    }


def test_on_a_cpu_it_is_resident_memory() -> None:
    found = rank_memory(torch.device("cpu"))
    assert found.allocated_bytes == found.reserved_bytes <= found.peak_bytes
    assert found.allocated_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


def test_on_a_gpu_it_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"max_memory_allocated": 3, "memory_allocated": 1, "memory_reserved": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    assert rank_memory(torch.device("cuda", 0)) == RankMemory(
        peak_bytes=3, allocated_bytes=1, reserved_bytes=4
    )
