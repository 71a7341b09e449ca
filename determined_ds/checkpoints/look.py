"""Looking into checkpoints, for ``--json`` and people; only :func:`differences` reads tensors, and loads torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    num_writers,
    read_object,
    sizes_in,
)
from determined_ds.checkpoints.index import ENGINES, MASTER, WEIGHT, StoredTensor, read_index
from determined_ds.errors import CheckpointError

if TYPE_CHECKING:
    from determined_ds.checkpoints.reader import StoredEngine

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
    load_data, metadata, state = (read_object(path / name) for name in (LOAD_DATA, METADATA, STATE))
    files, engines = sizes_in(path), []
    for folder in sorted(each for each in path.glob(ENGINES) if each.is_dir()):
        index = read_index(folder)
        engine = {
            "name": folder.name,
            "bytes": sum(size for file, size in files.items() if file.startswith(f"{folder.name}/")),
            **dict.fromkeys(("optimizer", "parameters", "tensors")),
        }
        if index is not None:
            names: dict[str, list[str]] = {}
            for alias, name in index.aliases.items():
                names.setdefault(name, []).append(alias)
            tensors = [_shown(name, each, names.get(name, [])) for name, each in index.tensors.items()]
            engine |= {"optimizer": index.optimizer, "parameters": index.num_parameters, "tensors": tensors}
        engines.append(engine)
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
        "framework": ", determined ".join(filter(None, written_with)) or None,
        "strategy": _strategy(load_data),
        "sealed": MANIFEST in files,
        "bytes": sum(files.values()),
        "files": files,
        "engines": engines,
    }


def _shown(name: str, tensor: StoredTensor, aliases: list[str]) -> dict[str, Any]:
    weight = tensor.states.get(WEIGHT) or tensor.states.get(MASTER)
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": weight and weight.dtype,
        "kind": tensor.kind,
        "bytes": sum(state.num_bytes for state in tensor.states.values()),
        "states": {state: {"dtype": each.dtype} for state, each in tensor.states.items()},
        "scalars": dict(tensor.scalars),
        "aliases": aliases,
    }


def _strategy(load_data: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint was trained, by the DeepSpeed configuration and the hyperparameters in it."""
    ds_config, hparams = load_data.get("deepspeed_config"), load_data.get("hparams") or {}
    if not isinstance(ds_config, dict):
        return {}
    zero = ds_config.get("zero_optimization") or {}
    on = (name for name in ("bf16", "fp16") if (ds_config.get(name) or {}).get("enabled"))
    found = {"zero_stage": zero.get("stage", 0), "precision": next(on, "fp32")}
    found |= {
        name: hparams[name] for name in hparams if name.endswith("parallel_size") or name.startswith("pipe_")
    }
    found |= {name: (zero.get(name) or {}).get("device") for name in ("offload_optimizer", "offload_param")}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found |= {name: ds_config.get(name) for name in sizes}
    found["optimizer"] = (ds_config.get("optimizer") or {}).get("type")
    return {name: value for name, value in found.items() if value not in (None, "none")}


# ------------------------------------------------------------------------------------------- whether it is intact


