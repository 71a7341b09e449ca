"""Checkpoints written by hand, file by file as the format says, in any cut and without an engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.package import reseal

NUMPY = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "BF16": "<u2"}
States = Mapping[str, tuple[str, np.ndarray]]  # state -> dtype and values


def made(
    path: Path,
    tensors: Mapping[str, States],
    *,
    ranks: int = 1,
    aliases: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a sealed checkpoint, each tensor cut into as many slices as there are ranks; ``files`` are more of them."""
    folder = path / "model0"
    folder.mkdir(parents=True)
    contents = [bytearray(b"header") for _ in range(ranks)]
    index = {
        "version": 5,
        "optimizer": "AdamW",
        "aliases": dict(aliases or {}),
        "common": {},
        "tensors": {name: _tensor(states, contents) for name, states in tensors.items()},
    }
    (folder / "index.json").write_text(json.dumps(index))
    for rank, content in enumerate(contents):
        (folder / f"rank{rank}.bin").write_bytes(content)
    metadata = {"determined_version": "0.38.1", "steps_completed": 4, "framework": "torch-9"}
    for name, text in {"metadata.json": json.dumps(metadata), **(files or {})}.items():
        (path / name).write_text(text)
    reseal(path)
    return path


def _tensor(states: States, contents: list[bytearray]) -> dict[str, Any]:
    shape = next(iter(states.values()))[1].shape
    cut = {name: _state(dtype, values, contents) for name, (dtype, values) in states.items()}
    return {"shape": list(shape), "kind": "trained" if len(states) > 1 else "buffer", "states": cut}


def _state(dtype: str, values: np.ndarray, contents: list[bytearray]) -> dict[str, Any]:
    flat, pieces = values.reshape(-1), []
    bounds = np.linspace(0, flat.size, len(contents) + 1).astype(int)
    for rank, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        part = flat[start:end]
        pieces.append([f"rank{rank}.bin", len(contents[rank]), int(start), int(end - start)])
        contents[rank] += _bytes(dtype, part)
    return {"dtype": dtype, "pieces": pieces}


def _bytes(dtype: str, values: np.ndarray) -> bytes:
    if dtype == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(NUMPY[dtype]).tobytes()
