"""One file of safetensors: its types, its header, and how it is written. Loads no torch.

header: name -> dtype, shape, place of its bytes        8 bytes of length, JSON, blanks
bytes of the tensors                                    widest elements first, so each is aligned
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# safetensors' name -> bytes of an element, and torch's name.
TYPES = {
    "C128": (16, "complex128"),
    "C64": (8, "complex64"),
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "U64": (8, "uint64"),
    "I32": (4, "int32"),
    "U32": (4, "uint32"),
    "I16": (2, "int16"),
    "U16": (2, "uint16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
}
ITEM_BYTES = {name: size for name, (size, _) in TYPES.items()}
PAIRS = {"C128": "F64"}  # safetensors has no such type: a header has two numbers for each element
LENGTH_BYTES = 8  # before the header
MOST_HEADER_BYTES = 100_000_000  # as safetensors itself reads
# Headers are filled up to a multiple of this, so slices of equal size lie at the same offset in the files of all ranks.
HEADER_STEP = 2**14
CHUNKS_AHEAD = 4  # written, and their checksum is not computed yet


class Placed(NamedTuple):
    """A tensor in a file: its type by safetensors' name, its shape, its first byte and the one after its last."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Streamed(NamedTuple):
    """A tensor to write; ``chunks`` yields its bytes in order, each piece unchanged until the file is written."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]


def write_shard(
    path: Path,
    tensors: Mapping[str, Streamed],
    wrote: Callable[[int], object] = lambda _: None,
    *,
    sealed: bool = True,
    alone: bool = False,
) -> tuple[dict[str, int], dict[str, Any]]:
    """Write a file; what is in memory at once is a piece of a tensor."""
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name].dtype])
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        each = tensors[name]
        end = at + math.prod(each.shape) * ITEM_BYTES[each.dtype]
        dtype, pair = PAIRS.get(each.dtype, each.dtype), [2] if each.dtype in PAIRS else []
        content[name] = {"dtype": dtype, "shape": [*each.shape, *pair], "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % HEADER_STEP)
    digest, ahead = hashlib.sha256(), deque[Future[None]]()
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("wb", buffering=0))
        beside = stack.enter_context(ThreadPoolExecutor(1)) if sealed and not alone else None

        def add(piece: bytes | memoryview) -> None:
            left = memoryview(piece)
            while left:  # the system may take less at a time
                left = left[file.write(left) or 0 :]
            if beside is not None:
                ahead.append(beside.submit(digest.update, piece))
                if len(ahead) > CHUNKS_AHEAD:
                    ahead.popleft().result()
            elif sealed:
                digest.update(piece)

        add(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        at = begin = LENGTH_BYTES + len(text)
        for name in order:
            for chunk in tensors[name].chunks():
                add(chunk)
                if sealed and hasattr(
                    os, "posix_fadvise"
                ):  # on Linux it begins to write what it is to forget
                    os.posix_fadvise(file.fileno(), at, chunk.nbytes, os.POSIX_FADV_DONTNEED)
                at += chunk.nbytes
                wrote(chunk.nbytes)
        while ahead:
            ahead.popleft().result()
        if sealed:
            os.fsync(file.fileno())
    offsets = {name: begin + content[name]["data_offsets"][0] for name in order}
    return offsets, {"bytes": at, "sha256": digest.hexdigest()}


def read_header(file: Path) -> dict[str, Placed]:
    """What a file holds, by name."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(file.stat().st_size - LENGTH_BYTES, MOST_HEADER_BYTES):
            raise ValueError(f"its header has {length} bytes")
        content: dict[str, Any] = json.loads(stream.read(length))
    try:
        content.pop("__metadata__", None)
        found = {}
        for name, each in content.items():
            first, last = (LENGTH_BYTES + length + offset for offset in each["data_offsets"])
            found[name] = Placed(str(each["dtype"]), tuple(each["shape"]), first, last)
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header lacks {error}") from None
