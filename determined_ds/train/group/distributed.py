"""The ranks of a run: their process group, and Determined's view of it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from determined import core
from torch.distributed import distributed_c10d

from determined_ds.config.layout import Accelerator
from determined_ds.rundir.handed_on import LAUNCHED_BY, STORE, hang_timeout_s
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.group.addresses import take_interfaces, take_own_port
from determined_ds.train.group.collectives import (
    allgather_objects,
    broadcast_object,
    gather_objects,
    key_in,
    opened,
    sealed,
    store,
)
from determined_ds.train.group.peers import is_on_network, watch_peers
from determined_ds.train.upstream import load_deepspeed

# How long the other ranks wait for an upload, a deletion, a master that does not answer, or the user's own work.
PATIENCE = timedelta(hours=6)
FOR_EVER = timedelta(days=7)
# Determined's: the trial initializes the process group itself.
MANUAL = "DET_MANUAL_INIT_DISTRIBUTED"


def join_process_group(accelerator: Accelerator) -> core.DistributedContext:
    """Join the process group that the environment describes; a group of one where it describes none.

    Reads torchrun's variables (``RANK``, ``LOCAL_WORLD_SIZE`` ...) and the DeepSpeed launcher's (``LOCAL_SIZE``,
    ``CROSS_RANK``, ``CROSS_SIZE``). The ranks of ``det-ds run`` meet by a file, and a single rank needs no meeting:
    neither opens a port to other machines. Under another launcher they meet as that one says; on a cluster, at the
    allocation's own port.

    With ``DET_MANUAL_INIT_DISTRIBUTED`` in the environment it is left to the trial to initialize the process group.

    Args:
        accelerator: Gloo for cpu, NCCL for cuda.
    """
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    load_deepspeed(accelerator.name)

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    file = os.environ.get(STORE)
    if os.environ.get(MANUAL) and not dist.is_initialized():
        return LateDistributedContext(rank, size, file)
    if size == 1 or file or (LAUNCHED_BY in os.environ and os.environ["GROUP_WORLD_SIZE"] == "1"):
        _stay_on_this_machine()
    else:
        take_own_port()
        take_interfaces()
    backend = get_accelerator().communication_backend_name()
    if size == 1 and not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and not dist.is_initialized():
        _join_again(backend, rank, size)
    deepspeed.init_distributed(
        auto_mpi_discovery=False,
        verbose=False,
        init_method=f"file://{file}" if file else None,
        rank=rank,
        world_size=size,
    )
    _be_patient()
    distributed = TorchDistributedContext()
    _watch(distributed)
    return distributed


def _watch(distributed: core.DistributedContext) -> None:
    timeout_s = hang_timeout_s()
    HEART.begin(timeout_s)
    if distributed.size > 1 and timeout_s and is_on_network(store()):
        watch_peers(distributed, store(), timeout_s)


def _join_again(backend: str, rank: int, size: int) -> None:
    """Join after a restart by torchrun, whose store still has the addresses of the previous ranks.

    Source: ``next_rendezvous`` in torch 2.13's ``elastic/rendezvous/dynamic_rendezvous.py`` and
    ``static_tcp_rendezvous.py`` keeps the store, and ``_create_c10d_store`` expects a new one.
    """
    old, _, _ = next(dist.rendezvous("env://", rank, size))  # type: ignore[no-untyped-call]
    attempt = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", old)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)


def _be_patient() -> None:
    """Once all ranks are there, let them wait for one another as long as any of them may be busy.

    In all process groups, including those that DeepSpeed makes without a timeout: torch's defaults are 10 minutes for
    NCCL and 30 for gloo. A hang ends far sooner, by the watch over the ranks (``launch/hang.py``, ``peers.py``).
    ``DEEPSPEED_TIMEOUT`` in the environment sets another time.

    Source: ``TorchBackend.new_group`` in deepspeed 0.19.8's ``comm/torch.py``; ``_get_default_timeout`` and
    ``_set_pg_timeout`` in torch 2.13's ``distributed/distributed_c10d.py``.
    """
    if "DEEPSPEED_TIMEOUT" in os.environ:
        from deepspeed.constants import default_pg_timeout as timeout
    else:
        timeout = PATIENCE if hang_timeout_s() else FOR_EVER
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    distributed_c10d._set_pg_timeout(timeout)
    store().set_timeout(timeout)


def _stay_on_this_machine() -> None:
    """Have gloo and NCCL listen on the loopback interface, unless the user names another."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault(
            "NCCL_SOCKET_IFNAME", f"={loopback}"
        )  # the exact name; otherwise it is a prefix


