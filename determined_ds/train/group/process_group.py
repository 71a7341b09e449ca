"""The ranks of a run: DeepSpeed in each, their process group, Determined's view of it, and what they exchange."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import re
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import determined as det
import torch
import torch.distributed as dist
from determined import core
from torch.distributed import distributed_c10d

from determined_ds.cluster.log import lines_of
from determined_ds.config.layout import Accelerator
from determined_ds.devices import GPU_NODES, detect_accelerator
from determined_ds.errors import ChiefFailed, DeterminedDSError
from determined_ds.rundir.handed_on import LAUNCHED_BY, STORE, hang_timeout_s
from determined_ds.rundir.signals import HEART
from determined_ds.train.group.addresses import take_addresses
from determined_ds.train.group.watch import ENDS_WITHIN_S, watch_joined
from determined_ds.train.rank import ending_of

T = TypeVar("T")
# How long ranks wait for one that is busy with an upload, a deletion, a master that does not answer, or the user's own
# work. The watch ends a hang far sooner, unless the user wants none to be ended.
PATIENCE = timedelta(days=7)


def _chosen_at_call(function: Any, takes: Callable[[], bool], make: Callable[[], Any]) -> Any:
    """A function that calls the given one where that ``takes`` the call, else what is made once."""
    made = functools.cache(make)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if takes() else made())(*args, **kwargs)

    return call


class _CompilerLater(types.ModuleType):
    """``torch._dynamo``, until something is compiled; until then there is nothing to keep from being compiled.

    Torch loads its compiler, which takes longer than DeepSpeed, for three functions: at the first call of anything that
    is not to be compiled, such as an optimizer's ``__init__``, at an optimizer's first step, and for a process group.
    Source: ``_disable_dynamo`` in torch 2.13's ``torch/_compile.py``, ``_use_grad`` in ``torch/optim/optimizer.py``,
    ``init_process_group``.
    """

    def __init__(self) -> None:
        super().__init__("torch._dynamo")
        self.__spec__ = importlib.util.find_spec(self.__name__)
        self.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)

    def graph_break(self, *_: Any) -> None: ...

    def disable(self, function: Any = None, recursive: bool = True, **how: Any) -> Any:
        if function is None:
            return functools.partial(self.disable, recursive=recursive, **how)
        disabled = lambda: torch._dynamo.disable(function, recursive, **how)  # noqa: E731
        return _chosen_at_call(function, lambda: sys.modules.get(self.__name__) is self, disabled)

    def __getattr__(self, name: str) -> Any:  # anything else is asked of the compiler, which takes its place
        if name.startswith("__") and name != "__path__":  # who looks through all modules wants none of them
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


if not any(Path(node).exists() for node in GPU_NODES):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it finds no GPU
if "torch._dynamo" not in sys.modules:
    sys.modules["torch._dynamo"] = torch._dynamo = _CompilerLater()  # type: ignore[assignment]
if _is_absent := "mlflow" not in sys.modules:
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # DeepSpeed's autotuner would import it (0.19.8)
import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator, set_accelerator  # noqa: E402
from deepspeed.constants import default_pg_timeout  # noqa: E402
from deepspeed.runtime import compiler  # noqa: E402

if _is_absent:
    del sys.modules["mlflow"]


def load_deepspeed(name: str) -> None:
    """Load DeepSpeed for ``cpu`` or ``cuda``, without the code that it would compile at every start.

    What DeepSpeed and torch log at every start is silenced, except at level DEBUG; other warnings and errors stay.
    """
    os.environ["DS_ACCELERATOR"] = name
    theirs = logging.getLogger("DeepSpeed")
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        theirs.setLevel(logging.DEBUG)
    else:
        # A pipeline's engine and a schedule log this before their first step, in every run.
        usual = "Attempting to get learning rate from scheduler before it has started"
        theirs.addFilter(lambda record: not record.getMessage().startswith(usual))
        logging.getLogger("determined.common.storage.shared").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        warnings.filterwarnings("ignore", message=r"c10d::broadcast_: an autograd kernel was not registered")
    if get_accelerator().device_name() != name:  # chosen for good as it was imported (0.19.8)
        made_by = importlib.import_module(f"deepspeed.accelerator.{name}_accelerator")
        set_accelerator(getattr(made_by, f"{name.upper()}_Accelerator")())
    # A shared-memory all-reduce for CPU inference, which DeepSpeed would compile at every first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    # For any optimizer, ZeRO loads Muon, whose functions are decorated with ``torch.compile``: its code generator takes
    # three seconds. On a CPU they stay as they are: to compile them takes a minute and g++. On a GPU they are compiled
    # at the first call, with sizes as constants: a function of any sizes, which torch makes at the second shape, rounds
    # otherwise for the first one too, so that a run would not resume bit for bit.

    def compiled_at_call(function: Any) -> Any:
        is_inside, compiled = torch.compiler.is_compiling, lambda: torch.compile(function, dynamic=False)
        return function if name == "cpu" else _chosen_at_call(function, is_inside, compiled)

    with mock.patch.object(compiler, "compile", return_value=compiled_at_call):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    if name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


@contextlib.contextmanager
def only_errors(name: str) -> Iterator[None]:
    """In here a logger shows errors only."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _WithLevel(logging.Formatter):
    """Determined's format; each line of this library's begins with the level, and a problem is one line."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name.partition(".")[0] != "determined_ds":
            return super().format(record)
        return "\n".join(lines_of(f"{record.levelname}: ", record.getMessage()))


def log_in_task(accelerator: str | None) -> None:
    """Log as a task from now on, and compute on what is found there, or on what is named."""
    handler = logging.StreamHandler()
    handler.setFormatter(_WithLevel(det.LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    os.environ["DS_ACCELERATOR"] = detect_accelerator(accelerator).name


def _wait_for_workers() -> None:
    """Wait until gloo's threads rest: one that still lets go of a tensor as Python ends aborts the process.

    A collective is over for Python before such a thread has let go of its tensors, for which it takes the GIL. One that
    waits for the GIL wakes every few milliseconds. Source: ``runLoop`` in torch 2.13's ``ProcessGroupGloo.cpp``.
    """
    before, until_s = None, time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < until_s:
        now: dict[str, list[str]] = {}
        for task in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(OSError):
                if (task / "comm").read_text() == "pt_gloo_runloop\n":
                    now[task.name] = re.findall(
                        r"(?m)^(?:State|voluntary\S+):\s+(\w+)", (task / "status").read_text()
                    )
        if now == before and not any("R" in states for states in now.values()):
            return
        before = now
        time.sleep(0.02)


def join_process_group(accelerator: Accelerator) -> core.DistributedContext:
    """Join the process group that the environment describes; a group of one where it describes none.

    Reads torchrun's variables (``RANK``, ``LOCAL_WORLD_SIZE`` ...) and the DeepSpeed launcher's (``LOCAL_SIZE``,
    ``CROSS_RANK``, ``CROSS_SIZE``). The ranks of ``det-ds run`` meet by a file, and a single rank needs no meeting:
    neither opens a port to other machines. Under another launcher they meet as that one says; on a cluster, at the
    allocation's own port. From then on they are watched: a rank that hangs ends the run. A trial that initializes the
    process group itself finds it there.
    """
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    rank, size, file = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get(STORE)
    hang_timeout_s()  # refused before anything is opened
    load_deepspeed(accelerator.name)
    if size == 1 or file or (LAUNCHED_BY in os.environ and os.environ["GROUP_WORLD_SIZE"] == "1"):
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback is not None:  # gloo and NCCL listen there, unless the user names another
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # otherwise it is a prefix
    else:
        take_addresses()
    store, attempt = cast(Any, None), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if size == 1:
        store = dist.HashStore()
    elif attempt != "0":
        # torchrun's store, which still has the addresses of the ranks before its restart.
        # Source: ``next_rendezvous`` in torch 2.13's ``elastic/rendezvous/dynamic_rendezvous.py`` and
        # ``static_tcp_rendezvous.py`` keeps the store, and ``_create_c10d_store`` expects a new one.
        old, _, _ = next(dist.rendezvous("env://", rank, size))  # type: ignore[no-untyped-call]
        store = dist.PrefixStore(f"attempt {attempt}", old)
    if store is not None and not dist.is_initialized():
        backend = get_accelerator().communication_backend_name()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    by = f"file://{file}" if file else None
    deepspeed.init_distributed(
        auto_mpi_discovery=False, verbose=False, init_method=by, rank=rank, world_size=size
    )
    # All ranks are there, and wait for one another as long as any may be busy: in all groups, those that DeepSpeed
    # makes without a timeout too (torch's are 10 minutes for NCCL, 30 for gloo).
    # Source: ``TorchBackend.new_group`` in deepspeed 0.19.8's ``comm/torch.py``; ``_get_default_timeout`` and
    # ``_set_pg_timeout`` in torch 2.13's ``distributed/distributed_c10d.py``.
    timeout = default_pg_timeout if "DEEPSPEED_TIMEOUT" in os.environ else PATIENCE
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    distributed_c10d._set_pg_timeout(timeout)
    store = distributed_c10d._get_default_store()
    store.set_timeout(timeout)
    distributed = TorchDistributedContext()
    atexit.register(_wait_for_workers)
    watch_joined(distributed, store)
    return distributed


class TorchDistributedContext(core.DistributedContext):
    """Determined's ``DistributedContext`` over torch's process group instead of separate sockets.

    With one transport there are no fixed ports, so two runs can share a machine, and ranks that wait for a dead rank
    notice it. Objects travel over gloo for every training backend, pickled as torch itself does it: whoever can connect
    to a rank must be trusted, as torch and DeepSpeed require.
    """

    def __init__(self) -> None:
        env, size = os.environ.get, dist.get_world_size()
        local_size = int(env("LOCAL_SIZE") or env("LOCAL_WORLD_SIZE") or size)
        super().__init__(
            rank=dist.get_rank(),
            size=size,
            local_rank=int(env("LOCAL_RANK") or 0),
            local_size=local_size,
            cross_rank=int(env("CROSS_RANK") or env("GROUP_RANK") or 0),
            cross_size=int(env("CROSS_SIZE") or env("GROUP_WORLD_SIZE") or max(1, size // local_size)),
            chief_ip=env("DET_CHIEF_IP") or env("MASTER_ADDR"),
        )

    def _init_ipc(self, force_tcp: bool) -> None:
        self._group = self._local_group = cast(Any, None)
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
        return gather_objects(stuff, self._group)

    def allgather_local(self, stuff: Any) -> list[Any]:
        return gather_objects(stuff, self._local_group)

    def gather(self, stuff: Any) -> list[Any] | None:
        gathered = self.allgather(stuff)
        return gathered if self.rank == 0 else None

    def gather_local(self, stuff: Any) -> list[Any] | None:
        gathered = self.allgather_local(stuff)
        return gathered if self.local_rank == 0 else None

    def broadcast(self, stuff: Any) -> Any:
        sent = [stuff]
        if self.size > 1:
            dist.broadcast_object_list(sent, src=0, group=self._group)
        return sent[0]

    def broadcast_local(self, stuff: Any = None) -> Any:
        return self.allgather_local(stuff)[0]


def is_alone() -> bool:
    """Whether there is one rank."""
    return not dist.is_initialized() or dist.get_world_size() < 2


def gather_objects(stuff: Any, group: Any = None) -> list[Any]:
    """The object of each rank of a group; a collective."""
    if is_alone():
        return [stuff]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, stuff, group=group)
    return gathered


def gather_rows(vector: torch.Tensor) -> torch.Tensor:
    """The vector of each rank, all of one length: a row for each rank, on the host; a collective."""
    if is_alone():
        return vector.reshape(1, -1).cpu()
    rows = vector.new_empty(dist.get_world_size(), vector.numel())
    dist.all_gather(list(rows), vector)
    return rows.cpu()


def as_chief(distributed: Any, step: Callable[[], T]) -> T:
    """What a step returns on the chief, which alone takes it, or the error that it ends in; a collective."""
    result, error, shared = None, None, None
    if distributed.rank == 0:
        try:
            with HEART.patiently():
                result = step()
        except Exception as caught:
            error = shared = caught
            if not isinstance(caught, DeterminedDSError):
                shared = ChiefFailed(f"rank 0: {caught!r}")
                shared.exit_code = ending_of(caught).code
    result, shared = distributed.broadcast((result, shared))
    if shared is not None:
        raise error or shared
    return result  # type: ignore[return-value]


def all_ranks_come(name: str, *, within_s: float) -> bool:
    """Whether every rank calls this by the same, new name in time; no collective, which a failed rank never joins."""
    if is_alone():
        return True
    store = distributed_c10d._get_default_store()
    there, wanted, deadline = store.add(name, 1), dist.get_world_size(), time.monotonic() + within_s
    while there < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
        there = store.add(name, 0)
    return bool(there >= wanted)
