"""Whether all replicas read the same stream: what each has read first, compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from determined_ds.errors import DataError, Problem


def digest(samples: list[Any]) -> str:
    """The same for the same samples in every process; of what is neither a number, text nor an array, its type."""
    found = hashlib.sha1(usedforsecurity=False)
    for mark in _marks(samples):
        found.update(mark)
    return found.hexdigest()


def _marks(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu":
        value = value.detach().contiguous()
        yield repr((tuple(value.shape), value.dtype)).encode()
        yield value.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        yield repr((value.shape, str(value.dtype))).encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _marks(key)
            yield from _marks(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _marks(item)
    elif isinstance(value, (str, bytes, int, float, complex, bool)) or value is None:
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()


@dataclass(frozen=True, kw_only=True)
class FirstRow:
    """What a rank read first, to be compared with the others.

    Args:
        name: Of the dataset.
        replica: Data-parallel rank.
        sharded: Whether it is to be the replica's own.
        digest: Of the samples.
    """

    name: str
    replica: int
    sharded: bool
    digest: str


def check_first_rows(rows: list[FirstRow | None], note: Callable[[str], None]) -> None:
    """Compare what the ranks have read: all of a stream the same, of a sharded one each replica something else.

    Args:
        rows: Of each rank; None where it reads no stream.
        note: Says something to the user.

    Raises:
        DataError: replicas read other samples than each other.
    """
    found = [row for row in rows if row is not None]
    digests, replicas = {row.digest for row in found}, {row.replica for row in found}
    if len(replicas) < 2:
        return
    if found[0].sharded and len(digests) == 1:
        note(f"warning: {found[0].name} is sharded=True, and its first samples are the same on every replica")
    elif not found[0].sharded and len(digests) > 1:
        raise DataError(
            Problem(
                key=found[0].name,
                message="yields other samples on one replica than on another, so that parts of it would be trained "
                "twice and others never",
                fix="sharded=True where it yields each replica its own samples; otherwise read its files in one "
                "order, and draw from random, numpy or torch, or from a generator with a fixed seed",
                code="stream-differs",
            )
        )
