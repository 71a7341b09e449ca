"""Elements of a tensor, whichever files its slices are in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from determined_ds.errors import CheckpointError
from determined_ds.protocol.tensor_index import ITEM_BYTES, StoredState

# numpy's types of a file's bytes; those that it lacks are read as integers of their size.
KINDS = {
    "F64": "<f8",
    "F32": "<f4",
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
    for piece in stored.pieces:
        runs = list(piece.overlap(start, start + count))
        if not runs:
            continue
        begin, (at, _, last) = runs[0][0], runs[-1]
        read = np.fromfile(
            folder / piece.file, dtype=kind, count=at + last - begin, offset=piece.offset + begin * size
        )
        if len(read) != at + last - begin:
            raise CheckpointError(
                f"{folder / piece.file} ends before its slice of {at + last - begin} elements"
            )
        for at, first, length in runs:
            values[first - start : first - start + length] = read[at - begin : at - begin + length]
    if stored.dtype == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64) if stored.dtype in ("F32", "F16", "BF16") else values
