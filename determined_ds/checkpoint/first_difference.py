"""Where two checkpoints differ, tensor by tensor, whichever ranks and strategies wrote them.

Elements are compared as numbers, a part of a tensor at a time. DeepSpeed's own files have no index: torch reads them.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from determined_ds.checkpoint.element_reader import read_elements
from determined_ds.checkpoints.index import (
    INDEX_NAME,
    MASTER,
    WEIGHT,
    EngineIndex,
    StoredState,
    read_index,
)
from determined_ds.errors import CheckpointError

CHUNK = 2**22  # elements
ONLY_FIRST, ONLY_SECOND = "only in the first", "only in the second"


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that differs.

    Args:
        engine: Its folder, ``model0``.
        tensor: Its name; empty for a whole engine.
        state: ``weight``, ``fp32``, one of the optimizer's; empty for the whole tensor.
        message: What differs.
        place: Index of the first element that differs, by dimension; None where no elements were compared.
        values: That element in both.
        num_elements: How many differ.
        largest: The largest absolute difference.
    """

    engine: str
    tensor: str
    state: str
    message: str
    place: tuple[int, ...] | None = None
    values: tuple[float, float] | None = None
    num_elements: int = 0
    largest: float | None = None


def differences(
    first: Path, second: Path, *, weights_only: bool = False, tolerance: float = 0.0
) -> Iterator[TensorDifference]:
    """Every tensor in which two checkpoints differ, in the order of the first.

    Args:
        first: The folder of a checkpoint.
        second: Of the other.
        weights_only: Leave out the optimizer's states.
        tolerance: Elements whose absolute difference is at most this are equal.

    Raises:
        CheckpointError: one of them has no tensors that can be read.
    """
    here, there = (_engines(path) for path in (first, second))
    for name in sorted({*here, *there}):
        if name not in here or name not in there:
            message = f"engine {ONLY_FIRST if name in here else ONLY_SECOND}"
            yield TensorDifference(engine=name, tensor="", state="", message=message)
            continue
        first_tensors, second_tensors = opened(here[name]), opened(there[name])
        yield from _Comparison(
            engine=name,
            first=first_tensors,
            second=second_tensors,
            weights_only=weights_only,
            tolerance=tolerance,
        ).run()


def knows_optimizers(path: Path) -> bool:
    """Whether the optimizer's states can be compared: DeepSpeed does not name those of an engine without ZeRO."""
    folders = _engines(path).values()
    unindexed = (opened(folder) for folder in folders if not (folder / INDEX_NAME).is_file())
    return all(
        any(tensor.states.keys() - {WEIGHT, MASTER} for tensor in tensors.index.tensors.values())
        for tensors in unindexed
    )


