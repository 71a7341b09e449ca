"""The index of an engine's tensors in a checkpoint: which bytes of which file are which slice of which tensor.

    model<I>/index.json            this index
             rank<R>.safetensors   the slices that rank R wrote, see each piece

A tensor is a parameter or a buffer. It has states: ``weight``, as the model computes with it; ``fp32``, the optimizer's
copy of it, where there is one; those of the optimizer, such as ``exp_avg``; and averages, see :func:`average_state`.
Each is cut along the flattened tensor, so any rank finds any part of it, whichever ranks wrote it. Pieces of ranks that
hold some columns of a matrix (tensor parallel) have gaps. Equal pieces of consecutive ranks, as ZeRO 3 cuts every
parameter, are one entry, so the index does not grow with the ranks. Loads no torch.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from determined_ds.checkpoints.shard_file import ITEM_BYTES
from determined_ds.errors import CheckpointError

logger = logging.getLogger("determined_ds")

INDEX_NAME = "index.json"
ENGINES = "model[0-9]*"
VERSION = 3  # 1 has neither gaps nor entries of several ranks, 2 has gaps
WEIGHT, MASTER, AVERAGE = "weight", "fp32", "ema"
TRAINED, FROZEN, BUFFER = "trained", "frozen", "buffer"
IMPORTED = "imported"  # of another program, which does not say which of these it is
SUFFIX = ".safetensors"
_RANK = re.compile(r"rank(\d+)\.safetensors")


def average_state(callback: str) -> str:
    """The state that holds the average of an ``EMA`` callback of this name: ``ema``, or ``ema.NAME``."""
    return AVERAGE if callback == AVERAGE else f"{AVERAGE}.{callback}"


def is_average(state: str) -> bool:
    """Whether a state is such an average."""
    return state.partition(".")[0] == AVERAGE


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a tensor's state, in a file; or equal slices of consecutive ranks, one in the file of each.

    Args:
        file: Its name, in the folder of the index; with several ranks that of the first.
        offset: Of the first byte in the file; with several ranks in each of their files.
        start: Of the first element, in the flattened tensor.
        count: Elements in a file.
        sum_of_squares: Of all its elements; None where they are not real floating-point numbers, or unknown.
        run: Elements between two gaps, a divisor of ``count``; 0: it has no gaps.
        stride: From the first element of a run to that of the next, in the flattened tensor; 0 without gaps.
        ranks: Files; the elements of each follow those of the one before. 1 for a piece with gaps.
    """

    file: str
    offset: int
    start: int
    count: int
    sum_of_squares: float | None = None
    run: int = 0
    stride: int = 0
    ranks: int = 1

    @property
    def place(self) -> str:
        """Which elements of the tensor it is, in words that no other piece of it has."""
        return place_of(self.start, self.count, self.run, self.stride)

    def of_ranks(self, first: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """The piece in each file, or in those from the ``first`` to the one before ``stop``."""
        if self.ranks == 1:
            yield self
            return
        rank = int(_RANK.fullmatch(self.file)[1])  # type: ignore[index]  # checked by read_index
        for number in range(first, self.ranks if stop is None else min(stop, self.ranks)):
            file, start = f"rank{rank + number}{SUFFIX}", self.start + number * self.count
            yield Piece(file, self.offset, start, self.count)

    def overlap(self, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """What it has of a stretch of the flattened tensor.

        Args:
            start: The first element of the stretch.
            stop: The element after its last.

        Yields:
            For each run: its file, where it begins in the piece in that file, where in the tensor, and its elements.
        """
        if self.run:
            low = max(0, (start - self.start - self.run) // self.stride + 1)
            high = min(self.count // self.run, -(-(stop - self.start) // self.stride))
            for row in range(low, high):
                begin = self.start + row * self.stride
                first, last = max(start, begin), min(stop, begin + self.run)
                if first < last:
                    yield self.file, row * self.run + first - begin, first, last - first
        elif start < self.start + self.count * self.ranks and stop > self.start:
            low, high = max(0, start - self.start) // self.count, -(-(stop - self.start) // self.count)
            for each in self.of_ranks(low, high):
                first, last = max(start, each.start), min(stop, each.start + each.count)
                yield each.file, first - each.start, first, last - first


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
    def count(self) -> int:
        """Elements."""
        return sum(piece.count * piece.ranks for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.count * ITEM_BYTES[self.dtype]

    def places(self, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Where a stretch of the flattened tensor lies: of each part its file, first byte, first element, elements."""
        size = ITEM_BYTES[self.dtype]
        for piece in self.pieces:
            for file, at, first, count in piece.overlap(start, stop):
                yield file, piece.offset + at * size, first, count


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

    @property
    def num_parameters(self) -> int:
        """Elements of its parameters, tied ones once."""
        return sum(tensor.count for tensor in self.tensors.values() if tensor.kind != BUFFER)


def incomplete(index: EngineIndex) -> Iterator[str]:
    """What is missing of an index's tensors, or is in it twice, in words."""
    for name, tensor in index.tensors.items():
        for state, stored in tensor.states.items():
            end, next_start, starts = 0, tensor.count, {piece.start for piece in stored.pieces}
            # Rectangles of columns lie between each other: their count tells, and that no two begin alike.
            has_gaps = any(piece.run for piece in stored.pieces)
            for piece in stored.pieces:
                if piece.start != end and not has_gaps:
                    next_start = piece.start
                    break
                end += piece.count * piece.ranks
            if end != next_start or (has_gaps and len(starts) < len(stored.pieces)):
                yield f"elements {min(end, next_start)} to {max(end, next_start)} of {name} ({state})"


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces in their order, equal ones of consecutive ranks as one."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: each.start):
        before, rank = found[-1] if found else None, _RANK.fullmatch(piece.file)
        if before and rank and not before.run and not piece.run and before.count == piece.count:
            first = _RANK.fullmatch(before.file)
            follows = first and int(first[1]) + before.ranks == int(rank[1])
            if follows and (before.start + before.ranks * before.count, before.offset) == (
                piece.start,
                piece.offset,
            ):
                squares = (before.sum_of_squares, piece.sum_of_squares)
                total = None if None in squares else sum(each for each in squares if each is not None)
                found[-1] = replace(before, ranks=before.ranks + 1, sum_of_squares=total)
                continue
        found.append(piece)
    return tuple(found)


# ------------------------------------------------------------------------------------------- what ranks wrote


class Written(NamedTuple):
    """A slice that a rank wrote: name and state of the tensor, type by safetensors' name, place."""

    name: str
    state: str
    dtype: str
    piece: Piece


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


def index_of(ranks: Sequence[Described], entries: Iterable[Written]) -> EngineIndex:
    """The index over what all ranks wrote.

    Args:
        ranks: The tensors of each rank.
        entries: What they wrote.

    Raises:
        CheckpointError: ranks have written a slice twice, or not at all.
    """
    for shared in {name for rank in ranks for name in rank.shared}:
        norms = {rank.shared[shared] for rank in ranks if shared in rank.shared}
        if len(norms) > 1:
            logger.warning(
                "warning: pipeline stages share %s, and hold it with norms from %r to %r: the checkpoint has that of "
                "the first stage\n  fix: change a tied weight on all of its stages alike, or let the optimizer do it",
                *(shared, min(norms), max(norms)),
            )
    kinds = {name: kind for rank in ranks for name, kind in rank.kinds.items()}
    names = list(kinds)
    if all(
        name.partition(".")[0].isdigit() for name in names
    ):  # of a pipeline: by layers, whoever holds them
        names.sort(key=lambda name: int(name.partition(".")[0]))
    scalars = {name: numbers for rank in ranks for name, numbers in rank.scalars.items()}
    pieces: dict[str, dict[str, tuple[str, list[Piece]]]] = {name: {} for name in names}
    for entry in entries:
        pieces[entry.name].setdefault(entry.state, (entry.dtype, []))[1].append(entry.piece)
    tensors = {}
    for name in names:
        states = {
            state: StoredState(dtype=dtype, pieces=joined(found))
            for state, (dtype, found) in pieces[name].items()
        }
        shape, kind = kinds[name]
        tensors[name] = StoredTensor(shape=shape, kind=kind, states=states, scalars=scalars.get(name, {}))
        if tensors[name].count and not states:
            raise CheckpointError(f"no rank has written {name} ({WEIGHT})")
    index = EngineIndex(
        tensors=tensors,
        aliases={alias: name for rank in ranks for alias, name in rank.aliases.items()},
        common={alias: name for rank in ranks for alias, name in rank.common.items()},
        optimizer=ranks[0].optimizer,
    )
    if missing := next(iter(incomplete(index)), None):
        raise CheckpointError(f"{missing} were written twice or not at all: ranks disagree on who holds them")
    return index


# ------------------------------------------------------------------------------------------- the file


def write_index(folder: Path, index: EngineIndex) -> None:
    """Write ``index.json`` into an engine's folder."""
    version = 1
    tensors: dict[str, Any] = {}
    for name, tensor in index.tensors.items():
        states = {}
        for state, stored in tensor.states.items():
            pieces = []
            for piece in stored.pieces:
                needed = 8 if piece.ranks > 1 else 7 if piece.run else 5
                version = max(version, {5: 1, 7: 2, 8: 3}[needed])
                pieces.append(astuple(piece)[:needed])
            states[state] = {"dtype": stored.dtype, "pieces": pieces}
        tensors[name] = {"shape": tensor.shape, "kind": tensor.kind, "states": states}
        if tensor.scalars:
            tensors[name]["scalars"] = dict(tensor.scalars)
    content = {"version": version, **asdict(replace(index, tensors={})), "tensors": tensors}
    (folder / INDEX_NAME).write_text(json.dumps(content, separators=(",", ":")) + "\n")


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
        content = json.loads(place.read_bytes())
        if _whole(content["version"], "its version") > VERSION:
            raise CheckpointError(
                f"{place} is of version {content['version']}, and this determined_ds reads up to version "
                f"{VERSION}\n  fix: update determined_ds"
            )
        return EngineIndex(
            tensors={name: _tensor(name, given) for name, given in content["tensors"].items()},
            aliases={alias: str(name) for alias, name in content["aliases"].items()},
            common={alias: str(name) for alias, name in content["common"].items()},
            optimizer=str(content["optimizer"]),
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        why = str(error.strerror)
    except KeyError as error:
        why = f"it has no {error}"
    except UnicodeDecodeError:
        why = "it is not JSON"
    except json.JSONDecodeError as error:
        why = f"it is not JSON: {error}"
    except ValueError as error:
        why = str(error)
    except (TypeError, AttributeError):
        why = "its values are of other types"
    raise UnreadableIndexError(
        f"{place} cannot be read: {why}\n  fix: use another checkpoint, or copy the file again"
    )


def _tensor(name: str, given: Mapping[str, Any]) -> StoredTensor:
    states = {}
    for state, stored in given["states"].items():
        dtype = stored["dtype"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ValueError(f"{name} is of type {dtype!r}, which is none of {', '.join(ITEM_BYTES)}")
        states[state] = StoredState(
            dtype=dtype, pieces=tuple(_piece(name, each) for each in stored["pieces"])
        )
    return StoredTensor(
        shape=tuple(_whole(size, f"the shape of {name}") for size in given["shape"]),
        kind=str(given["kind"]),
        states=states,
        scalars={key: float(value) for key, value in given.get("scalars", {}).items()},
    )


def _piece(name: str, given: Sequence[Any]) -> Piece:
    piece = Piece(*given)
    # Nothing outside the folder is read.
    if not isinstance(piece.file, str) or Path(piece.file).name != piece.file or piece.file == "..":
        raise ValueError(f"{name} is in {piece.file!r}, which is not the name of a file in this folder")
    for what in ("offset", "start", "count", "run", "stride", "ranks"):
        _whole(getattr(piece, what), f"the {what} of {name}")
    if piece.run and (piece.count % piece.run or piece.stride < piece.run):
        raise ValueError(f"{name} has runs of {piece.run} elements, {piece.stride} apart, of {piece.count}")
    if piece.ranks != 1 and (piece.run or not piece.ranks or not _RANK.fullmatch(piece.file)):
        raise ValueError(f"{name} has a piece of {piece.ranks} ranks in {piece.file}")
    square = piece.sum_of_squares
    return piece if square is None else replace(piece, sum_of_squares=float(square))


def _whole(given: Any, what: str) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise ValueError(f"{what} is {given!r}, not a count")
    return given
