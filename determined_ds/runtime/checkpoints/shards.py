"""A rank's slices as one file of safetensors, and the index over the files of all ranks.

header: name -> dtype, shape, place of its bytes        8 bytes of length, JSON, blanks
bytes of the slices                                     widest elements first, so each is aligned
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import CheckpointError
from determined_ds.protocol.index_gaps import incomplete
from determined_ds.protocol.tensor_index import (
    WEIGHT,
    EngineIndex,
    Piece,
    StoredState,
    StoredTensor,
    place_of,
)
from determined_ds.runtime.checkpoints.slices import EngineSlices, Slice
from determined_ds.runtime.checkpoints.state_bytes import base_optimizer

logger = logging.getLogger("determined_ds")

CHUNK_BYTES = 2**23
CHUNKS_AHEAD = 4  # written, and their checksum is not computed yet
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A slice in a file.

    Args:
        name: Of the tensor.
        state: Of the tensor.
        dtype: By safetensors' name.
        piece: Where it is.
    """

    name: str
    state: str
    dtype: str
    piece: Piece


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file that was written.

    Args:
        entries: What is in it.
        fingerprint: Its size and checksum, as a manifest has them.
    """

    entries: tuple[Entry, ...]
    fingerprint: dict[str, Any]


def staged(slices: Sequence[Slice], buffer: torch.Tensor | None = None) -> tuple[list[Slice], torch.Tensor]:
    """Copies of slices in host memory, which training no longer changes.

    Args:
        slices: On any device.
        buffer: Host memory from an earlier call, taken again where it is large enough.

    Returns:
        The copies, and the memory that they lie in.
    """
    slices = _by_width(slices)
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


def write_shard(
    path: Path, slices: Sequence[Slice], beat: Callable[[], None] = lambda: None, *, alone: bool = False
) -> Shard:
    """Write slices to a file, and put it on the disk.

    Args:
        path: The file.
        slices: On any device.
        beat: Called after each piece of some megabytes.
        alone: Use no other thread for the checksum: this one is itself beside training.
    """
    slices = _by_width(slices)
    header = _header(slices)
    entries, at = [], len(header)
    with path.open("wb", buffering=0) as file, _Digest(alone=alone) as digest:
        digest.add(memoryview(header))
        write_all(file, header)
        for each in slices:
            sums, start = [], at
            for chunk in each.tensor.split(max(1, CHUNK_BYTES // each.tensor.element_size())):
                host = chunk.cpu().contiguous()
                view = memoryview(host.view(torch.uint8).numpy())
                digest.add(view)
                write_all(file, view)
                _begin_to_store(file, at, len(view))
                sums.append(sum_of_squares(host))
                at += len(view)
                beat()
            piece = Piece(
                file=path.name,
                offset=start,
                start=each.start,
                count=each.tensor.numel(),
                sum_of_squares=None if None in sums else sum(square for square in sums if square is not None),
                run=each.run,
                stride=each.stride,
            )
            entries.append(
                Entry(name=each.name, state=each.state, dtype=DTYPES[each.tensor.dtype], piece=piece)
            )
        os.fsync(file.fileno())
    return Shard(entries=tuple(entries), fingerprint={"bytes": at, "sha256": digest.hexdigest()})


class _Digest:
    """The checksum of what is written, computed in a thread beside it unless ``alone``."""

    def __init__(self, *, alone: bool) -> None:
        self._digest = hashlib.sha256()
        self._beside = None if alone else ThreadPoolExecutor(1)
        self._ahead: deque[Future[None]] = deque()

    def __enter__(self) -> _Digest:
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is not None:
            self._beside.shutdown()

    def add(self, view: memoryview) -> None:
        """Add bytes, which stay as they are until they are computed: at most :data:`CHUNKS_AHEAD` are not yet."""
        if self._beside is None:
            self._digest.update(view)
            return
        self._ahead.append(self._beside.submit(self._digest.update, view))
        if len(self._ahead) > CHUNKS_AHEAD:
            self._ahead.popleft().result()

    def hexdigest(self) -> str:
        """Of all that was added; after the block."""
        return self._digest.hexdigest()


def _begin_to_store(file: io.FileIO, at: int, count: int) -> None:
    """Have the system begin to put bytes on the disk, so that less is left when the file is complete."""
    if hasattr(os, "posix_fadvise"):  # on Linux it begins to write what it is to forget
        os.posix_fadvise(file.fileno(), at, count, os.POSIX_FADV_DONTNEED)


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


def write_all(file: io.FileIO, content: bytes | memoryview) -> None:
    """Write all of it: the system may take less at a time."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) or 0 :]


