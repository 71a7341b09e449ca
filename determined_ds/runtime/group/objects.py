"""Objects that ranks exchange, signed with a key of the run: nothing is unpickled that no rank of it has sent."""

from __future__ import annotations

import hmac
import pickle
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from determined_ds.errors import TrainingError

KEY = "determined_ds/key"  # in the store that the ranks have met by
DIGEST = "sha256"
DIGEST_BYTES = 32


def allgather_objects(stuff: Any, *, group: Any = None, device: torch.device | None = None) -> list[Any]:
    """The objects of all ranks, by rank; a collective.

    Args:
        stuff: Of this rank; it can be pickled.
        group: Of ranks; all of them, if None.
        device: That the group's backend takes; the CPU, if None.

    Raises:
        TrainingError: what came was not sent by a rank of this run.
    """
    own = _sealed(stuff).to(device or "cpu")
    count = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=own.device), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.nn.functional.pad(own, (0, max(lengths) - len(own)))
    gathered = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(gathered, padded, group=group)
    return [_opened(sealed[:length]) for sealed, length in zip(gathered, lengths, strict=True)]


def broadcast_object(stuff: Any, *, group: Any = None) -> Any:
    """The object of rank 0, on all ranks of a group that takes CPU tensors; a collective.

    Raises:
        TrainingError: what came was not sent by a rank of this run.
    """
    sends = dist.get_rank() == 0
    sealed = _sealed(stuff) if sends else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(sealed)])
    dist.broadcast(size, src=0, group=group)
    if not sends:
        sealed = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(sealed, src=0, group=group)
    return stuff if sends else _opened(sealed)


def _key() -> bytes:
    """The same on all ranks: whoever comes first draws it. The store is a file that only this user can read."""
    store = distributed_c10d._get_default_store()
    return bytes(store.compare_set(KEY, "", secrets.token_hex(32)))


def _sealed(stuff: Any) -> torch.Tensor:
    body = pickle.dumps(stuff)
    return torch.frombuffer(bytearray(hmac.digest(_key(), body, DIGEST) + body), dtype=torch.uint8)


def _opened(sealed: torch.Tensor) -> Any:
    content = sealed.cpu().numpy().tobytes()
    signature, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(_key(), body, DIGEST)):
        raise TrainingError(
            "an object came over the network that no rank of this run has sent; it was not read"
        )
    return pickle.loads(body)
