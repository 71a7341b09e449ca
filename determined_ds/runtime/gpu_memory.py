"""What the GPUs of this machine hold, as far as this process can tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class GpuMemoryStats:
    """Memory of one GPU, in bytes.

    Args:
        device: Its index, from 0.
        name: Of the model.
        allocated_bytes: In tensors of this process.
        peak_allocated_bytes: The most that was in tensors of this process since its start, or since
            ``torch.cuda.reset_peak_memory_stats``.
        reserved_bytes: Held by this process's allocator, in tensors or not.
        free_bytes: That no process holds.
        total_bytes: Of the device.
    """

    device: int
    name: str
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


def get_gpu_memory_stats() -> list[GpuMemoryStats]:
    """The memory of every GPU that this process sees; an empty list where there is none.

    Source: ``torch.cuda.memory_allocated``, ``memory_reserved`` and ``mem_get_info``.
    """
    stats = []
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        stats.append(
            GpuMemoryStats(
                device=device,
                name=torch.cuda.get_device_name(device),
                allocated_bytes=torch.cuda.memory_allocated(device),
                peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
                reserved_bytes=torch.cuda.memory_reserved(device),
                free_bytes=free,
                total_bytes=total,
            )
        )
    return stats