def _engines(path: Path) -> dict[str, Path]:
    found = {folder.name: folder for folder in sorted(path.glob("model*")) if folder.is_dir()}
    if not found:
        raise CheckpointError(
            f"{path} has no folder model0 of an engine: a loop of this library did not write it"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Of one engine in two checkpoints; its arguments are those of :func:`differences`."""

    engine: str
    first: Tensors
    second: Tensors
    weights_only: bool
    tolerance: float

    def run(self) -> Iterator[TensorDifference]:
        here, there = self.first.index, self.second.index
        pairs: list[tuple[str | None, str | None]] = [
            (name, counterpart(here, name, there)) for name in here.tensors
        ]
        paired = {second for _, second in pairs}
        pairs += [(counterpart(there, name, here), name) for name in there.tensors if name not in paired]
        for one, other in pairs:
            if one is None or other is None:
                yield self._of(one or other or "", "", ONLY_FIRST if one else ONLY_SECOND)
                continue
            shapes = (here.tensors[one].shape, there.tensors[other].shape)
            if shapes[0] != shapes[1]:
                yield self._of(one, "", f"the shape is {list(shapes[0])} and {list(shapes[1])}")
            else:
                yield from self._in_tensor(one, other)

    def _of(self, name: str, state: str, message: str) -> TensorDifference:
        return TensorDifference(engine=self.engine, tensor=name, state=state, message=message)

    def _in_tensor(self, one: str, other: str) -> Iterator[TensorDifference]:
        first, second = self.first.index.tensors[one], self.second.index.tensors[other]
        here, there = _standing_in(first.states, second.states)
        for state in [*here, *(state for state in there if state not in here)]:
            if self.weights_only and state not in (WEIGHT, MASTER):
                continue
            if state not in here or state not in there:
                yield self._of(one, state, ONLY_FIRST if state in here else ONLY_SECOND)
            elif here[state] != there[state]:
                yield self._of(one, state, f"the type is {here[state]} and {there[state]}")
            else:
                yield from self._in_state(one, other, state)
        numbers = (first.scalars, second.scalars)
        for key in sorted({*numbers[0], *numbers[1]} if not self.weights_only else ()):
            if numbers[0].get(key) != numbers[1].get(key):
                yield self._of(one, key, f"it is {numbers[0].get(key)} and {numbers[1].get(key)}")

    def _in_state(self, one: str, other: str, state: str) -> Iterator[TensorDifference]:
        import numpy as np

        shape = self.first.index.tensors[one].shape
        total, place, values, largest, number = math.prod(shape), None, None, 0.0, 0
        for start in range(0, total, CHUNK):
            count = min(CHUNK, total - start)
            left = self.first.read(one, state, start, count)
            right = self.second.read(other, state, start, count)
            (at,) = np.nonzero((left != right) & ~((left != left) & (right != right)))  # NaN is NaN's equal
            with np.errstate(invalid="ignore"):
                gaps = np.abs(left[at].astype(np.float64) - right[at].astype(np.float64))
            beyond = ~(gaps <= self.tolerance) if self.tolerance else np.ones(len(at), bool)
            at, gaps = at[beyond], gaps[beyond]
            if not len(at):
                continue
            if place is None:
                place = tuple(int(each) for each in np.unravel_index(start + at[0], shape)) if shape else ()
                values = (float(left[at[0]]), float(right[at[0]]))
            number += len(at)
            largest = max(largest, float(np.nan_to_num(gaps, nan=np.inf, posinf=np.inf).max()))
        if number:
            found = self._of(one, state, f"{number:,} of {total:,} elements differ")
            yield replace(found, place=place, values=values, num_elements=number, largest=largest)


def _standing_in(
    here: Mapping[str, StoredState], there: Mapping[str, StoredState]
) -> tuple[dict[str, str], dict[str, str]]:
    """State -> dtype of what is compared.

    fp32 weights stand for the optimizer's copy, and the copy for weights that are left out.
    """
    first, second = ({state: each.dtype for state, each in states.items()} for states in (here, there))
    for own, other in ((first, second), (second, first)):
        if MASTER in other and MASTER not in own and own.get(WEIGHT) == "F32":
            own[MASTER] = "F32"
    for own, other in ((first, second), (second, first)):
        if WEIGHT not in own and MASTER in own and MASTER in other:
            other.pop(WEIGHT, None)
    return first, second


def counterpart(index: EngineIndex, name: str, other: EngineIndex) -> str | None:
    """A tensor's name in another index, by the names that forms of a model have in common, or any of its own."""
    common = [each for each, own in index.common.items() if own == name]
    aliases = [each for each, own in index.aliases.items() if own == name]
    for each in (*common, name, *aliases):
        found = other.common.get(each) or other.aliases.get(each, each)
        if found in other.tensors:
            return found
    return None


# ------------------------------------------------------------------------------------------- what is read


@dataclass(frozen=True)
class Tensors:
    """The tensors of an engine.

    Args:
        index: Of the engine.
        read_state: Reads elements of a flattened tensor, by its name, a state, the first one and their number.
    """

    index: EngineIndex
    read_state: Callable[[str, str, int, int], Any]

    def read(self, name: str, state: str, start: int, count: int) -> Any:
        """Elements of a flattened tensor; of fp32 weights, for the copy that they stand for."""
        held = state if state in self.index.tensors[name].states else WEIGHT
        return self.read_state(name, held, start, count)


def opened(folder: Path) -> Tensors:
    """The tensors in an engine's folder.

    Raises:
        CheckpointError: they cannot be read.
    """
    index = read_index(folder)
    if index is None:
        return _deepspeeds(folder)
    tensors = index.tensors

    def read(name: str, state: str, start: int, count: int) -> Any:
        return read_elements(folder, tensors[name].states[state], start, count)

    return Tensors(index, read)


def _deepspeeds(folder: Path) -> Tensors:
    """Of DeepSpeed's own files."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would say which one it chooses
    import torch

    from determined_ds.checkpoints.reader import stored_weights
    from determined_ds.checkpoints.safe_load import only_data, runs_code

    try:
        with only_data():
            stored = stored_weights(folder)
    except pickle.UnpicklingError as error:
        raise runs_code(str(folder.parent), error) from error
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error

    def read(name: str, state: str, start: int, count: int) -> Any:
        parts = [part.detach() for _, part in stored.parts(name, state, start, start + count)]
        values = torch.cat(parts)
        return (values.double() if values.is_floating_point() else values).numpy()

    return Tensors(stored.index, read)
