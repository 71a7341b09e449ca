"""Where two checkpoints differ, tensor by tensor, whichever ranks and strategies wrote them.

Elements are compared as numbers, a part of a tensor at a time. Without an index (DeepSpeed's own files) there are the
weights alone, which torch reads.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from determined_ds.checkpoint.element_reader import read_elements
from determined_ds.errors import CheckpointError
from determined_ds.protocol.tensor_index import (
    INDEX_NAME,
    MASTER,
    WEIGHT,
    EngineIndex,
    StoredState,
    read_index,
)

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


class Tensors(Protocol):
    """The tensors of an engine."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape, of each name of a tied weight."""

    def first_name(self, name: str) -> str:
        """One for all names of a tensor."""

    def states(self, name: str) -> Mapping[str, str]:
        """State -> dtype, by safetensors' names."""

    def scalars(self, name: str) -> Mapping[str, float]:
        """The optimizer's numbers of a tensor."""

    def read(self, name: str, state: str, start: int, count: int) -> Any:
        """Elements of the flattened tensor."""


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
        opened = _opened(here[name], there[name])
        yield from _Comparison(
            engine=name, first=opened[0], second=opened[1], weights_only=weights_only, tolerance=tolerance
        ).run()


def are_indexed(*paths: Path) -> bool:
    """Whether the optimizer's states can be compared too: every engine has an index."""
    return all((folder / INDEX_NAME).is_file() for path in paths for folder in _engines(path).values())


def _engines(path: Path) -> dict[str, Path]:
    found = {folder.name: folder for folder in sorted(path.glob("model*")) if folder.is_dir()}
    if not found:
        raise CheckpointError(
            f"{path} has no folder model0 of an engine: a loop of this library did not write it"
        )
    return found


def _opened(first: Path, second: Path) -> tuple[Tensors, Tensors]:
    indexes = (read_index(first), read_index(second))
    if indexes[0] is not None and indexes[1] is not None:
        return IndexedTensors(first, indexes[0]), IndexedTensors(second, indexes[1])
    opened = [
        IndexedTensors(folder, index, only_weights=True) if index is not None else LegacyTensors(folder)
        for folder, index in zip((first, second), indexes, strict=True)
    ]
    return opened[0], opened[1]


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Of one engine in two checkpoints; its arguments are those of :func:`differences`."""

    engine: str
    first: Tensors
    second: Tensors
    weights_only: bool
    tolerance: float

    def run(self) -> Iterator[TensorDifference]:
        here, there = self.first.shapes(), self.second.shapes()
        compared: set[tuple[str, str]] = set()
        for name in [*here, *(name for name in there if name not in here)]:
            if name not in here or name not in there:
                yield self._of(name, "", ONLY_FIRST if name in here else ONLY_SECOND)
                continue
            if here[name] != there[name]:
                yield self._of(name, "", f"the shape is {list(here[name])} and {list(there[name])}")
                continue
            names = (self.first.first_name(name), self.second.first_name(name))
            if names not in compared:  # else a tied weight, by another of its names
                compared.add(names)
                yield from self._in_tensor(name, here[name])

    def _of(self, name: str, state: str, message: str) -> TensorDifference:
        return TensorDifference(engine=self.engine, tensor=name, state=state, message=message)

    def _in_tensor(self, name: str, shape: tuple[int, ...]) -> Iterator[TensorDifference]:
        here, there = _standing_in(self.first.states(name), self.second.states(name))
        for state in [*here, *(state for state in there if state not in here)]:
            if self.weights_only and state not in (WEIGHT, MASTER):
                continue
            if state not in here or state not in there:
                yield self._of(name, state, ONLY_FIRST if state in here else ONLY_SECOND)
            elif here[state] != there[state]:
                yield self._of(name, state, f"the type is {here[state]} and {there[state]}")
            else:
                yield from self._in_state(name, state, shape)
        numbers = (self.first.scalars(name), self.second.scalars(name))
        for key in sorted({*numbers[0], *numbers[1]} if not self.weights_only else ()):
            if numbers[0].get(key) != numbers[1].get(key):
                yield self._of(name, key, f"it is {numbers[0].get(key)} and {numbers[1].get(key)}")

    def _in_state(self, name: str, state: str, shape: tuple[int, ...]) -> Iterator[TensorDifference]:
        import numpy as np

        total, place, values, largest, number = math.prod(shape), None, None, 0.0, 0
        for start in range(0, total, CHUNK):
            count = min(CHUNK, total - start)
            left, right = (each.read(name, state, start, count) for each in (self.first, self.second))
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
            found = self._of(name, state, f"{number:,} of {total:,} elements differ")
            yield replace(found, place=place, values=values, num_elements=number, largest=largest)


def _standing_in(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What is compared: fp32 weights stand for the optimizer's copy, and the copy for weights that are left out."""
    first, second = dict(here), dict(there)
    for own, other in ((first, second), (second, first)):
        if MASTER in other and MASTER not in own and own.get(WEIGHT) == "F32":
            own[MASTER] = "F32"
    for own, other in ((first, second), (second, first)):
        if WEIGHT not in own and MASTER in own and MASTER in other:
            other.pop(WEIGHT, None)
    return first, second