def _env(*names: str, default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


class TorchDistributedContext(core.DistributedContext):
    """Determined's ``DistributedContext`` over torch's process group instead of separate sockets.

    With one transport there are no fixed ports, so two runs can share a machine, and ranks that wait for a dead rank
    notice it. Objects travel over gloo for every training backend.
    """

    def __init__(self, rank: int | None = None, size: int | None = None) -> None:
        size = dist.get_world_size() if size is None else size
        local_size = _env("LOCAL_SIZE", "LOCAL_WORLD_SIZE", default=size)
        super().__init__(
            rank=dist.get_rank() if rank is None else rank,
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
            members = [rank for machine, rank in machines if machine == self.cross_rank]
            self._local_group = dist.new_group(members, backend="gloo", use_local_synchronization=True)

    def close(self) -> None:
        self._closed = True

    def allgather(self, stuff: Any) -> list[Any]:
        return [stuff] if self.size < 2 else allgather_objects(stuff, group=self._group)

    def allgather_local(self, stuff: Any) -> list[Any]:
        return [stuff] if self.local_size < 2 else allgather_objects(stuff, group=self._local_group)

    def gather(self, stuff: Any) -> list[Any] | None:
        return [stuff] if self.size < 2 else gather_objects(stuff, group=self._group)

    def gather_local(self, stuff: Any) -> list[Any] | None:
        gathered = self.allgather_local(stuff)
        return gathered if self.local_rank == 0 else None

    def broadcast(self, stuff: Any) -> Any:
        return stuff if self.size < 2 else broadcast_object(stuff, group=self._group)

    def broadcast_local(self, stuff: Any = None) -> Any:
        return stuff if self.local_size < 2 else self.allgather_local(stuff)[0]


class LateDistributedContext(TorchDistributedContext):
    """The same for a trial that initializes the process group itself: until then, objects travel by a store.

    Args:
        rank: Of this process.
        size: Ranks in all.
        file: By which the ranks of ``det-ds run`` meet; None elsewhere.
    """

    def __init__(self, rank: int, size: int, file: str | None) -> None:
        self._file = file
        self._count = 0
        self._key = b""
        super().__init__(rank, size)

    def _init_ipc(self, force_tcp: bool) -> None:
        self._group, self._local_group, self._is_late = None, None, True
        if self.size == 1:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(_free_port()))
            return
        url = f"file://{self._file}" if self._file else "env://"
        met, _, _ = next(dist.rendezvous(url, self.rank, self.size))  # type: ignore[no-untyped-call]
        self._store = dist.PrefixStore("determined_ds/late", met)
        if "MASTER_PORT" not in os.environ:  # the trial will meet there
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            os.environ["MASTER_PORT"] = str(self.allgather(_free_port())[0])

    def _join(self) -> bool:
        """Whether the trial has initialized the group; a collective the first time that it has."""
        if self._is_late and dist.is_initialized():
            self._is_late = False
            _be_patient()
            super()._init_ipc(force_tcp=False)
            _watch(self)
        return not self._is_late

    def _exchange(self, stuff: Any) -> list[Any]:
        self._count += 1
        self._key = self._key or key_in(self._store)
        own: Any = sealed(stuff, self._key)  # torch's stub takes strings alone
        self._store.set(f"{self._count}/{self.rank}", own)
        return [opened(self._store.get(f"{self._count}/{rank}"), self._key) for rank in range(self.size)]

    def allgather(self, stuff: Any) -> list[Any]:
        return super().allgather(stuff) if self.size < 2 or self._join() else self._exchange(stuff)

    def allgather_local(self, stuff: Any) -> list[Any]:
        if self.size < 2 or self._join():
            return super().allgather_local(stuff)
        machines = self._exchange((self.cross_rank, stuff))
        return [own for machine, own in machines if machine == self.cross_rank]

    def gather(self, stuff: Any) -> list[Any] | None:
        if self.size < 2 or self._join():
            return super().gather(stuff)
        gathered = self._exchange(stuff)
        return gathered if self.rank == 0 else None

    def broadcast(self, stuff: Any) -> Any:
        return super().broadcast(stuff) if self.size < 2 or self._join() else self._exchange(stuff)[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
