"""Whether the pieces of a tensor's state cover it, each element once.

A piece without gaps is a stretch of the flattened tensor. One with gaps, of a rank that holds some columns, is a
rectangle of the tensor as rows of ``stride`` elements; beside such a piece all others are rectangles of it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from determined_ds.protocol.tensor_index import EngineIndex, Piece

# First row, the row after the last, first column, the column after the last.
Rectangle: TypeAlias = tuple[int, int, int, int]


def incomplete(index: EngineIndex) -> Iterator[str]:
    """What is missing of an index's tensors, or is in it twice, in words."""
    for name, tensor in index.tensors.items():
        for state, stored in tensor.states.items():
            strides = {piece.stride for piece in stored.pieces if piece.stride}
            if strides:
                gap = _gap_in_rows(stored.pieces, max(strides), tensor.count)
            else:
                gap = _gap(stored.pieces, tensor.count)
            if gap is not None:
                yield f"elements {gap[0]} to {gap[1]} of {name} ({state})"


def _gap(pieces: Sequence[Piece], count: int) -> tuple[int, int] | None:
    end = 0
    for piece in pieces:
        if piece.start != end:
            return min(end, piece.start), max(end, piece.start)
        end = piece.start + piece.count
    return None if end == count else (end, count)


def _gap_in_rows(pieces: Sequence[Piece], width: int, count: int) -> tuple[int, int] | None:
    """The first elements that are in none, or in two, of rectangles in rows of ``width``."""
    found = sorted(each for piece in pieces for each in _rectangles(piece, width))
    edges = sorted({0, count // width, *(row for first, last, *_ in found for row in (first, last))})
    under_way: list[Rectangle] = []
    waiting = iter([*found, (edges[-1] + 1, 0, 0, 0)])
    following = next(waiting)
    for row, below in itertools.pairwise(edges):
        under_way = [each for each in under_way if each[1] > row]
        while following[0] <= row:
            under_way.append(following)
            following = next(waiting)
        column = 0
        for _, _, first, last in sorted(under_way, key=lambda each: each[2]):
            if first != column:
                return row * width + min(first, column), row * width + max(first, column)
            column = last
        if column != width:
            return row * width + column, below * width
    return None if edges[-1] * width == count else (count, edges[-1] * width)


def _rectangles(piece: Piece, width: int) -> Iterator[Rectangle]:
    row, column = divmod(piece.start, width)
    if piece.run:
        yield row, row + piece.count // piece.run, column, column + piece.run
        return
    left = piece.count
    if column and left:
        taken = min(left, width - column)
        yield row, row + 1, column, column + taken
        row, left = row + 1, left - taken
    if rows := left // width:
        yield row, row + rows, 0, width
        row += rows
    if rest := left % width:
        yield row, row + 1, 0, rest
