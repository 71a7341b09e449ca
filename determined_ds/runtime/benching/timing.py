"""The ranks of a measurement: their device, and what they have to agree on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from determined_ds.devices import detect_accelerator
from determined_ds.protocol.heartbeat import HEART
from determined_ds.runtime.group.distributed import join_process_group


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that measure together.

    Args:
        distributed: Determined's view of them.
        device: What this rank computes on.
        until: When the time is up, by ``time.monotonic`` of this rank; rank 0's decides.
        say: Shows a line of progress; nothing but on rank 0.
        notes: What could not be measured, or not as it was asked.
    """

    distributed: Any
    device: torch.device
    until: float
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return int(self.distributed.rank) == 0

    @property
    def machines(self) -> int:
        """On which the ranks are."""
        return int(self.distributed.cross_size)

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""
        return str(dist.get_backend())

    def left_s(self) -> float:
        """Seconds that are left; the same on all ranks, which takes an exchange."""
        return float(self.distributed.broadcast(self.until - time.monotonic()))

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, value by value; an exchange."""
        HEART.beat()
        return [max(each) for each in zip(*self.distributed.allgather(list(values)), strict=True)]

    def synchronize(self) -> None:
        """Wait until this rank's device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds of an action that all ranks begin together, on this rank."""
        dist.barrier()
        self.synchronize()
        started = time.perf_counter()
        action()
        self.synchronize()
        return time.perf_counter() - started


def join(accelerator: str, seconds: float, say: Callable[[str], None]) -> Group:
    """Meet the other ranks.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        seconds: How long it may take from now on.
        say: As of :class:`Group`.
    """
    distributed = join_process_group(detect_accelerator(accelerator))
    device = torch.device("cpu")
    if accelerator == "cuda":
        device = torch.device("cuda", distributed.local_rank)
        torch.cuda.set_device(device)
    until = time.monotonic() + seconds
    chief = distributed.rank == 0
    return Group(distributed=distributed, device=device, until=until, say=say if chief else lambda _: None)
