"""The index of an engine's tensors in a checkpoint: which bytes of which file are which slice of which tensor.

    model<I>/index.json            this index
             rank<R>.safetensors   the slices that rank R wrote, see each piece

A tensor is a parameter or a buffer. It has states: ``weight``, as the model computes with it; ``fp32``, the optimizer's
copy of it, where there is one; and those of the optimizer, such as ``exp_avg``. Each is cut along the flattened tensor,
so any rank finds any part of it, whichever ranks wrote it. Pieces of ranks that hold some columns of a matrix (tensor
parallel) have gaps: an index with such a piece is of version 2. Loads no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.errors import CheckpointError

INDEX_NAME = "index.json"
VERSION = 2
WITHOUT_GAPS = 1
WEIGHT, MASTER = "weight", "fp32"
TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"
# Of another program, which does not say which of these it is.
IMPORTED = "imported"
# Bytes of an element, by the names of safetensors.
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A slice of a tensor's state, in a file.

    Args:
        file: Its name, in the folder of the index.
        offset: Of the first byte in the file.
        start: Of the first element, in the flattened tensor.
        count: Elements.
        sum_of_squares: Of its elements; None where they are not floating-point numbers, or unknown.
        run: Elements between two gaps, a divisor of ``count``; 0: it has no gaps.
        stride: From the first element of a run to that of the next, in the flattened tensor; 0 without gaps.
    """

    file: str
    offset: int
    start: int
    count: int
    sum_of_squares: float | None = None
    run: int = 0
    stride: int = 0

    @property
    def place(self) -> str:
        """Which elements of the tensor it is, in words that no other piece of it has."""
        return place_of(self.start, self.count, self.run, self.stride)

    def overlap(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """What it has of a stretch of the flattened tensor.

        Args:
            start: The first element of the stretch.
            stop: The element after its last.

        Yields:
            For each run: where it begins in the piece, where in the tensor, and how many elements it has.
        """
        if not self.run:
            first, last = max(start, self.start), min(stop, self.start + self.count)
            if first < last:
                yield first - self.start, first, last - first
            return
        rows = self.count // self.run
        low = max(0, (start - self.start - self.run) // self.stride + 1)
        high = min(rows, -(-(stop - self.start) // self.stride))
        for row in range(low, high):
            begin = self.start + row * self.stride
            first, last = max(start, begin), min(stop, begin + self.run)
            if first < last:
                yield row * self.run + first - begin, first, last - first


def place_of(start: int, count: int, run: int = 0, stride: int = 0) -> str:
    """See :attr:`Piece.place`."""
    return f"{start}:{start + count}" if not run else f"{start}:{run} of {stride} x {count // run}"


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """One state of a tensor.

    Args:
        dtype: By safetensors' name, e.g. ``BF16``.
        pieces: In order of ``start``; together they have each element once.
    """

    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def norm(self) -> float | None:
        """The square root of the sum of squares; None if unknown."""
        squares = [piece.sum_of_squares for piece in self.pieces]
        known = [square for square in squares if square is not None]
        return math.sqrt(sum(known)) if len(known) == len(squares) else None

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return sum(piece.count for piece in self.pieces) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A parameter or a buffer.

    Args:
        shape: Of the whole.
        kind: ``trained``, ``frozen``, ``buffer`` or ``imported``.
        states: Name -> state.
        scalars: The optimizer's numbers of it, such as ``step``.
    """

    shape: tuple[int, ...]
    kind: str
    states: Mapping[str, StoredState]
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class EngineIndex:
    """What a checkpoint holds of one engine.

    Args:
        tensors: Name -> tensor.
        aliases: Other names of the same tensors, of weights that are tied: name -> name in ``tensors``.
        common: Names that all forms of the model have in common (``weight_names`` of its trial) -> name in ``tensors``.
        optimizer: The class of the optimizer; empty where there is none.
    """

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    common: Mapping[str, str] = field(default_factory=dict)
    optimizer: str = ""


def write_index(folder: Path, index: EngineIndex) -> None:
    """Write ``index.json`` into an engine's folder."""
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "kind": tensor.kind,
            "states": {
                state: {
                    "dtype": stored.dtype,
                    "pieces": [_listed(each) for each in stored.pieces],
                }
                for state, stored in tensor.states.items()
            },
            **({"scalars": dict(tensor.scalars)} if tensor.scalars else {}),
        }
        for name, tensor in index.tensors.items()
    }
    stored_states = (stored for tensor in index.tensors.values() for stored in tensor.states.values())
    has_gaps = any(piece.run for stored in stored_states for piece in stored.pieces)
    content = {
        "version": VERSION if has_gaps else WITHOUT_GAPS,
        "optimizer": index.optimizer,
        "aliases": dict(index.aliases),
        "common": dict(index.common),
        "tensors": tensors,
    }
    (folder / INDEX_NAME).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def _listed(piece: Piece) -> list[Any]:
    gaps = [piece.run, piece.stride] if piece.run else []
    return [piece.file, piece.offset, piece.start, piece.count, piece.sum_of_squares, *gaps]


class UnreadableIndexError(CheckpointError):
    """An ``index.json`` is not one."""


def read_index(folder: Path) -> EngineIndex | None:
    """The index in an engine's folder; None where there is none.

    Raises:
        UnreadableIndexError: it is not one.
        CheckpointError: a later version wrote it.
    """
    place = folder / INDEX_NAME
    try:
        text = place.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableIndexError(_unreadable(place, str(error.strerror))) from None
    try:
        content = json.loads(text)
        if _whole(content["version"], "its version") > VERSION:
            raise CheckpointError(
                f"{place} is of version {content['version']}, and this determined_ds reads up to version "
                f"{VERSION}\n  fix: update determined_ds"
            )
        return EngineIndex(
            tensors={name: _tensor(name, given) for name, given in content["tensors"].items()},
            aliases=_names(content["aliases"]),
            common=_names(content["common"]),
            optimizer=str(content["optimizer"]),
        )
    except KeyError as error:
        raise UnreadableIndexError(_unreadable(place, f"it has no {error}")) from None
    except UnicodeDecodeError:
        raise UnreadableIndexError(_unreadable(place, "it is not JSON")) from None
    except json.JSONDecodeError as error:
        raise UnreadableIndexError(_unreadable(place, f"it is not JSON: {error}")) from None
    except ValueError as error:
        raise UnreadableIndexError(_unreadable(place, str(error))) from None
    except (TypeError, AttributeError):
        raise UnreadableIndexError(_unreadable(place, "its values are of other types")) from None


def _unreadable(place: Path, why: str) -> str:
    return f"{place} cannot be read: {why}\n  fix: use another checkpoint, or copy the file again"


def _tensor(name: str, given: Mapping[str, Any]) -> StoredTensor:
    states = {
        state: StoredState(
            dtype=_dtype(name, stored["dtype"]),
            pieces=tuple(_piece(name, *each) for each in stored["pieces"]),
        )
        for state, stored in given["states"].items()
    }
    shape = tuple(_whole(size, f"the shape of {name}") for size in given["shape"])
    scalars = {key: float(value) for key, value in given.get("scalars", {}).items()}
    return StoredTensor(shape=shape, kind=str(given["kind"]), states=states, scalars=scalars)


def _dtype(name: str, given: Any) -> str:
    if not isinstance(given, str) or given not in ITEM_BYTES:
        raise ValueError(f"{name} is of type {given!r}, which is none of {', '.join(ITEM_BYTES)}")
    return given


def _piece(
    name: str,
    file: str,
    offset: int,
    start: int,
    count: int,
    sum_of_squares: float | None,
    run: int = 0,
    stride: int = 0,
) -> Piece:
    if _whole(run, f"the run of {name}") and (count % run or _whole(stride, f"the stride of {name}") < run):
        raise ValueError(f"{name} has runs of {run} elements, {stride} apart, of {count}")
    if (
        not isinstance(file, str) or Path(file).name != file or file == ".."
    ):  # nothing outside the folder is read
        raise ValueError(f"{name} is in {file!r}, which is not the name of a file in this folder")
    return Piece(
        file=file,
        offset=_whole(offset, f"the offset of {name}"),
        start=_whole(start, f"the start of {name}"),
        count=_whole(count, f"the count of {name}"),
        sum_of_squares=None if sum_of_squares is None else float(sum_of_squares),
        run=run,
        stride=stride,
    )


def _whole(given: Any, what: str) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise ValueError(f"{what} is {given!r}, not a count")
    return given


def _names(given: Mapping[str, Any]) -> dict[str, str]:
    return {alias: str(name) for alias, name in given.items()}
