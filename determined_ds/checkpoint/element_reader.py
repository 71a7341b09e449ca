"""Elements of a tensor, whichever files its slices are in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from determined_ds.checkpoints.index import StoredState
from determined_ds.checkpoints.shard_file import ITEM_BYTES
from determined_ds.errors import CheckpointError

# numpy's types of a file's bytes; those that it lacks are read as integers of their size.
KINDS = {
    "F64": "<f8",
    "F32": "<f4",
    "C128": "<c16",
    "C64": "<c8",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "BOOL": "u1",
    **{f"{sign}{bits}": f"<{sign.lower()}{bits // 8}" for sign in "IU" for bits in (8, 16, 32, 64)},
}


def read_elements(folder: Path, stored: StoredState, start: int, count: int) -> Any:
    """Consecutive elements of a flattened tensor, as numbers that can be compared across types.

    Args:
        folder: Of the index.
        stored: The state of a tensor.
        start: The first element.
        count: How many.

    Returns:
        A numpy array: floating-point numbers as float64, of bf16 too; others as they are.

    Raises:
        CheckpointError: a file ends before its slice.
    """
    import numpy as np

    kind, size = np.dtype(KINDS[stored.dtype]), ITEM_BYTES[stored.dtype]
    values = np.empty(count, dtype=kind)
    files: dict[str, Any] = {}
    for file, offset, first, length in stored.places(start, start + count):
        if file not in files:
            files[file] = np.memmap(folder / file, dtype=np.uint8, mode="r")
        read = files[file][offset : offset + length * size]
        if len(read) != length * size:
            raise CheckpointError(f"{folder / file} ends before its slice of {length} elements")
        values[first - start : first - start + length] = np.frombuffer(read, dtype=kind)
    if stored.dtype == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64) if stored.dtype in ("F32", "F16", "BF16") else values