def _by_width(slices: Sequence[Slice]) -> list[Slice]:
    return sorted(slices, key=lambda each: -each.tensor.element_size())


def _header(slices: Sequence[Slice]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for each in slices:
        size = each.tensor.numel() * each.tensor.element_size()
        place = place_of(each.start, each.tensor.numel(), each.run, each.stride)
        content[f"{each.name}/{each.state}[{place}]"] = {
            "dtype": DTYPES[each.tensor.dtype],
            "shape": [each.tensor.numel()],
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sum_of_squares(tensor: torch.Tensor) -> float | None:
    """Of some million elements; None where they are not real numbers of 16 bits or more."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return None
    values = tensor if tensor.dtype in (torch.float64, torch.float32) else tensor.float()
    return float(torch.dot(values, values))


@dataclass(frozen=True, kw_only=True)
class Described:
    """The tensors of a rank, less their values.

    Args:
        kinds: Name -> shape and kind.
        aliases: Other name -> name.
        common: Common name -> name.
        scalars: Name -> the optimizer's numbers.
        optimizer: The class of the optimizer.
        shared: Name -> norm, of the weights that pipeline stages share.
    """

    kinds: dict[str, tuple[tuple[int, ...], str]]
    aliases: dict[str, str]
    common: dict[str, str]
    scalars: dict[str, dict[str, float]]
    optimizer: str
    shared: dict[str, float] = field(default_factory=dict)


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


def _warn_of_copies(ranks: Sequence[Described]) -> None:
    """Warn of a weight that pipeline stages share, and hold with different values: one of them is written."""
    norms: dict[str, set[float]] = {}
    for rank in ranks:
        for name, norm in rank.shared.items():
            norms.setdefault(name, set()).add(norm)
    for name, found in norms.items():
        if len(found) > 1:
            logger.warning(
                "warning: pipeline stages share %s, and hold it with norms from %r to %r: the checkpoint has that of "
                "the first stage\n  fix: change a tied weight on all of its stages alike, or let the optimizer do it",
                *(name, min(found), max(found)),
            )


def _in_order(names: Iterable[str]) -> list[str]:
    """The tensors of a pipeline by their layers, whichever ranks hold them; others as they are."""
    found = list(names)
    layers = {name: name.partition(".")[0] for name in found}
    if all(layer.isdigit() for layer in layers.values()):
        found.sort(key=lambda name: int(layers[name]))
    return found


def index_of(ranks: Sequence[Described], entries: Iterable[Entry]) -> EngineIndex:
    """The index over what all ranks wrote.

    Args:
        ranks: The tensors of each rank.
        entries: What they wrote.

    Raises:
        CheckpointError: ranks have written a slice twice, or not at all.
    """
    _warn_of_copies(ranks)
    of_ranks = {name: kind for rank in ranks for name, kind in rank.kinds.items()}
    kinds = {name: of_ranks[name] for name in _in_order(of_ranks)}
    scalars = {name: numbers for rank in ranks for name, numbers in rank.scalars.items()}
    pieces: dict[str, dict[str, tuple[str, list[Piece]]]] = {name: {} for name in kinds}
    for entry in entries:
        pieces[entry.name].setdefault(entry.state, (entry.dtype, []))[1].append(entry.piece)
    tensors = {
        name: StoredTensor(
            shape=shape,
            kind=kind,
            states={
                state: StoredState(dtype=dtype, pieces=tuple(sorted(found, key=lambda each: each.start)))
                for state, (dtype, found) in pieces[name].items()
            },
            scalars=scalars.get(name, {}),
        )
        for name, (shape, kind) in kinds.items()
    }
    aliases = {alias: name for rank in ranks for alias, name in rank.aliases.items()}
    common = {alias: name for rank in ranks for alias, name in rank.common.items()}
    index = EngineIndex(tensors=tensors, aliases=aliases, common=common, optimizer=ranks[0].optimizer)
    if missing := next(iter(incomplete(index)), None):
        raise CheckpointError(f"{missing} were written twice or not at all: ranks disagree on who holds them")
    if bare := next((name for name, each in tensors.items() if each.count and not each.states), None):
        raise CheckpointError(f"no rank has written {bare} ({WEIGHT})")
    return index
