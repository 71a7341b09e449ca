"""The index of an engine's tensors in a checkpoint: which bytes of which file are which slice of which tensor.

    model<I>/index.json            this index
             rank<R>.safetensors   the slices that rank R wrote, see each piece

A tensor is a parameter or a buffer. It has states: ``weight``, as the model computes with it; ``fp32``, the optimizer's
copy of it, where there is one; and those of the optimizer, such as ``exp_avg``.
Each is cut along the flattened tensor, so any rank finds any part of it, whichever ranks wrote it. Pieces of ranks that
hold some columns of a matrix (tensor parallel) have gaps. Equal pieces of consecutive ranks, as ZeRO 3 cuts every
parameter, are one entry, so the index does not grow with the ranks. Each rank describes what it wrote by such an index,
and rank 0 merges them. Loads no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from determined_ds.checkpoints.shard_file import ITEM_BYTES
from determined_ds.errors import CheckpointError

INDEX_NAME = "index.json"
ENGINES = "model[0-9]*"
WEIGHT, MASTER = "weight", "fp32"
TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"
IMPORTED = "imported"  # of another program, which does not say which of these it is
_RANK = re.compile(r"rank(\d+)\.safetensors")


def _rank_of(file: str) -> int:
    found = _RANK.fullmatch(file)
    return int(found[1]) if found else -1


Count = Annotated[int, Field(ge=0, strict=True)]


class Piece(NamedTuple):
    """A slice of a tensor's state, in a file; or equal slices of consecutive ranks, one in the file of each."""

    # Its name, in the folder of the index; with several ranks that of the first.
    file: str
    offset: Count  # of the first byte in the file; with several ranks in each of their files
    start: Count  # of the first element, in the flattened tensor
    length: Count  # elements in a file
    run: Count = 0  # elements between two gaps, a divisor of ``length``; 0: it has no gaps
    stride: Count = 0  # from the beginning of a run to that of the next, in the flattened tensor
    ranks: Count = 1  # files; the elements of each follow those of the one before. 1 for a piece with gaps

    def overlap(self, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """What it has of a stretch of the flattened tensor: file, first element in it and in the tensor, how many."""
        # Stretches of one size at equal distances: the runs in a file, or what is in the file of each rank.
        size, distance = self.run or self.length, self.stride or self.length or 1
        count = self.length // self.run if self.run else self.ranks
        low = max(0, (start - self.start - size) // distance + 1)
        for number in range(low, min(count, -(-(stop - self.start) // distance))):
            begin, file = self.start + number * distance, self.file
            if number and not self.run:
                file = f"rank{_rank_of(file) + number}.safetensors"
            first, last = max(start, begin), min(stop, begin + size)
            if first < last:
                yield file, first - begin + number * self.run, first, last - first


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """One state of a tensor."""

    dtype: str  # by safetensors' name, e.g. ``BF16``
    pieces: list[Piece]  # in order of ``start``; together they have each element once

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"type {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        for file, _, _, length, run, stride, ranks in self.pieces:
            if "/" in file or file in (".", ".."):  # nothing outside the folder is read
                raise ValueError(f"{file!r} is not the name of a file in this folder")
            if run and (length % run or stride < run):
                raise ValueError(f"runs of {run} elements, {stride} apart, are not {length}")
            if ranks != 1 and (run or not ranks or _rank_of(file) < 0):
                raise ValueError(f"{file} is not the first file of {ranks} ranks")

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return sum(piece.length * piece.ranks for piece in self.pieces) * ITEM_BYTES[self.dtype]

    def places(self, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Where a stretch of the flattened tensor lies: of each part its file, first byte, first element, elements."""
        for piece in self.pieces:
            for file, at, first, count in piece.overlap(start, stop):
                yield file, piece.offset + at * ITEM_BYTES[self.dtype], first, count

    def missing(self, count: int) -> tuple[int, int] | None:
        """The first of ``count`` elements that no piece has, or several, and their end; None where all are there."""
        # Rectangles of columns lie between each other: their count tells, and that no two begin alike.
        has_gaps = any(piece.run for piece in self.pieces)
        end, following = 0, count
        for piece in self.pieces:
            if piece.start != end and not has_gaps:
                following = piece.start
                break
            end += piece.length * piece.ranks
        is_double = has_gaps and len({each.start for each in self.pieces}) < len(self.pieces)
        return (min(end, following), max(end, following)) if end != following or is_double else None


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A parameter or a buffer."""

    shape: tuple[Count, ...]  # of the whole
    kind: str  # ``trained``, ``frozen``, ``buffer`` or ``imported``
    states: dict[str, StoredState] = field(default_factory=dict)  # by name
    scalars: dict[str, float] = field(default_factory=dict)  # numbers of the optimizer, such as ``step``

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class EngineIndex:
    """What a checkpoint holds of one engine, or what a rank wrote of it."""

    version: Literal[5] = 5  # others are not read
    tensors: dict[str, StoredTensor]  # by name
    # Other names of the same tensors, of weights that are tied: name -> name in ``tensors``.
    aliases: dict[str, str] = field(default_factory=dict)
    # Names that all forms of the model have in common (``weight_names`` of its trial) -> name in ``tensors``.
    common: dict[str, str] = field(default_factory=dict)
    optimizer: str = ""  # the class of the optimizer; empty where there is none

    @property
    def num_parameters(self) -> int:
        """Elements of its parameters, tied ones once."""
        return sum(tensor.count for tensor in self.tensors.values() if tensor.kind != BUFFER)

    def names_of(self, name: str) -> list[str]:
        """All names of a tensor: those that forms of the model have in common, its own, and its aliases."""
        common, aliases = (
            [other for other, own in names.items() if own == name] for names in (self.common, self.aliases)
        )
        return [*common, name, *aliases]

    def find(self, names: Iterable[str]) -> str | None:
        """The key in ``tensors`` of a tensor with these :meth:`names_of` in another index; None where it is not there.

        The names that forms have in common come first: one of a single form may be that of another tensor in the other.
        """
        own = (self.common.get(name) or self.aliases.get(name, name) for name in names)
        return next((name for name in own if name in self.tensors), None)

    def missing(self) -> str | None:
        """The first elements that no piece has, or several; None where each is there once."""
        for name, tensor in self.tensors.items():
            for state, stored in tensor.states.items():
                if found := stored.missing(tensor.count):
                    return f"elements {found[0]} to {found[1]} of {name} ({state})"
        return None


# ------------------------------------------------------------------------------------------- what ranks wrote


def merged(parts: Sequence[EngineIndex]) -> EngineIndex:
    """The index of an engine, from what each rank says that it wrote.

    Raises:
        CheckpointError: an element was not written, or twice.
    """
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            whole = tensors.setdefault(name, replace(tensor, states={}, scalars={}))
            whole.scalars.update(tensor.scalars)
            for state, stored in tensor.states.items():
                found = whole.states.setdefault(state, replace(stored, pieces=[]))
                found.pieces.extend(stored.pieces)
    for name, tensor in tensors.items():
        if tensor.count and not tensor.states:
            raise CheckpointError(f"no rank has written {name} ({WEIGHT})")
        for stored in tensor.states.values():
            stored.pieces[:] = _joined(stored.pieces)

    def layer(name: str) -> int:  # of a pipeline; whoever holds it
        number = name.partition(".")[0]
        return int(number) if number.isdecimal() else 0

    index = EngineIndex(
        tensors={name: tensors[name] for name in sorted(tensors, key=layer)},
        aliases={alias: name for part in parts for alias, name in part.aliases.items()},
        common={other: name for part in parts for other, name in part.common.items()},
        optimizer=parts[0].optimizer,
    )
    if missing := index.missing():
        raise CheckpointError(f"{missing} were written twice or not at all: ranks disagree on who holds them")
    return index


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces in their order, equal ones of consecutive ranks as one."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: each.start):
        rank, before = _rank_of(piece.file), found[-1] if found else piece
        follows = before._replace(file=piece.file, start=before.start + before.ranks * before.length, ranks=1)
        if rank > 0 and not piece.run and follows == piece and _rank_of(before.file) + before.ranks == rank:
            found[-1] = before._replace(ranks=before.ranks + 1)
        else:
            found.append(piece)
    return found


# ------------------------------------------------------------------------------------------- the file

_INDEX = TypeAdapter(EngineIndex)


def write_index(folder: Path, index: EngineIndex) -> None:
    """Write ``index.json`` into an engine's folder."""
    (folder / INDEX_NAME).write_text(json.dumps(asdict(index), separators=(",", ":")) + "\n")


def read_index(folder: Path) -> EngineIndex | None:
    """The index in an engine's folder; None where there is none."""
    try:
        return _INDEX.validate_json((folder / INDEX_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        why = repr(error)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = ": ".join([*map(str, first["loc"]), first["msg"]])
    fix = "use another checkpoint, copy the file again, or read it by the determined_ds that wrote it"
    raise CheckpointError(f"{folder / INDEX_NAME} cannot be read: {why}\n  fix: {fix}")
