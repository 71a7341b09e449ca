"""The memory of GPUs is told without taking any of it, by a stand-in of ``torch.cuda`` and of ``nvidia-smi``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from determined_ds import get_gpu_memory_stats

CUDA_FREE, CUDA_TOTAL, MIB = 11, 22, 2**20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Three GPUs, of which this process computes on the second; those that CUDA is asked about, each a context."""
    asked: list[int] = []

    def mem_get_info(device: int) -> tuple[int, int]:
        asked.append(device)
        return CUDA_FREE, CUDA_TOTAL

    stand_ins = {
        "device_count": lambda: 3,
        "current_device": lambda: 1,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"uuid{device}"),
        "get_device_name": lambda device: f"card {device}",
        "memory_allocated": lambda device: 10 * device,
        "max_memory_allocated": lambda device: 20 * device,
        "memory_reserved": lambda device: 30 if device == 1 else 0,
        "mem_get_info": mem_get_info,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setenv("PATH", str(tmp_path))
    return asked


def driver(folder: Path, said: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{said}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_the_driver_is_asked_and_no_context_made(asked: list[int], tmp_path: Path) -> None:
    # In the order of the driver, which need not be that of this process.
    driver(tmp_path, "printf 'GPU-uuid2, 3, 30\\nGPU-uuid0, 1, 10\\nGPU-other, 9, 90\\nGPU-uuid1, 2, 20\\n'")
    found = get_gpu_memory_stats()
    assert [(gpu.device, gpu.free_bytes, gpu.total_bytes) for gpu in found] == [
        (device, (device + 1) * MIB, (device + 1) * 10 * MIB) for device in range(3)
    ]
    assert (found[2].name, found[2].allocated_bytes, found[2].peak_allocated_bytes) == ("card 2", 20, 40)
    assert asked == []


@pytest.mark.parametrize("said", ["exit 9", "echo 'GPU-uuid1, [N/A], [N/A]'"])
def test_without_it_cuda_is_asked_about_the_gpu_in_use_alone(
    asked: list[int], tmp_path: Path, said: str
) -> None:
    driver(tmp_path, said)
    [found] = get_gpu_memory_stats()
    assert (found.device, found.free_bytes, found.total_bytes) == (1, CUDA_FREE, CUDA_TOTAL)
    assert asked == [1]
