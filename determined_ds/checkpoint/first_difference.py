"""Where two checkpoints differ, tensor by tensor, whichever ranks and strategies wrote them.

Elements are compared as numbers, a part of a tensor at a time. Without an index (DeepSpeed's own files) there are the
weights alone, which torch reads.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
class Difference:
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
        """Name -> shape."""

    def states(self, name: str) -> Mapping[str, str]:
        """State -> dtype, by safetensors' names."""

    def read(self, name: str, state: str, start: int, count: int) -> Any:
        """Elements of the flattened tensor."""


def differences(first: Path, second: Path, *, weights_only: bool = False) -> Iterator[Difference]:
    """Every tensor in which two checkpoints differ, in the order of the first.

    Args:
        first: The folder of a checkpoint.
        second: Of the other.
        weights_only: Leave out the optimizer's states.

    Raises:
        CheckpointError: one of them has no tensors that can be read.
    """
    here, there = (_engines(path) for path in (first, second))
    for name in sorted({*here, *there}):
        if name not in here or name not in there:
            message = f"engine {ONLY_FIRST if name in here else ONLY_SECOND}"
            yield Difference(engine=name, tensor="", state="", message=message)
            continue
        yield from _in_engine(name, *_opened(here[name], there[name]), weights_only=weights_only)


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


def _in_engine(engine: str, first: Tensors, second: Tensors, *, weights_only: bool) -> Iterator[Difference]:
    here, there = first.shapes(), second.shapes()
    for name in [*here, *(name for name in there if name not in here)]:
        if name not in here or name not in there:
            message = ONLY_FIRST if name in here else ONLY_SECOND
            yield Difference(engine=engine, tensor=name, state="", message=message)
        elif here[name] != there[name]:
            message = f"the shape is {list(here[name])} and {list(there[name])}"
            yield Difference(engine=engine, tensor=name, state="", message=message)
        else:
            yield from _in_tensor(engine, name, here[name], first, second, weights_only=weights_only)


def _in_tensor(
    engine: str, name: str, shape: tuple[int, ...], first: Tensors, second: Tensors, *, weights_only: bool
) -> Iterator[Difference]:
    here, there = _with_master(first.states(name), second.states(name))
    for state in [*here, *(state for state in there if state not in here)]:
        if weights_only and state not in (WEIGHT, MASTER):
            continue
        if state not in here or state not in there:
            message = ONLY_FIRST if state in here else ONLY_SECOND
        elif here[state] != there[state]:
            message = f"the type is {here[state]} and {there[state]}"
        else:
            found = _in_state(engine, name, state, shape, first, second)
            if found is not None:
                yield found
            continue
        yield Difference(engine=engine, tensor=name, state=state, message=message)


def _with_master(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Without an optimizer's copy, weights in fp32 stand for it."""
    first, second = dict(here), dict(there)
    for own, other in ((first, second), (second, first)):
        if MASTER in other and MASTER not in own and own.get(WEIGHT) == "F32":
            own[MASTER] = "F32"
    return first, second


def _in_state(
    engine: str, name: str, state: str, shape: tuple[int, ...], first: Tensors, second: Tensors
) -> Difference | None:
    import numpy as np

    total, place, values, largest, number = _count(shape), None, None, 0.0, 0
    for start in range(0, total, CHUNK):
        count = min(CHUNK, total - start)
        left, right = (each.read(name, state, start, count) for each in (first, second))
        differs = (left != right) & ~((left != left) & (right != right))
        if not differs.any():
            continue
        number += int(differs.sum())
        at = int(differs.argmax())
        if place is None:
            place = tuple(int(each) for each in np.unravel_index(start + at, shape)) if shape else ()
            values = (float(left[at]), float(right[at]))
        with np.errstate(invalid="ignore"):
            gaps = np.abs(left[differs].astype(np.float64) - right[differs].astype(np.float64))
        largest = max(largest, float(np.nan_to_num(gaps, nan=np.inf).max()))
    if not number:
        return None
    message = f"{number:,} of {total:,} elements differ"
    return Difference(
        engine=engine,
        tensor=name,
        state=state,
        message=message,
        place=place,
        values=values,
        num_elements=number,
        largest=largest,
    )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


# ------------------------------------------------------------------------------------------- what is read


class IndexedTensors:
    """Tensors by an index.

    Args:
        folder: Of the engine.
        index: Its own.
        only_weights: Show the weights alone, the optimizer's copy in their place where there is one.
    """

    def __init__(self, folder: Path, index: EngineIndex, *, only_weights: bool = False) -> None:
        self._folder = folder
        self._tensors = {
            **index.tensors,
            **{alias: index.tensors[name] for alias, name in index.aliases.items()},
        }
        self._only_weights = only_weights

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def states(self, name: str) -> Mapping[str, str]:
        if self._only_weights:
            return {WEIGHT: self._state(name, WEIGHT).dtype}
        return {state: stored.dtype for state, stored in self._tensors[name].states.items()}

    def read(self, name: str, state: str, start: int, count: int) -> Any:
        return read_elements(self._folder, self._state(name, state), start, count)

    def _state(self, name: str, state: str) -> StoredState:
        states = self._tensors[name].states
        if self._only_weights:
            return states.get(MASTER) or states[WEIGHT]
        return states.get(state) or states[WEIGHT]  # of fp32 weights, for the copy that they stand for


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

    def states(self, name: str) -> Mapping[str, str]:
        import torch

        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
        dtype = self._weights[name].dtype
        return {WEIGHT: names.get(dtype, str(dtype).removeprefix("torch.").replace("int", "I").upper())}

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
