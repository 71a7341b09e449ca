"""Exchanges between ranks: sums, objects, steps that the chief takes for all, and meetings by the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from determined_ds.errors import ChiefFailed, DeterminedDSError
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.ending import exit_code_of, seen_in_store

T = TypeVar("T")


def is_alone() -> bool:
    """Whether there is one rank."""
    return not dist.is_initialized() or dist.get_world_size() < 2


def reduce_over_ranks(vector: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
    """Sum a vector over ranks, or reduce it by another operation, in place; a collective."""
    if not is_alone():
        dist.all_reduce(vector, op=operation)


def allgather_objects(stuff: Any) -> list[Any]:
    """The objects of all ranks, by rank; a collective of the training backend."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, stuff)
    return gathered


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
                shared.exit_code = exit_code_of(caught)
    result, shared = distributed.broadcast((result, shared))
    if shared is not None:
        raise error or shared
    return result  # type: ignore[return-value]


def all_ranks_come(name: str, *, within_s: float) -> bool:
    """Whether every rank calls this with the same name in time; no collective, which a failed rank never joins.

    Args:
        name: Of the meeting, a new one each time.
        within_s: How long to wait for the others.
    """
    return is_alone() or seen_in_store(name, name, dist.get_world_size(), within_s=within_s)
