"""Looking into checkpoints: what one holds, whether it is intact, where two differ.

What is found is what ``--json`` prints. Only :func:`differences` reads tensors, a part at a time, and loads torch.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
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
from determined_ds.checkpoints.index import ENGINES, MASTER, WEIGHT, EngineIndex, StoredTensor, read_index
from determined_ds.errors import CheckpointError

if TYPE_CHECKING:
    from determined_ds.checkpoints.reader import StoredEngine

# Key of a strategy -> what a line for people says of it. Of the degrees, one rank is not worth a word.
DEGREES = {
    "pipe_parallel_size": "pipeline {}",
    "model_parallel_size": "model-parallel {}",
    "sequence_parallel_size": "sequence-parallel {}",
    "zero_hpz_partition_size": "hpZ {}",
}
WORDS = {
    "zero_stage": "ZeRO {}",
    "precision": "{}",
    **DEGREES,
    "pipe_schedule": "schedule {}",
    "offload_optimizer": "optimizer offloaded to {}",
    "offload_param": "parameters offloaded to {}",
    "train_batch_size": "batch {}",
    "train_micro_batch_size_per_gpu": "micro-batch {}",
    "gradient_accumulation_steps": "accumulation {}",
    "optimizer": "{}",
}
INTACT, DAMAGED, UNVERIFIED = "intact", "damaged", "unverified"
CHUNK = 2**22  # elements

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
                "optimizer": index and index.optimizer,
                "parameters": index and index.num_parameters,
                "tensors": index and _tensors(index),
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
    found = []
    for name, tensor in index.tensors.items():
        shown = tensor.states.get(WEIGHT) or tensor.states.get(MASTER)
        found.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": shown.dtype if shown else None,
                "kind": tensor.kind,
                "bytes": sum(state.num_bytes for state in tensor.states.values()),
                "states": {state: {"dtype": each.dtype} for state, each in tensor.states.items()},
                "scalars": dict(tensor.scalars),
                "aliases": [alias for alias, own in index.aliases.items() if own == name],
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
    of_trial = (
        "pipe_parallel_size",
        "model_parallel_size",
        "sequence_parallel_size",
        "pipe_schedule",
        "pipe_chunks",
    )
    found = {
        "zero_stage": zero.get("stage", 0),
        "precision": next(on, "fp32"),
        **{name: ds_config.get(name) for name in sizes},
        "optimizer": (ds_config.get("optimizer") or {}).get("type"),
        "zero_hpz_partition_size": zero.get("zero_hpz_partition_size"),
        **{name: (zero.get(name) or {}).get("device") for name in ("offload_optimizer", "offload_param")},
        **{name: hparams.get(name) for name in of_trial},
    }
    return {name: value for name, value in found.items() if value not in (None, "none")}


def strategy_in_words(strategy: Mapping[str, Any]) -> str:
    """A strategy for people: ``ZeRO 1, bf16, batch 32, micro-batch 8, accumulation 2, AdamW``."""
    shown = {name: strategy[name] for name in WORDS if name in strategy}
    words = [WORDS[name].format(value) for name, value in shown.items() if name not in DEGREES or value != 1]
    return ", ".join(words) or "unknown"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------------- whether it is intact


def verify(checkpoint: Checkpoint, *, read: Callable[[int], object]) -> dict[str, Any]:
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


def differences(
    first: Path, second: Path, *, weights_only: bool, tolerance: float
) -> tuple[list[dict[str, Any]], bool]:
    """Every tensor in which two checkpoints differ, in the order of the first, whichever ranks wrote them.

    Args:
        first: The folder of a checkpoint.
        second: Of the other.
        weights_only: Leave out the optimizer's states.
        tolerance: Elements whose absolute difference is at most this are equal.

    Returns:
        The differences, each with ``engine``; ``tensor``, empty for a whole engine; ``state``, empty for a whole
        tensor; ``message``; where elements differ ``place`` of the first by dimension, its ``values`` in both,
        ``num_elements``, and the ``largest`` absolute difference. And whether weights alone were compared: only those
        of an engine that DeepSpeed wrote by itself can be read.

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
    found = []
    for engine in sorted({*here, *there}):
        if engine in here and engine in there:
            rows = _in_engine(here[engine], there[engine], weights_only, tolerance)
        else:
            rows = iter([_row("", "", f"engine {_only(engine in here)}")])
        found += [{"engine": engine, **row} for row in rows]
    return found, weights_only


