"""What a checkpoint holds of one engine, to be read by name and slice."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from determined_ds.errors import CheckpointError
from determined_ds.protocol.index_gaps import incomplete
from determined_ds.protocol.tensor_index import (
    ITEM_BYTES,
    EngineIndex,
    StoredTensor,
)
from determined_ds.runtime.checkpoints.contents import read_data
from determined_ds.runtime.checkpoints.shards import TORCH_DTYPES

# Of an engine, besides its tensors.
SETTINGS = {"groups", "built", "lr_scheduler", "loss_scale", "counters"}


class StoredEngine(abc.ABC):
    """The tensors and settings of an engine in a checkpoint.

    Attributes:
        index: Its tensors. Where it is made of files of another layout, pieces name no bytes.
    """

    index: EngineIndex

    @property
    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """All but tensors, see :func:`~determined_ds.runtime.checkpoints.besides_tensors.settings_of`."""

    @abc.abstractmethod
    def parts(self, name: str, state: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements ``start`` to ``stop`` of a tensor's state.

        Args:
            name: A key of ``index.tensors``.
            state: A key of its ``states``.
            start: In the flattened tensor.
            stop: In the flattened tensor.

        Yields:
            Where a part begins, counted from ``start``, and the part, one-dimensional and on the CPU: only what is
            read of it is loaded into memory.
        """

    def release(self) -> None:  # noqa: B027 — what is not mapped has nothing to give back
        """Give back the memory of what was read, where files are mapped; parts that were handed out stay valid."""

    def name_of(self, name: str, aliases: tuple[str, ...] = ()) -> str | None:
        """The key in ``index.tensors`` of a tensor by any of its names; None where it is not there."""
        for each in (*aliases, name):  # a name of one form may be that of another tensor in the other
            found = self.index.common.get(each) or self.index.aliases.get(each, each)
            if found in self.index.tensors:
                return found
        return None

    def whole(self, name: str, state: str) -> torch.Tensor:
        """A whole state of a tensor, in its shape."""
        tensor: StoredTensor = self.index.tensors[name]
        found = torch.empty(tensor.count, dtype=TORCH_DTYPES[tensor.states[state].dtype])
        for at, part in self.parts(name, state, 0, tensor.count):
            found[at : at + part.numel()].copy_(part)
        return found.view(tensor.shape)


class IndexedEngine(StoredEngine):
    """An engine that was written as slices.

    Args:
        folder: ``model<I>`` of a checkpoint.
        index: The index in it.
    """

    def __init__(self, folder: Path, index: EngineIndex) -> None:
        self.folder = folder
        self.index = index
        self._files: dict[str, Any] = {}
        if missing := next(iter(incomplete(index)), None):
            raise CheckpointError(f"{folder} lacks {missing}\n  fix: use another checkpoint")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """See the base class; of all pipeline stages together."""
        files = sorted(self.folder.glob("settings_stage*.pt"))
        if not files:
            raise CheckpointError(
                f"{self.folder} has no settings_stage0.pt: it holds weights alone\n"
                "  fix: start from them, by searcher.source_checkpoint_uuid with fit.warm_start: weights"
            )
        stages = [read_data(file, map_location="cpu") for file in files]
        for file, stage in zip(files, stages, strict=True):
            if not isinstance(stage, dict) or not stage.keys() >= SETTINGS:
                raise CheckpointError(
                    f"{file} does not hold the settings of an engine\n  fix: use another checkpoint"
                )
        return {**stages[0], "groups": [group for stage in stages for group in stage["groups"]]}

    def parts(self, name: str, state: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See the base class."""
        stored = self.index.tensors[name].states[state]
        size, dtype = ITEM_BYTES[stored.dtype], TORCH_DTYPES[stored.dtype]
        for piece in stored.pieces:
            for at, first, count in piece.overlap(start, stop):
                offset = piece.offset + at * size
                raw = self._file(piece.file)[offset : offset + count * size]
                if raw.size != count * size:
                    raise CheckpointError(
                        f"{self.folder / piece.file} ends before elements {first} to {first + count} of {name} "
                        f"({state})"
                    )
                yield first - start, torch.from_numpy(raw).view(dtype)

    def release(self) -> None:
        """See the base class."""
        for file in self._files.values():
            file._mmap.madvise(mmap.MADV_DONTNEED)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = np.memmap(self.folder / name, dtype=np.uint8, mode="c")
            except FileNotFoundError:
                raise CheckpointError(
                    f"{self.folder / name} is missing: another rank or machine wrote it\n  fix: copy it there"
                ) from None
        return self._files[name]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two one-dimensional tensors are equal to the last bit, whatever they hold."""
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
