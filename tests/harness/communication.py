"""What ranks hand to each other, call by call, as DeepSpeed's backend is asked for it. Imported in ranks only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm

OPERATIONS = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "gather", "scatter", "broadcast"),
    *("all_reduce", "all_reduce_coalesced", "inference_all_reduce", "all_to_all", "all_to_all_single"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operation.

    Args:
        operation: Its name in DeepSpeed's backend.
        dtype: Of what is handed over.
        num_bytes: Of the whole: what goes into an all-reduce or a reduce-scatter, what comes out of an all-gather.
        ranks: In its group.
    """

    operation: str
    dtype: str
    num_bytes: int
    ranks: int

    @property
    def sent_bytes(self) -> float:
        """What one rank sends where a ring carries it out: an all-reduce is a reduce-scatter and an all-gather."""
        shared = self.num_bytes * (self.ranks - 1) / self.ranks
        if self.operation.startswith("recv") or self.operation.startswith("irecv"):
            return 0.0
        if "send" in self.operation:
            return float(self.num_bytes)
        return 2 * shared if "all_reduce" in self.operation else shared


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """The operations that DeepSpeed's backend is asked for meanwhile, and all-reduces that torch's functions are.

    Those that another is made of are not listed.
    """
    calls: list[Call] = []
    is_inside = False

    def recording(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return operation(*args, **kwargs)
            given = (*args, *kwargs.values())
            whole = max(given, key=_num_bytes)
            group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None)
            calls.append(
                Call(
                    operation=name,
                    dtype=_dtype(whole),
                    num_bytes=_num_bytes(whole),
                    ranks=dist.get_world_size(group),
                )
            )
            is_inside = True
            try:
                return operation(*args, **kwargs)
            finally:
                is_inside = False

        return recorded

    with contextlib.ExitStack() as undo:
        for name in OPERATIONS:
            if hasattr(type(comm.cdb), name):
                setattr(comm.cdb, name, recording(name, getattr(comm.cdb, name)))
                undo.callback(vars(comm.cdb).pop, name, None)
        undo.callback(setattr, dist, "all_reduce", dist.all_reduce)
        dist.all_reduce = recording("all_reduce", dist.all_reduce)
        yield calls


def _dtype(argument: Any) -> str:
    first = argument[0] if isinstance(argument, (list, tuple)) else argument
    return str(getattr(first, "dtype", "")).removeprefix("torch.")


def _num_bytes(argument: Any) -> int:
    """Of a tensor, or of all tensors in a list; 0 of anything else."""
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(_num_bytes(getattr(each, "tensor", each)) for each in argument)
    return 0
