"""Checkpoints with an index, of any cut, without an engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from determined_ds.protocol.checkpoint_files import (
    METADATA,
    files_of,
    fingerprint,
    metadata_text,
    write_manifest,
)
from determined_ds.protocol.tensor_index import (
    BUFFER,
    TRAINED,
    EngineIndex,
    Piece,
    StoredState,
    StoredTensor,
    write_index,
)

NUMPY = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "BF16": "<u2"}
States = Mapping[str, tuple[str, np.ndarray]]  # state -> dtype and values


def made(
    path: Path,
    tensors: Mapping[str, States],
    *,
    ranks: int = 1,
    steps: int = 4,
    aliases: Mapping[str, str] | None = None,
    engine: str = "model0",
) -> Path:
    """Write a sealed checkpoint, each tensor cut into as many slices as there are ranks.

    Args:
        path: Its folder.
        tensors: Name -> states.
        ranks: How many files there are.
        steps: Batches trained.
        aliases: Other names.
        engine: The folder of the engine.
    """
    folder = path / engine
    folder.mkdir(parents=True)
    contents = [bytearray(b"header") for _ in range(ranks)]
    stored = {name: _tensor(states, contents) for name, states in tensors.items()}
    for rank, content in enumerate(contents):
        (folder / f"rank{rank}.bin").write_bytes(content)
    write_index(folder, EngineIndex(tensors=stored, aliases=aliases or {}, optimizer="AdamW"))
    sealed(path, steps)
    return path


def sealed(path: Path, steps: int) -> None:
    """Write the manifest of a folder, as it is."""
    metadata = {"steps_completed": steps, "framework": "torch-9", "determined_version": "0.38.1"}
    write_manifest(path, {name: fingerprint(path / name) for name in files_of(path)}, metadata)
    (path / METADATA).write_text(metadata_text(metadata))


def _tensor(states: States, contents: list[bytearray]) -> StoredTensor:
    shape = next(iter(states.values()))[1].shape
    kind = TRAINED if len(states) > 1 else BUFFER
    cut = {name: _state(dtype, values, contents) for name, (dtype, values) in states.items()}
    return StoredTensor(shape=shape, kind=kind, states=cut)


def _state(dtype: str, values: np.ndarray, contents: list[bytearray]) -> StoredState:
    flat, pieces = values.reshape(-1), []
    bounds = np.linspace(0, flat.size, len(contents) + 1).astype(int)
    for rank, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        part = flat[start:end]
        pieces.append(
            Piece(
                file=f"rank{rank}.bin",
                offset=len(contents[rank]),
                start=int(start),
                count=int(end - start),
                sum_of_squares=float((part.astype(np.float64) ** 2).sum()),
            )
        )
        contents[rank] += _bytes(dtype, part)
    return StoredState(dtype=dtype, pieces=tuple(pieces))


def _bytes(dtype: str, values: np.ndarray) -> bytes:
    if dtype == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(NUMPY[dtype]).tobytes()