def _row(tensor: str, state: str, message: str, **elements: Any) -> dict[str, Any]:
    row = {"tensor": tensor, "state": state, "message": message}
    return {**row, "place": None, "values": None, "num_elements": 0, "largest": None, **elements}


def _only(in_first: bool) -> str:
    return f"only in the {'first' if in_first else 'second'}"


def _in_engine(
    first: StoredEngine, second: StoredEngine, weights_only: bool, tolerance: float
) -> Iterator[dict[str, Any]]:
    def counterpart(name: str, index: EngineIndex, other: EngineIndex) -> str | None:
        return other.find(index.names_of(name))

    pairs: list[tuple[str | None, str | None]]
    pairs = [(name, counterpart(name, first.index, second.index)) for name in first.index.tensors]
    pairs += [(counterpart(name, second.index, first.index), name) for name in second.index.tensors]
    for one, other in dict.fromkeys(pairs):
        if one is None or other is None:
            yield _row(one or other or "", "", _only(other is None))
            continue
        left, right = first.index.tensors[one], second.index.tensors[other]
        if left.shape != right.shape:
            yield _row(one, "", f"the shape is {list(left.shape)} and {list(right.shape)}")
            continue
        here, there = _compared_states(left, right)
        for state in {**here, **there}:
            if weights_only and state not in (WEIGHT, MASTER):
                continue
            if state not in here or state not in there:
                yield _row(one, state, _only(state in here))
            elif (was := left.states[here[state]].dtype) != (now := right.states[there[state]].dtype):
                yield _row(one, state, f"the type is {was} and {now}")
            else:
                sides = ((first, one, here[state]), (second, other, there[state]))
                if elements := _in_state(left.shape, sides, tolerance):
                    number = elements["num_elements"]
                    yield _row(one, state, f"{number:,} of {left.count:,} differ", **elements)
        for key in sorted({*left.scalars, *right.scalars} if not weights_only else ()):
            if left.scalars.get(key) != right.scalars.get(key):
                yield _row(one, key, f"it is {left.scalars.get(key)} and {right.scalars.get(key)}")


def _compared_states(left: StoredTensor, right: StoredTensor) -> tuple[dict[str, str], dict[str, str]]:
    """State that is compared -> the one that is read for it.

    fp32 weights stand for the optimizer's copy, and the copy for weights that are left out.
    """
    here, there = ({state: state for state in each.states} for each in (left, right))
    for own, other, tensor in ((here, there, left), (there, here, right)):
        if MASTER in other and WEIGHT in own and tensor.states[WEIGHT].dtype == "F32":
            own.setdefault(MASTER, WEIGHT)
    if MASTER in here and MASTER in there and not (WEIGHT in here and WEIGHT in there):
        here.pop(WEIGHT, None)
        there.pop(WEIGHT, None)
    return here, there


def _in_state(
    shape: tuple[int, ...], sides: tuple[tuple[StoredEngine, str, str], ...], tolerance: float
) -> dict[str, Any]:
    """Where elements differ, as :func:`differences` has it; empty where none do."""
    import numpy as np

    total, first, number, largest = math.prod(shape), None, 0, 0.0
    for start in range(0, total, CHUNK):
        stop = min(start + CHUNK, total)
        read = (engine.elements(name, state, start, stop) for engine, name, state in sides)
        left, right = ((each.double() if each.is_floating_point() else each).numpy() for each in read)
        (at,) = np.nonzero((left != right) & ~((left != left) & (right != right)))  # NaN is NaN's equal
        with np.errstate(invalid="ignore"):
            gaps = np.abs(left[at].astype(np.float64) - right[at].astype(np.float64))
        beyond = ~(gaps <= tolerance) if tolerance else np.ones(len(at), bool)
        at, gaps = at[beyond], gaps[beyond]
        if len(at):
            first = first or (start + at[0], (float(left[at[0]]), float(right[at[0]])))
            number += len(at)
            largest = max(largest, float(np.nan_to_num(gaps, nan=np.inf, posinf=np.inf).max()))
    if first is None:
        return {}
    place = tuple(int(each) for each in np.unravel_index(first[0], shape)) if shape else ()
    return {"place": place, "values": first[1], "num_elements": number, "largest": largest}
