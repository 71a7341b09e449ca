"""Looking into checkpoints: what one holds, whether it is intact, where two differ.

What is found is what ``--json`` prints. Only :func:`differences` reads tensors, a part at a time, and loads torch.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_ds.checkpoints.files import (
    LOAD_DATA,
    MANIFEST,
    METADATA,
    STATE,
    Checkpoint,
    checkpoint_at,
    damages_of,
    files_of,
    is_sealed,
    num_writers,
)
from determined_ds.checkpoints.index import ENGINES, MASTER, WEIGHT, EngineIndex, StoredState, read_index
from determined_ds.errors import CheckpointError

if TYPE_CHECKING:
    from determined_ds.checkpoints.reader import StoredEngine

# Degree -> what it is called on a line for people.
LAYOUT = {
    "pipe_parallel_size": "pipeline",
    "model_parallel_size": "model-parallel",
    "sequence_parallel_size": "sequence-parallel",
}
INTACT, DAMAGED, UNVERIFIED = "intact", "damaged", "unverified"
CHUNK = 2**22  # elements
ONLY_FIRST, ONLY_SECOND = "only in the first", "only in the second"

# ------------------------------------------------------------------------------------------- what one holds


def describe(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, by its small files alone; it is not verified.

    Args:
        path: Its folder.

    Returns:
        ``uuid``, ``path``, ``steps_completed``, ``epochs_trained``, ``ranks``, ``trial``, ``experiment`` and
        ``framework`` (each None if unknown), ``strategy`` (empty if unknown), ``sealed``, ``bytes``, ``files``: name ->
        bytes, and ``engines``: of each ``name``, ``bytes``, ``optimizer``, ``parameters`` (elements, tied ones once)
        and ``tensors``, which are None where it has no index.

    Raises:
        CheckpointError: an index in it cannot be read.
    """
    load_data, metadata, state = (_read(path / name) for name in (LOAD_DATA, METADATA, STATE))
    files = {
        str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()
    }
    engines = []
    for folder in sorted(each for each in path.glob(ENGINES) if each.is_dir()):
        index = read_index(folder)
        engines.append(
            {
                "name": folder.name,
                "bytes": sum(size for file, size in files.items() if file.startswith(f"{folder.name}/")),
                "optimizer": None if index is None else index.optimizer,
                "parameters": None if index is None else index.num_parameters,
                "tensors": None if index is None else _tensors(index),
            }
        )
    written_with = (metadata.get("framework"), metadata.get("determined_version"))
    return {
        "version": 1,
        "uuid": path.name,
        "path": str(path),
        "steps_completed": checkpoint_at(path).steps_completed,
        "epochs_trained": state.get("epochs_trained"),
        "ranks": num_writers(path) or None,
        "trial": load_data.get("trial_cls_spec"),
        "experiment": (load_data.get("experiment_config") or {}).get("name"),
        "framework": ", determined ".join(each for each in written_with if each) or None,
        "strategy": _strategy(load_data),
        "sealed": is_sealed(path),
        "bytes": sum(files.values()),
        "files": files,
        "engines": engines,
    }


def _tensors(index: EngineIndex) -> list[dict[str, Any]]:
    """Each tensor of an engine: name, shape, dtype, kind, bytes, states, scalars, aliases."""
    aliases: dict[str, list[str]] = {}
    for alias, name in index.aliases.items():
        aliases.setdefault(name, []).append(alias)
    found = []
    for name, tensor in index.tensors.items():
        shown = tensor.states.get(WEIGHT) or tensor.states.get(MASTER)
        states = {state: {"dtype": each.dtype} for state, each in tensor.states.items()}
        found.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": shown.dtype if shown else None,
                "kind": tensor.kind,
                "bytes": sum(state.num_bytes for state in tensor.states.values()),
                "states": states,
                "scalars": dict(tensor.scalars),
                "aliases": aliases.get(name, []),
            }
        )
    return found


