"""Looking into checkpoints, for ``--json`` and people. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        ``files`` (without the manifest and Determined's metadata) and ``bytes`` of the folder.
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
        "files": len(sizes.keys() - {MANIFEST, METADATA}),
        "bytes": sum(sizes.values()),
    }
