"""A rank's slices: copied to host memory, and written as one file of safetensors."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from determined_ds.checkpoints.index import Described, Piece, Written
from determined_ds.checkpoints.reader import DTYPES
from determined_ds.checkpoints.shard_file import Streamed, write_shard
from determined_ds.runtime.checkpoints.slices import EngineSlices, Slice
from determined_ds.runtime.checkpoints.state_bytes import base_optimizer

CHUNK_BYTES = 2**23


def staged(slices: Sequence[Slice], buffer: torch.Tensor | None = None) -> tuple[list[Slice], torch.Tensor]:
    """Copies of slices in host memory, which training no longer changes.

    Args:
        slices: On any device.
        buffer: Host memory from an earlier call, taken again where it is large enough.

    Returns:
        The copies, and the memory that they lie in.
    """
    slices = sorted(slices, key=lambda each: -each.tensor.element_size())  # as they are written
    sizes = [each.num_bytes for each in slices]
    if buffer is None or buffer.numel() < sum(sizes):
        on_gpu = any(each.tensor.is_cuda for each in slices)
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu)
    copies, at = [], 0
    with torch.no_grad():
        for each, size in zip(slices, sizes, strict=True):
            place = buffer[at : at + size].view(each.tensor.dtype)
            place.copy_(each.tensor, non_blocking=True)
            copies.append(replace(each, tensor=place))
            at += size
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies, buffer


def buffer_bytes(slices: Sequence[Slice], count: int) -> int:
    """Host memory that a buffer of so many bytes takes for copies of slices: torch pins powers of two."""
    return 1 << (count - 1).bit_length() if any(each.tensor.is_cuda for each in slices) else count


def write_slices(
    path: Path, slices: Sequence[Slice], beat: Callable[[], None] = lambda: None, *, alone: bool = False
) -> tuple[list[Written], dict[str, Any]]:
    """Write slices to a file, and put it on the disk.

    Args:
        path: The file.
        slices: On any device.
        beat: Called after each piece of some megabytes.
        alone: Use no other thread for the checksum: this one is itself beside training.

    Returns:
        What was written where; and the file's size and checksum, as a manifest has them.
    """
    squares: dict[str, float | None] = {}

    def streamed(key: str, tensor: Any) -> Streamed:
        def chunks() -> Iterator[memoryview]:
            squares[key] = 0.0
            for chunk in tensor.split(max(1, CHUNK_BYTES // tensor.element_size())):
                host = chunk.cpu().contiguous()
                yield host.view(torch.uint8).numpy().data
                more, before = sum_of_squares(host), squares[key]
                squares[key] = None if more is None or before is None else before + more

        return Streamed(dtype=DTYPES[tensor.dtype], shape=(tensor.numel(),), chunks=chunks)

    keys = {each.key: each for each in slices}
    files = {key: streamed(key, each.tensor) for key, each in keys.items()}
    offsets, fingerprint = write_shard(path, files, lambda _: beat(), alone=alone)
    written = []
    for key, each in keys.items():
        count, square = each.tensor.numel(), squares[key]
        piece = Piece(path.name, offsets[key], each.start, count, square, each.run, each.stride)
        written.append(Written(each.name, each.state, files[key].dtype, piece))
    return written, fingerprint


def serialized(content: Any) -> bytes:
    """What ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Write small files. Returns their sizes and checksums, as a manifest has them."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }


def sum_of_squares(tensor: torch.Tensor) -> float | None:
    """Of some million elements; None where they are not real numbers of 16 bits or more."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return None
    values = tensor if tensor.dtype in (torch.float64, torch.float32) else tensor.float()
    return float(torch.dot(values, values))


def described(own: EngineSlices) -> Described:
    """What this rank's part of an engine is called."""
    engine = own.engine
    kind = "" if engine.optimizer is None else type(base_optimizer(engine)).__name__
    return Described(
        kinds={name: (whole.shape, whole.kind) for name, whole in own.wholes.items()},
        aliases=dict(own.aliases),
        common=dict(own.common),
        scalars={
            name: {key: float(value) for key, value in numbers.items()}
            for name, numbers in own.scalars().items()
        },
        optimizer=kind,
        shared=own.shared_norms(),
    )