def _strategy(load_data: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint was trained, by the DeepSpeed configuration and the hyperparameters in it."""
    ds_config, hparams = load_data.get("deepspeed_config"), load_data.get("hparams") or {}
    if not isinstance(ds_config, Mapping):
        return {}
    zero = ds_config.get("zero_optimization") or {}
    on = (name for name in ("bf16", "fp16") if (ds_config.get(name) or {}).get("enabled"))
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = {
        "zero_stage": zero.get("stage", 0),
        "precision": next(on, "fp32"),
        **{name: ds_config.get(name) for name in sizes},
        "optimizer": (ds_config.get("optimizer") or {}).get("type"),
        "zero_hpz_partition_size": zero.get("zero_hpz_partition_size"),
        **{name: (zero.get(name) or {}).get("device") for name in ("offload_optimizer", "offload_param")},
        **{name: hparams.get(name) for name in (*LAYOUT, "pipe_schedule", "pipe_chunks")},
    }
    return {name: value for name, value in found.items() if value not in (None, "none")}


def strategy_in_words(strategy: Mapping[str, Any]) -> str:
    """A strategy for people: ``ZeRO 1, bf16, batch 32 (micro-batch 8, accumulation 2), AdamW``."""
    if not strategy:
        return "unknown"
    words = [f"ZeRO {strategy['zero_stage']}", strategy["precision"]]
    for name, label in LAYOUT.items():
        if isinstance(strategy.get(name), int) and strategy[name] > 1:
            schedule = strategy.get("pipe_schedule") if name == "pipe_parallel_size" else None
            words.append(f"{label} {strategy[name]}{f' ({schedule})' if schedule else ''}")
    if (strategy.get("zero_hpz_partition_size") or 1) > 1:
        words.append(f"hpZ {strategy['zero_hpz_partition_size']}")
    offloads = [name for name in ("offload_optimizer", "offload_param") if name in strategy]
    words += [f"{name.replace('_', ' ')} to {strategy[name]}" for name in offloads]
    parts = {"train_micro_batch_size_per_gpu": "micro-batch", "gradient_accumulation_steps": "accumulation"}
    sizes = ", ".join(f"{label} {strategy[name]}" for name, label in parts.items() if name in strategy)
    words.append(f"batch {strategy.get('train_batch_size', '?')}" + (f" ({sizes})" if sizes else ""))
    return ", ".join([*words, *filter(None, [strategy.get("optimizer")])])


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------------- whether it is intact


def verify(checkpoint: Checkpoint, *, read: Callable[[int], object] = lambda count: None) -> dict[str, Any]:
    """Read all of a checkpoint and compare it with its manifest.

    Args:
        checkpoint: To read.
        read: Called with the number of bytes that were read since the last call.

    Returns:
        ``uuid``, ``path``, ``steps_completed``; ``state``: ``intact``, ``damaged``, or ``unverified`` where there is
        no manifest to go by; ``damages``: what is wrong, each beginning with the file's name, or why it is unverified;
        ``files`` and ``bytes`` of the folder.
    """
    damages = list(damages_of(checkpoint.path, read=read))
    state = DAMAGED if damages else INTACT
    if not damages and not is_sealed(checkpoint.path):
        state, damages = UNVERIFIED, [f"there is no {MANIFEST} to compare its files with"]
    return {
        "uuid": checkpoint.uuid,
        "path": str(checkpoint.path),
        "steps_completed": checkpoint.steps_completed,
        "state": state,
        "damages": damages,
        "files": len(files_of(checkpoint.path)),
        "bytes": bytes_in(checkpoint.path),
    }


def bytes_in(path: Path) -> int:
    """The size of a folder's files; a run may be deleting it."""
    found = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size if file.is_file() else 0
    return found


# ------------------------------------------------------------------------------------------- where two differ


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that differs."""

    engine: str  # its folder, ``model0``
    tensor: str  # its name; empty for a whole engine
    state: str  # ``weight``, ``fp32``, one of the optimizer's; empty for the whole tensor
    message: str  # what differs
    # Index of the first element that differs, by dimension; None where no elements were compared.
    place: tuple[int, ...] | None = None
    values: tuple[float, float] | None = None  # that element in both
    num_elements: int = 0  # how many differ
    largest: float | None = None  # the largest absolute difference


def differences(
    first: Path, second: Path, *, weights_only: bool = False, tolerance: float = 0.0
) -> tuple[list[TensorDifference], bool]:
    """Every tensor in which two checkpoints differ, in the order of the first, whichever ranks wrote them.

    Args:
        first: The folder of a checkpoint.
        second: Of the other.
        weights_only: Leave out the optimizer's states.
        tolerance: Elements whose absolute difference is at most this are equal.

    Returns:
        The differences, and whether weights alone were compared: only those of an engine that DeepSpeed wrote by
        itself can be read.

    Raises:
        CheckpointError: one of them has no tensors that can be read.
    """
    from determined_ds.checkpoints.reader import stored_engine

    here, there = (
        {folder.name: stored_engine(folder, weights_alone=True) for folder in sorted(path.glob(ENGINES))}
        for path in (first, second)
    )
    for path, engines in ((first, here), (second, there)):
        if not engines:
            raise CheckpointError(
                f"{path} has no folder model0 of an engine: a loop of this library did not write it"
            )
    weights_only = weights_only or any(each.is_given for each in (*here.values(), *there.values()))
    found: list[TensorDifference] = []
    for name in sorted({*here, *there}):
        if name in here and name in there:
            found += _in_engine(name, here[name], there[name], weights_only, tolerance)
        else:
            message = f"engine {ONLY_FIRST if name in here else ONLY_SECOND}"
            found.append(TensorDifference(engine=name, tensor="", state="", message=message))
    return found, weights_only


def _in_engine(
    engine: str, first: StoredEngine, second: StoredEngine, weights_only: bool, tolerance: float
) -> Iterator[TensorDifference]:
    def found(tensor: str, state: str, message: str, **more: Any) -> TensorDifference:
        return TensorDifference(engine=engine, tensor=tensor, state=state, message=message, **more)

    def counterpart(name: str, index: EngineIndex, other: EngineIndex) -> str | None:
        *more, last = index.names_of(name)
        return other.name_of(last, more)

    pairs: list[tuple[str | None, str | None]]
    pairs = [(name, counterpart(name, first.index, second.index)) for name in first.index.tensors]
    paired = {other for _, other in pairs}
    unpaired = [name for name in second.index.tensors if name not in paired]
    pairs += [(counterpart(name, second.index, first.index), name) for name in unpaired]
    for one, other in pairs:
        if one is None or other is None:
            yield found(one or other or "", "", ONLY_FIRST if one else ONLY_SECOND)
            continue
        left, right = first.index.tensors[one], second.index.tensors[other]
        if left.shape != right.shape:
            yield found(one, "", f"the shape is {list(left.shape)} and {list(right.shape)}")
            continue
        here, there = _compared_as(left.states, right.states)
        for state in dict.fromkeys((*here, *there)):
            if weights_only and state not in (WEIGHT, MASTER):
                continue
            if state not in here or state not in there:
                yield found(one, state, ONLY_FIRST if state in here else ONLY_SECOND)
            elif here[state] != there[state]:
                yield found(one, state, f"the type is {here[state]} and {there[state]}")
            else:
                held = [state if state in each.states else WEIGHT for each in (left, right)]
                sides = ((first, one, held[0]), (second, other, held[1]))
                if differing := _in_state(left.shape, sides, tolerance):
                    number = differing["num_elements"]
                    yield found(one, state, f"{number:,} of {left.count:,} differ", **differing)
        for key in sorted({*left.scalars, *right.scalars} if not weights_only else ()):
            if left.scalars.get(key) != right.scalars.get(key):
                yield found(one, key, f"it is {left.scalars.get(key)} and {right.scalars.get(key)}")


def _in_state(
    shape: tuple[int, ...], sides: tuple[tuple[StoredEngine, str, str], ...], tolerance: float
) -> dict[str, Any]:
    """Where elements differ, as a :class:`TensorDifference` has it; empty where none do."""
    import numpy as np

    total, place, values, largest, number = math.prod(shape), None, None, 0.0, 0
    for start in range(0, total, CHUNK):
        read = [
            engine.elements(name, state, start, min(start + CHUNK, total)) for engine, name, state in sides
        ]
        left, right = ((each.double() if each.is_floating_point() else each).numpy() for each in read)
        (at,) = np.nonzero((left != right) & ~((left != left) & (right != right)))  # NaN is NaN's equal
        with np.errstate(invalid="ignore"):
            gaps = np.abs(left[at].astype(np.float64) - right[at].astype(np.float64))
        beyond = ~(gaps <= tolerance) if tolerance else np.ones(len(at), bool)
        at, gaps = at[beyond], gaps[beyond]
        if not len(at):
            continue
        if place is None:
            place = tuple(int(each) for each in np.unravel_index(start + at[0], shape)) if shape else ()
            values = (float(left[at[0]]), float(right[at[0]]))
        number += len(at)
        largest = max(largest, float(np.nan_to_num(gaps, nan=np.inf, posinf=np.inf).max()))
    found = {"place": place, "values": values, "num_elements": number, "largest": largest}
    return found if number else {}


def _compared_as(
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
