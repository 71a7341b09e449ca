"""One file of safetensors: its types, its header, and how it is written. Loads no torch.

header: name -> dtype, shape, place of its bytes        8 bytes of length, JSON, blanks
bytes of the tensors                                    widest elements first, so each is aligned
"""

from __future__ import annotations

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
    "F8_E5M2": (1, "float8_e5m2"),
}
ITEM_BYTES = {name: size for name, (size, _) in TYPES.items()}
PAIRS = {"C128": "F64"}  # safetensors has no such type: a header has two numbers for each element
LENGTH_BYTES = 8  # before the header
# Headers are filled up to a multiple of this, so slices of equal size lie at the same offset in the files of all ranks.
HEADER_STEP = 2**14
CHUNKS_AHEAD = 4  # written, and their checksum is not computed yet


class Streamed(NamedTuple):
    """A tensor to write; ``chunks`` yields its bytes in order, each piece unchanged until the file is written."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]


def write_shard(
    path: Path, tensors: Mapping[str, Streamed], *, sealed: bool = True
) -> tuple[dict[str, int], dict[str, Any]]:
    """Write a file, a piece of a tensor at a time; if ``sealed``, it is on the disk when this returns.

    Returns the first byte of each tensor; and the file's size and, if ``sealed``, checksum, as a manifest has them.
    """
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name].dtype])
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape, _ = tensors[name]
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        shape = (*shape, 2) if dtype in PAIRS else shape
        content[name] = {"dtype": PAIRS.get(dtype, dtype), "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % HEADER_STEP)
    at = first = LENGTH_BYTES + len(text)
    digest, ahead = hashlib.sha256(), deque[Future[None]]()
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:

        def add(piece: bytes | memoryview) -> None:
            file.write(piece)
            if sealed:
                ahead.append(beside.submit(digest.update, piece))
            if len(ahead) > CHUNKS_AHEAD:
                ahead.popleft().result()

        add(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in order:
            for chunk in tensors[name].chunks():
                add(chunk)
                if sealed and hasattr(os, "posix_fadvise"):  # Linux then begins to write what it is to forget
                    os.posix_fadvise(file.fileno(), at, chunk.nbytes, os.POSIX_FADV_DONTNEED)
                at += chunk.nbytes
        file.flush()
        if sealed:
            os.fsync(file.fileno())
    offsets = {name: first + content[name]["data_offsets"][0] for name in order}
    return offsets, {"bytes": at, "sha256": digest.hexdigest()}