# ------------------------------------------------------------------------------------------- what is read


class IndexedTensors:
    """Tensors by an index.

    Args:
        folder: Of the engine.
        index: Its own.
        only_weights: Show the weights alone, the optimizer's copy in their place where there is one.
    """

    def __init__(self, folder: Path, index: EngineIndex, *, only_weights: bool = False) -> None:
        self._folder, self._aliases = folder, index.aliases
        self._tensors = {
            **index.tensors,
            **{alias: index.tensors[name] for alias, name in index.aliases.items()},
        }
        self._only_weights = only_weights

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def first_name(self, name: str) -> str:
        return self._aliases.get(name, name)

    def states(self, name: str) -> Mapping[str, str]:
        if self._only_weights:
            return {WEIGHT: self._state(name, WEIGHT).dtype}
        return {state: stored.dtype for state, stored in self._tensors[name].states.items()}

    def scalars(self, name: str) -> Mapping[str, float]:
        return {} if self._only_weights else self._tensors[name].scalars

    def read(self, name: str, state: str, start: int, count: int) -> Any:
        return read_elements(self._folder, self._state(name, state), start, count)

    def _state(self, name: str, state: str) -> StoredState:
        states = self._tensors[name].states
        if self._only_weights:
            return states.get(MASTER) or states[WEIGHT]
        return states.get(state) or states[WEIGHT]  # fp32 weights, for the copy that they stand for


class LegacyTensors:
    """The weights in DeepSpeed's own files; torch reads them.

    Args:
        folder: Of the engine.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would say which one it chooses
        from determined_ds.runtime.checkpoints.contents import runs_code
        from determined_ds.runtime.checkpoints.weights import weights_in

        try:
            with _quietly():
                self._weights = weights_in(folder.parent, int(folder.name.removeprefix("model")))
        except pickle.UnpicklingError as error:
            raise runs_code(str(folder.parent), error) from error
        except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
            raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error
        self._whole: tuple[str, Any] = ("", None)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._weights.items()}

    def first_name(self, name: str) -> str:
        return name

    def states(self, name: str) -> Mapping[str, str]:
        import torch

        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
        dtype = self._weights[name].dtype
        return {WEIGHT: names.get(dtype, str(dtype).removeprefix("torch.").replace("int", "I").upper())}

    def scalars(self, name: str) -> Mapping[str, float]:
        return {}

    def read(self, name: str, state: str, start: int, count: int) -> Any:
        if self._whole[0] != name:
            with _quietly():
                self._whole = (name, self._weights[name].contiguous().detach().flatten())
        part = self._whole[1][start : start + count]
        return (part.double() if part.is_floating_point() else part).numpy()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the bars of what DeepSpeed merges, and without executing anything of it."""
    from determined_ds.runtime.checkpoints.contents import only_data

    with only_data(), contextlib.redirect_stderr(io.StringIO()):
        yield
