"""The ranks of a run: their process group, and Determined's view of it."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from determined import core
from torch.distributed import distributed_c10d

from determined_ds.config.accelerator import Accelerator
from determined_ds.protocol.handed_on import LAUNCHED_BY, STORE, hang_timeout_s
from determined_ds.runtime.group.addresses import take_interfaces, take_own_port
from determined_ds.runtime.group.objects import allgather_objects, broadcast_object
from determined_ds.runtime.group.peers import is_on_network, watch_peers
from determined_ds.runtime.muon import compile_muon_when_called

# What may rightly take long while the other ranks wait: an upload, a deletion, a master that is away, a user's work.
PATIENCE = timedelta(hours=6)
FOR_EVER = timedelta(days=7)


def join_process_group(accelerator: Accelerator) -> core.DistributedContext:
    """Join the process group that the environment describes; a group of one where it describes none.

    Reads torchrun's variables (``RANK``, ``LOCAL_WORLD_SIZE`` ...) and the DeepSpeed launcher's
    (``LOCAL_SIZE``, ``CROSS_RANK``, ``CROSS_SIZE``). The ranks of ``det-ds run`` meet by a file, a rank alone meets
    nobody, and neither opens a port to other machines; under another launcher they meet as that one says, on a
    cluster at the allocation's own port.

    Args:
        accelerator: Gloo for cpu, NCCL for cuda.
    """
    os.environ["DS_ACCELERATOR"] = accelerator.name
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    _quiet_upstream()
    _have_deepspeed_compute_on(accelerator.name)
    # A shared-memory all-reduce for CPU inference, which DeepSpeed would compile at every first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    compile_muon_when_called()
    if accelerator.name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = os.environ.get(STORE)
    if size == 1 or store or (LAUNCHED_BY in os.environ and os.environ["GROUP_WORLD_SIZE"] == "1"):
        _stay_on_this_machine()
    else:
        take_own_port()
        take_interfaces()
    if size == 1 and not dist.is_initialized():
        backend = get_accelerator().communication_backend_name()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and not dist.is_initialized():
        _join_again(rank, size)
    deepspeed.init_distributed(
        auto_mpi_discovery=False,
        verbose=False,
        init_method=f"file://{store}" if store else None,
        rank=rank,
        world_size=size,
    )
    _be_patient()
    distributed = TorchDistributedContext()
    timeout_s = hang_timeout_s()
    if size > 1 and timeout_s and is_on_network(_store()):
        watch_peers(distributed, _store(), timeout_s)
    return distributed


def _join_again(rank: int, size: int) -> None:
    """Join after a restart of torchrun's, whose store still has the addresses of the ranks before.

    Source: ``next_rendezvous`` in torch 2.13's ``elastic/rendezvous/dynamic_rendezvous.py`` and
    ``static_tcp_rendezvous.py`` keeps the store, and ``_create_c10d_store`` counts on another.
    """
    from deepspeed.accelerator import get_accelerator

    store, _, _ = next(dist.rendezvous("env://", rank, size))  # type: ignore[no-untyped-call]
    attempt = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = get_accelerator().communication_backend_name()
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)


def _have_deepspeed_compute_on(name: str) -> None:
    """Have DeepSpeed take this accelerator, where it was imported before anybody said so.

    It takes one for good when it is imported: on a machine with GPUs ``cuda``, whatever ``open_context`` says later.

    Args:
        name: ``cpu`` or ``cuda``.

    Source: ``get_accelerator`` in deepspeed 0.19.8's ``accelerator/real_accelerator.py``.
    """
    from deepspeed.accelerator import cpu_accelerator, cuda_accelerator, get_accelerator, set_accelerator

    kinds = {"cpu": cpu_accelerator.CPU_Accelerator, "cuda": cuda_accelerator.CUDA_Accelerator}
    if get_accelerator().device_name() != name:
        set_accelerator(kinds[name]())


def _be_patient() -> None:
    """Once all ranks are there, have them wait for one another as long as anything may rightly take.

    In all process groups, also those that DeepSpeed makes, which says no timeout: torch would give them 10 minutes of
    NCCL and 30 of gloo. It is the watch over the ranks that ends what hangs, by far sooner (``hang.py``, ``peers.py``).
    A ``DEEPSPEED_TIMEOUT`` in the environment says another time.

    Source: ``TorchBackend.new_group`` in deepspeed 0.19.8's ``comm/torch.py``; ``_get_default_timeout`` and
    ``_set_pg_timeout`` in torch 2.13's ``distributed/distributed_c10d.py``.
    """
    if "DEEPSPEED_TIMEOUT" in os.environ:
        from deepspeed.constants import default_pg_timeout as timeout
    else:
        timeout = PATIENCE if hang_timeout_s() else FOR_EVER
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    distributed_c10d._set_pg_timeout(timeout)
    _store().set_timeout(timeout)


def _store() -> Any:
    return distributed_c10d._get_default_store()


def _stay_on_this_machine() -> None:
    """Have gloo and NCCL listen on the loopback interface, unless the user names another."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # just this one, and none that begins so


# A pipeline's engine and a schedule's log their first step so, at every start.
AT_EVERY_START = ("Attempting to get learning rate from scheduler before it has started",)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(AT_EVERY_START)


def _quiet_upstream() -> None:
    """Silence what DeepSpeed and torch say of each other at every start; other warnings and errors stay.

    Under ``debug`` all of it is said.
    """
    deepspeed_logger = logging.getLogger("DeepSpeed")
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        deepspeed_logger.setLevel(logging.DEBUG)
        return
    if _is_news not in deepspeed_logger.filters:
        deepspeed_logger.addFilter(_is_news)
    logging.getLogger("determined.common.storage.shared").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", message=r"c10d::broadcast_: an autograd kernel was not registered")


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
            # By its members alone: for a group of others, a rank that has bound its GPU would take part in a split of
            # NCCL's communicator (``perform_nocolor_split`` in torch), which those of a gloo group do not make.
            self._local_group = dist.new_group(
                [rank for machine, rank in machines if machine == self.cross_rank],
                backend="gloo",
                use_local_synchronization=True,
            )

    def close(self) -> None:
        self._closed = True

    def allgather(self, stuff: Any) -> list[Any]:
        return [stuff] if self.size < 2 else allgather_objects(stuff, group=self._group)

    def allgather_local(self, stuff: Any) -> list[Any]:
        return [stuff] if self.local_size < 2 else allgather_objects(stuff, group=self._local_group)

    def gather(self, stuff: Any) -> list[Any] | None:
        gathered = self.allgather(stuff)
        return gathered if self.rank == 0 else None

    def gather_local(self, stuff: Any) -> list[Any] | None:
        gathered = self.allgather_local(stuff)
        return gathered if self.local_rank == 0 else None

    def broadcast(self, stuff: Any) -> Any:
        return stuff if self.size < 2 else broadcast_object(stuff, group=self._group)

    def broadcast_local(self, stuff: Any = None) -> Any:
        return stuff if self.local_size < 2 else self.allgather_local(stuff)[0]
