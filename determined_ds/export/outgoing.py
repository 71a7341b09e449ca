"""A tensor on its way out: its name, shape and type there, and its values, which are read when they are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from determined_ds.checkpoints.index import MASTER, WEIGHT
from determined_ds.checkpoints.reader import DTYPES, TORCH_DTYPES
from determined_ds.checkpoints.shard_file import ITEM_BYTES
from determined_ds.errors import CheckpointError
from determined_ds.export.verified_engine import VerifiedEngine

CHUNK = 2**20  # elements that are in memory at once


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A tensor to write.

    Args:
        shape: Of the whole.
        dtype: That it is written in.
        chunks: Yields its elements in order, one-dimensional, in any type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Callable[[], Iterator[torch.Tensor]]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes when it is written."""
        return self.count * ITEM_BYTES[DTYPES[self.dtype]]

    def cast(self) -> Iterator[torch.Tensor]:
        """Its elements in its type.

        Raises:
            CheckpointError: a value is too large for fp16.
        """
        for chunk in self.chunks():
            found = chunk.to(self.dtype)
            if self.dtype == torch.float16 and chunk.dtype != torch.float16:
                _check_range(chunk, found)
            yield found

    def whole(self) -> torch.Tensor:
        """All of it, in its shape."""
        found, at = torch.empty(self.count, dtype=self.dtype), 0
        for chunk in self.cast():
            found[at : at + chunk.numel()].copy_(chunk)
            at += chunk.numel()
        return found.view(self.shape)


def of_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Outgoing:
    """One that is in memory, or mapped."""
    return Outgoing(
        shape=tuple(tensor.shape),
        dtype=dtype or tensor.dtype,
        chunks=lambda: iter(tensor.detach().reshape(-1).split(CHUNK)),
    )


def of_state(source: VerifiedEngine, name: str, state: str, dtype: torch.dtype | None = None) -> Outgoing:
    """A state of a stored tensor, such as ``exp_avg``."""
    stored = source.stored.index.tensors[name]

    def chunks() -> Iterator[torch.Tensor]:
        for start in range(0, stored.count, CHUNK):
            for _, part in source.stored.parts(name, state, start, min(start + CHUNK, stored.count)):
                yield part
            source.stored.release()

    own = TORCH_DTYPES[stored.states[state].dtype]
    return Outgoing(shape=stored.shape, dtype=dtype or own, chunks=chunks)


def of_weight(source: VerifiedEngine, name: str, dtype: torch.dtype | None) -> Outgoing:
    """A stored weight or buffer.

    Args:
        source: Where it is.
        name: Its key in the index.
        dtype: To write it in; None: as the model computes with it. Integers stay integers.
    """
    states = source.stored.index.tensors[name].states
    kept = [state for state in (WEIGHT, MASTER) if state in states]
    if not kept:
        raise CheckpointError(f"checkpoint {source.path} has no weight of {name}")
    own = TORCH_DTYPES[states[kept[0]].dtype]
    if not own.is_floating_point:
        return of_state(source, name, kept[0])
    if dtype is None:
        dtype = own if WEIGHT in states else source.computes_in or own
    same = [state for state in kept if TORCH_DTYPES[states[state].dtype] == dtype]
    return of_state(source, name, (same or kept[::-1])[0], dtype)


def weights_of(
    source: VerifiedEngine, dtype: torch.dtype | None, averages: Mapping[str, torch.Tensor]
) -> dict[str, Outgoing]:
    """All weights and buffers by their names in the index; averaged ones replaced by their average."""
    found = {name: of_weight(source, name, dtype) for name in source.stored.index.tensors}
    for name, average in averages.items():
        found[name] = of_tensor(average, found[name].dtype)
    return found


def first_difference(one: Outgoing, other: Outgoing) -> int | None:
    """The first element that differs; None where all are equal, to the bit of a value."""
    if one.shape != other.shape:
        return 0
    at = 0
    for mine, theirs in zip(_even(one), _even(other), strict=True):
        if not torch.equal(mine, theirs):
            return at + int((mine != theirs).nonzero()[0])
        at += mine.numel()
    return None


def _even(given: Outgoing) -> Iterator[torch.Tensor]:
    """Its elements in pieces of one size, however they are cut."""
    held: list[torch.Tensor] = []
    for chunk in given.cast():
        held.append(chunk)
        while sum(each.numel() for each in held) >= CHUNK:
            joined = torch.cat(held)
            yield joined[:CHUNK]
            held = [joined[CHUNK:]]
    yield torch.cat(held) if held else torch.empty(0)


def _check_range(before: torch.Tensor, after: torch.Tensor) -> None:
    if not torch.isfinite(after).all() and torch.isfinite(before).all():
        raise CheckpointError(
            f"a weight of {float(before.abs().max()):g} is too large for fp16\n  fix: --dtype bf16 or fp32"
        )