def verify(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read all of a checkpoint and compare it with its manifest.

    Returns:
        ``uuid``, ``path``, ``steps_completed``; ``state``: ``intact``, ``damaged``, or ``unverified`` where there is
        no manifest to go by; ``damages``: what is wrong, each beginning with the file's name, or why it is unverified;
        ``files`` and ``bytes`` of the folder.
    """
    damages, sizes = list(damages_of(checkpoint.path)), sizes_in(checkpoint.path)
    state = "damaged" if damages else "intact"
    if not damages and MANIFEST not in sizes:
        state, damages = "unverified", [f"there is no {MANIFEST} to compare its files with"]
    return {
        "uuid": checkpoint.uuid,
        "path": str(checkpoint.path),
        "steps_completed": checkpoint.steps_completed,
        "state": state,
        "damages": damages,
        "files": len(sizes),
        "bytes": sum(sizes.values()),
    }


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

    sides = []
    for path in (first, second):
        sides.append({each.name: stored_engine(each, weights_alone=True) for each in path.glob(ENGINES)})
        if not sides[-1]:
            raise CheckpointError(
                f"{path} has no folder model0 of an engine: a loop of this library did not write it"
            )
    weights_only = weights_only or any(each.has_weights_alone for side in sides for each in side.values())
    here, there = sides
    nothing = {"place": None, "values": None, "num_elements": 0, "largest": None}
    found = []
    for engine in sorted({*here, *there}):
        if engine in here and engine in there:
            rows = _in_engine(here[engine], there[engine], weights_only, tolerance)
        else:
            rows = iter([("", "", f"engine {_only(engine in here)}", {})])
        for tensor, state, message, elements in rows:
            row = {"engine": engine, "tensor": tensor, "state": state, "message": message}
            found.append({**row, **nothing, **elements})
    return found, weights_only


def _only(in_first: bool) -> str:
    return f"only in the {'first' if in_first else 'second'}"


def _in_engine(
    first: StoredEngine, second: StoredEngine, weights_only: bool, tolerance: float
) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """The differences: tensor, state, message, and of elements more; both have a name in each pair, or one None."""
    left, right = first.index, second.index
    pairs = [(name, right.find(left.names_of(name))) for name in left.tensors]
    back = [(left.find(right.names_of(name)), name) for name in right.tensors]
    for one, other in dict.fromkeys([*pairs, *back]):
        if one is None or other is None:
            yield one or other or "", "", _only(other is None), {}
            continue
        was, now = left.tensors[one], right.tensors[other]
        if was.shape != now.shape:
            yield one, "", f"the shape is {list(was.shape)} and {list(now.shape)}", {}
            continue
        here, there = _compared_states(was, now)
        for state in {**here, **there}:
            if weights_only and state not in (WEIGHT, MASTER):
                continue
            if state not in here or state not in there:
                yield one, state, _only(state in here), {}
            elif (kind := was.states[here[state]].dtype) != (other_kind := now.states[there[state]].dtype):
                yield one, state, f"the type is {kind} and {other_kind}", {}
            else:
                pieces = zip(first.pieces(one, here[state]), second.pieces(other, there[state]), strict=True)
                if elements := _elements(was.shape, pieces, tolerance):
                    yield one, state, f"{elements['num_elements']:,} of {was.count:,} differ", elements
        for key in sorted({*was.scalars, *now.scalars} if not weights_only else ()):
            if was.scalars.get(key) != now.scalars.get(key):
                yield one, key, f"it is {was.scalars.get(key)} and {now.scalars.get(key)}", {}


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


def _elements(shape: tuple[int, ...], pieces: Iterable[tuple[Any, Any]], tolerance: float) -> dict[str, Any]:
    """Where two tensors differ, as :func:`differences` has it; empty where they do not."""
    import numpy as np

    start, number, largest, found = 0, 0, 0.0, dict[str, Any]()
    for pair in pieces:
        left, right = ((each.double() if each.is_floating_point() else each).numpy() for each in pair)
        (at,) = np.nonzero((left != right) & ~((left != left) & (right != right)))  # NaN is NaN's equal
        with np.errstate(invalid="ignore"):
            gaps = np.abs(left[at].astype(np.float64) - right[at].astype(np.float64))
        gaps = np.nan_to_num(gaps, nan=np.inf, posinf=np.inf)
        if tolerance:  # else whole numbers differ that are one as floats
            at, gaps = at[gaps > tolerance], gaps[gaps > tolerance]
        if len(at) and not found:
            place = np.unravel_index(start + at[0], shape) if shape else ()
            found = {"place": tuple(map(int, place)), "values": (float(left[at[0]]), float(right[at[0]]))}
        start, number = start + len(left), number + len(at)
        largest = max(largest, float(gaps.max(initial=0.0)))
    return {**found, "num_elements": number, "largest": largest} if found else {}
