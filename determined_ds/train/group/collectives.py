"""Exchanges between ranks: sums, objects, steps that the chief takes for all, and meetings by the store.

Objects are signed with a key of the run: nothing is unpickled that no rank of it has sent.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from determined_ds.errors import ChiefFailed, DeterminedDSError, TrainingError
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.master.ending import exit_code_of, seen_in_store

T = TypeVar("T")
KEY = "determined_ds/key"  # in the store that the ranks have met by
DIGEST = "sha256"
DIGEST_BYTES = 32


def is_alone() -> bool:
    """Whether there is one rank."""
    return not dist.is_initialized() or dist.get_world_size() < 2


def reduce_over_ranks(vector: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
    """Sum a vector over ranks, or reduce it by another operation, in place; a collective."""
    if not is_alone():
        dist.all_reduce(vector, op=operation)


def store() -> Any:
    """The store by which the ranks have met."""
    return dist.distributed_c10d._get_default_store()


# ------------------------------------------------------------------------------------------- objects


def allgather_objects(stuff: Any, *, group: Any = None, device: torch.device | None = None) -> list[Any]:
    """The objects of all ranks, by rank; a collective.

    Args:
        stuff: Of this rank; must be picklable.
        group: Of ranks; all of them, if None.
        device: That the group's backend takes; the CPU, if None.

    Raises:
        TrainingError: an object was not sent by a rank of this run.
    """
    own, lengths = _padded(stuff, group, device or torch.device("cpu"))
    gathered = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(gathered, own, group=group)
    return [_opened(each[:length]) for each, length in zip(gathered, lengths, strict=True)]


def gather_objects(stuff: Any, *, group: Any = None) -> list[Any] | None:
    """The objects of all ranks of a group that takes CPU tensors, by rank, on rank 0 alone; a collective.

    Raises:
        TrainingError: an object was not sent by a rank of this run.
    """
    own, lengths = _padded(stuff, group, torch.device("cpu"))
    receives = dist.get_rank() == 0
    gathered = [torch.empty_like(own) for _ in lengths] if receives else None
    dist.gather(own, gathered, dst=0, group=group)
    if gathered is None:
        return None
    return [_opened(each[:length]) for each, length in zip(gathered, lengths, strict=True)]


def _padded(stuff: Any, group: Any, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """The object of this rank, as long as the longest of all, and the lengths of all; a collective."""
    own = _sealed(stuff).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group=group)
    lengths = [int(size) for size in sizes]
    return torch.nn.functional.pad(own, (0, max(lengths) - len(own))), lengths


def broadcast_object(stuff: Any, *, group: Any = None) -> Any:
    """The object of rank 0, on all ranks of a group that takes CPU tensors; a collective.

    Raises:
        TrainingError: the object was not sent by a rank of this run.
    """
    sends = dist.get_rank() == 0
    content = _sealed(stuff) if sends else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(content)])
    dist.broadcast(size, src=0, group=group)
    if not sends:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, src=0, group=group)
    return stuff if sends else _opened(content)


_KNOWN: list[tuple[Any, bytes]] = []  # the process group, and its key


def _key() -> bytes:
    """The same on all ranks: the first to ask draws it, and each asks once.

    It keeps out what comes to a port of gloo's by mistake, or from a stranger who cannot read the store: under
    ``det-ds run`` that is a file of this user's. Under another launcher the store is a server of torch's, which
    answers whoever reaches its port, so such a network has to be one that is trusted, as torch itself requires.
    """
    world = dist.group.WORLD
    if not _KNOWN or _KNOWN[0][0] is not world:
        _KNOWN[:] = [(world, key_in(store()))]
    return _KNOWN[0][1]


def key_in(there: Any) -> bytes:
    """The key that a store holds; the first rank to ask draws it."""
    return bytes(there.compare_set(KEY, "", secrets.token_hex(32)))


def _sealed(stuff: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(sealed(stuff, _key())), dtype=torch.uint8)


def _opened(content: torch.Tensor) -> Any:
    return opened(content.cpu().numpy().tobytes(), _key())


def sealed(stuff: Any, key: bytes) -> bytes:
    """An object as bytes, signed."""
    body = pickle.dumps(stuff)
    return hmac.digest(key, body, DIGEST) + body


def opened(content: bytes, key: bytes) -> Any:
    """The object in signed bytes.

    Raises:
        TrainingError: they were not signed with the key.
    """
    signature, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(key, body, DIGEST)):
        raise TrainingError(
            "an object came over the network that no rank of this run has sent; it was not read"
        )
    return pickle.loads(body)


# ------------------------------------------------------------------------------------------- agreements


def as_chief(distributed: Any, step: Callable[[], T]) -> T:
    """What a step returns on the chief, which alone takes it, or the error that it ends in; a collective."""
    result, error, shared = None, None, None
    if distributed.rank == 0:
        try:
            with HEART.patiently():
                result = step()
        except Exception as caught:
            error = caught
            shared = error if isinstance(error, DeterminedDSError) else _chief_failed(error)
    result, shared = distributed.broadcast((result, shared))
    if shared is not None:
        raise error or shared
    return result  # type: ignore[no-any-return]


def _chief_failed(error: Exception) -> ChiefFailed:
    failed = ChiefFailed(f"rank 0: {error!r}")
    failed.exit_code = exit_code_of(error)
    return failed


def all_ranks_come(name: str, *, within_s: float) -> bool:
    """Whether every rank calls this with the same name in time; no collective, which a failed rank never joins.

    Args:
        name: Of the meeting, a new one each time.
        within_s: How long to wait for the others.
    """
    return is_alone() or seen_in_store(name, name, dist.get_world_size(), within_s=within_s)
