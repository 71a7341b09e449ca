"""The ranks of a run: their process group, and Determined's view of it."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from typing import Any

import torch
import torch.distributed as dist
from determined import core

from determined_ds.config.accelerator import Accelerator
from determined_ds.runtime.muon import compile_muon_when_called


def join_process_group(accelerator: Accelerator) -> core.DistributedContext:
    """Join the process group that the environment describes; a group of one where it describes none.

    Reads torchrun's variables (``RANK``, ``LOCAL_WORLD_SIZE`` ...) and the DeepSpeed launcher's
    (``LOCAL_SIZE``, ``CROSS_RANK``, ``CROSS_SIZE``).

    Args:
        accelerator: Gloo for cpu, NCCL for cuda.
    """
    os.environ["DS_ACCELERATOR"] = accelerator.name
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())

    import deepspeed

    _quiet_upstream()
    # A shared-memory all-reduce for CPU inference, which DeepSpeed would compile at every first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    compile_muon_when_called()
    if accelerator.name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return TorchDistributedContext()


def _quiet_upstream() -> None:
    """Silence what DeepSpeed and torch say of each other at every start; their errors stay."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("determined.common.storage.shared").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", message=r"c10d::broadcast_: an autograd kernel was not registered")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _env(*names: str, default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


class TorchDistributedContext(core.DistributedContext):
    """Determined's ``DistributedContext`` over torch's process group instead of sockets of its own.

    One transport instead of two: no fixed ports, so that two runs can share a machine, and a rank that dies
    is noticed by the ranks that wait for it. Objects travel over gloo whatever the training backend.
    """

    def __init__(self) -> None:
        size = dist.get_world_size()
        local_size = _env("LOCAL_SIZE", "LOCAL_WORLD_SIZE", default=size)
        super().__init__(
            rank=dist.get_rank(),
            size=size,
            local_rank=_env("LOCAL_RANK", default=0),
            local_size=local_size,
            cross_rank=_env("CROSS_RANK", "GROUP_RANK", default=0),
            cross_size=_env("CROSS_SIZE", "GROUP_WORLD_SIZE", default=max(1, size // local_size)),
            chief_ip=os.environ.get("DET_CHIEF_IP") or os.environ.get("MASTER_ADDR"),
        )

    def _init_ipc(self, force_tcp: bool) -> None:
        self._group: Any = None
        self._local_group: Any = None
        if self.size > 1:
            self._group = dist.new_group(backend="gloo")
            machines = self.allgather((self.cross_rank, self.rank))
            for machine in sorted({cross for cross, _ in machines}):  # every rank creates every group
                group = dist.new_group([r for cross, r in machines if cross == machine], backend="gloo")
                if machine == self.cross_rank:
                    self._local_group = group

    def close(self) -> None:
        self._closed = True

    def _allgather(self, stuff: Any, group: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, stuff, group=group)
        return gathered

    def allgather(self, stuff: Any) -> list[Any]:
        return [stuff] if self.size < 2 else self._allgather(stuff, self._group)

    def allgather_local(self, stuff: Any) -> list[Any]:
        return [stuff] if self.local_size < 2 else self._allgather(stuff, self._local_group)

    def gather(self, stuff: Any) -> list[Any] | None:
        gathered = self.allgather(stuff)
        return gathered if self.rank == 0 else None

    def gather_local(self, stuff: Any) -> list[Any] | None:
        gathered = self.allgather_local(stuff)
        return gathered if self.local_rank == 0 else None

    def broadcast(self, stuff: Any) -> Any:
        if self.size < 2:
            return stuff
        box = [stuff]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def broadcast_local(self, stuff: Any = None) -> Any:
        return stuff if self.local_size < 2 else self.allgather_local(stuff)[0]
