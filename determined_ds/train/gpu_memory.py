"""The memory of this machine's GPUs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.units import MIB


@dataclass(frozen=True, kw_only=True)
class GpuMemoryStats:
    """Memory of one GPU, in bytes.

    Args:
        device: Its index, from 0.
        name: Of the model.
        allocated_bytes: In tensors of this process.
        peak_allocated_bytes: The most in tensors of this process since its start, or since
            ``torch.cuda.reset_peak_memory_stats``.
        reserved_bytes: Held by this process's allocator, in tensors or not.
        free_bytes: Held by no process.
        total_bytes: Of the device.
    """

    device: int
    name: str
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int


def get_gpu_memory_stats(device: int | str | torch.device | None = None) -> list[GpuMemoryStats]:
    """The memory of every GPU that this process sees, or of one; an empty list without one.

    Asking CUDA for free memory creates a context of hundreds of megabytes on the GPU, so ``nvidia-smi`` is asked. For a
    GPU that it does not list (ROCm, a part of one by MIG), CUDA is asked if this process computes on it already; else
    it is left out.

    Args:
        device: One alone: its index, a name as ``"cuda:1"``, or a ``torch.device``; ``"cuda"`` is the current one.
            None: all of them.

    Returns:
        One entry a GPU, in the order of their indices.

    Raises:
        ConfigError: this process sees no such GPU.

    Source: ``torch.cuda.memory_allocated``, ``memory_reserved`` and ``mem_get_info``.
    """
    wanted = range(torch.cuda.device_count()) if device is None else (_index_of(device),)
    driver = _by_driver() if wanted else {}
    found = (_stats_of(index, driver) for index in wanted)
    return [stats for stats in found if stats is not None]


def _index_of(device: int | str | torch.device) -> int:
    """The index of a GPU that is there."""
    count = torch.cuda.device_count()
    try:
        given = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        message = "not a valid device"
        raise _refused(device, message, count) from error
    if given.type != "cuda":
        raise _refused(device, f"a {given.type} device: this function describes GPUs", count)
    if not count:
        raise _refused(device, "this process sees no GPU", count)
    index = torch.cuda.current_device() if given.index is None else given.index
    if index >= count:
        raise _refused(device, f"this process sees {count} GPU{'s' if count > 1 else ''}", count)
    return index


def _refused(device: object, message: str, count: int) -> ConfigError:
    names = "0 or cuda:0" if count == 1 else f"an index from 0 to {count - 1}, or a name as cuda:0"
    fix = f"give {names}" if count else "leave device out: the list is empty without a GPU"
    shown = str(device) if isinstance(device, torch.device) else device
    return ConfigError(Problem(key="device", value=shown, message=message, fix=fix, code="device"))


def _stats_of(device: int, driver: dict[str, tuple[int, int]]) -> GpuMemoryStats | None:
    """Of one GPU; None where neither the driver nor CUDA can be asked."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    free_and_total = driver.get(f"GPU-{uuid}") or _by_cuda(device)
    if free_and_total is None:
        return None
    free, total = free_and_total
    return GpuMemoryStats(
        device=device,
        name=torch.cuda.get_device_name(device),
        allocated_bytes=torch.cuda.memory_allocated(device),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        free_bytes=free,
        total_bytes=total,
    )


def _by_driver() -> dict[str, tuple[int, int]]:
    """Uuid -> free and total bytes of this machine's GPUs, as far as the driver lists them."""
    ask = ["nvidia-smi", "--query-gpu=uuid,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(
            ask, capture_output=True, text=True, timeout=10, check=True
        ).stdout.splitlines()
        gpus = [line.split(", ") for line in lines]
        return {uuid: (int(free_mib) * MIB, int(total_mib) * MIB) for uuid, free_mib, total_mib in gpus}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def _by_cuda(device: int) -> tuple[int, int] | None:
    """Free and total bytes by CUDA; None where this process does not use the GPU."""
    if device != torch.cuda.current_device() and not torch.cuda.memory_reserved(device):
        return None
    return torch.cuda.mem_get_info(device)
