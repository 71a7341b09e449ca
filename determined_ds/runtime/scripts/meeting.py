"""How the ranks of a script meet: by files that the launcher has made, not at ports of this machine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from determined import core, ipc

from determined_ds.protocol.handed_on import STORE

# Scripts and DeepSpeed look whether these are set; nothing listens there.
NOMINAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def meet_by_files() -> None:
    """From now on process groups and Determined's contexts of this process meet by files.

    Two runs on one machine do not disturb each other, and no port is open to others. Without the launcher's file, of
    a single rank or under another launcher, all is left as it is.
    """
    for name, value in NOMINAL.items():
        os.environ.setdefault(name, value)
    file = os.environ.get(STORE)
    if file is None:
        return
    numbers = count(1)

    def by_file(url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[Any]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(f"{file}-{next(numbers)}", size)
        store.set_timeout(timeout)
        yield store, rank, size

    # Source: ``rendezvous`` in torch 2.13's ``distributed/rendezvous.py``.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function has its name, too
    rendezvous._rendezvous_handlers["env"] = by_file
    mock.patch.object(core.DistributedContext, "_init_ipc", _init_ipc_of(Path(file).parent)).start()


def _init_ipc_of(folder: Path) -> Any:
    """``DistributedContext._init_ipc`` for ranks of one machine, by Unix sockets instead of fixed TCP ports.

    Source: determined 0.38.1's ``core/_distributed.py``.
    """
    numbers = count(1)

    def init_ipc(self: Any, force_tcp: bool) -> None:
        if self.size < 2:  # rank 0 alone makes one to report to a master
            return
        number = next(numbers)
        self.tempdir = None
        self._chief_zmq, self._worker_zmq = _pair(self, f"ipc://{folder}/{number}")
        self._local_chief_zmq, self._local_worker_zmq = _pair(self, f"ipc://{folder}/{number}-local")

    return init_ipc


def _pair(context: Any, name: str) -> tuple[Any, Any]:
    """The chief's server, or another rank's client; None for the other."""
    server: Any = None
    client: Any = None
    if context._is_chief:
        server = ipc.ZMQBroadcastServer(
            num_connections=context.size - 1, pub_url=f"{name}-pub", pull_url=f"{name}-pull"
        )
        server.safe_start()
    else:
        client = ipc.ZMQBroadcastClient(srv_pub_url=f"{name}-pub", srv_pull_url=f"{name}-pull")
        client.safe_start()
    return server, client
