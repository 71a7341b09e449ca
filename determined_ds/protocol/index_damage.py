"""Whether the index of an engine's tensors agrees with the files beside it. Loads no torch.

1. Each file that the index names is there, and long enough.
2. What the index says of a slice is what the header of its file says: name, type, place.
3. What a header of a rank's file names is in the index: nothing is left out.
4. What belongs to the tensors is there: settings of the optimizer, the part of each rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from determined_ds.protocol.index_gaps import incomplete
from determined_ds.protocol.tensor_index import (
    ITEM_BYTES,
    EngineIndex,
    Piece,
    UnreadableIndexError,
    read_index,
)

ENGINES = "model[0-9]*"
LENGTH_BYTES = 8  # before the header of a file of safetensors
MOST_HEADER_BYTES = 100_000_000  # as safetensors itself reads
SUFFIX = ".safetensors"
# Name in the header -> its type and its first and last byte in the file.
Header = Mapping[str, tuple[str, int, int]]


def index_damages(path: Path) -> Iterator[str]:
    """What is wrong with the engines of a checkpoint that were written as slices, and with what belongs to them.

    Args:
        path: The checkpoint's folder.

    Raises:
        CheckpointError: a later version wrote an index.
    """
    ranks = _num_writers(path)
    for folder in sorted(path.glob(ENGINES)):
        try:
            index = read_index(folder)
        except UnreadableIndexError as error:
            yield str(error).partition("\n  fix: ")[0]
            continue
        if index is None:
            continue
        yield from _engine_damages(folder, index)
        if ranks and not any(folder.glob("settings_stage*.pt")):
            yield f"{folder.name}/settings_stage0.pt is missing"
    for rank in range(ranks):
        if not (path / f"det_state_dict_rank{rank}.pth").is_file():
            yield f"det_state_dict_rank{rank}.pth is missing"


def _num_writers(path: Path) -> int:
    """How many ranks say that they wrote a checkpoint; 0 if unknown."""
    try:
        return int(json.loads((path / "load_data.json").read_bytes())["written_by"]["ranks"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _engine_damages(folder: Path, index: EngineIndex) -> Iterator[str]:
    yield from (f"{folder.name} lacks {missing}" for missing in incomplete(index))
    slices: dict[str, dict[str, tuple[str, Piece]]] = {}
    for name, tensor in index.tensors.items():
        if tensor.count and not tensor.states:
            yield f"{folder.name} lacks all of {name}"
        for state, stored in tensor.states.items():
            for piece in stored.pieces:
                key = f"{name}/{state}[{piece.place}]"
                slices.setdefault(piece.file, {})[key] = (stored.dtype, piece)
    for file in sorted({*slices, *(found.name for found in folder.glob(f"rank*{SUFFIX}"))}):
        yield from _file_damages(folder / file, slices.get(file, {}))


def _file_damages(file: Path, slices: Mapping[str, tuple[str, Piece]]) -> Iterator[str]:
    name = f"{file.parent.name}/{file.name}"
    try:
        if not file.is_file():
            yield f"{name} is missing"
            return
        size = file.stat().st_size
        header = _header_of(file, size) if file.suffix == SUFFIX else None
    except OSError as error:
        yield f"{name} cannot be read: {error.strerror}"
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"{name} is not a file of safetensors"
        return
    # An imported file has whole tensors, by names of its own.
    unsliced = {place for key, place in (header or {}).items() if not key.endswith("]")}
    for key, (dtype, piece) in slices.items():
        end = piece.offset + piece.count * ITEM_BYTES[dtype]
        if end > size:
            yield f"{name} has {size} bytes, and ends before {key}"
            return
        place = (dtype, piece.offset, end)
        if header is not None and header.get(key) != place and place not in unsliced:
            yield f"{name} does not hold {key} where the index says"
            return
    left_out = next((key for key in header or () if key.endswith("]") and key not in slices), None)
    if left_out is not None:
        yield f"{name} holds {left_out}, which is not in the index"


def _header_of(file: Path, size: int) -> Header:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
            raise ValueError("no header")
        content: dict[str, Any] = json.loads(stream.read(length))
    content.pop("__metadata__", None)
    begin = LENGTH_BYTES + length
    return {
        key: (str(each["dtype"]), begin + each["data_offsets"][0], begin + each["data_offsets"][1])
        for key, each in content.items()
    }
