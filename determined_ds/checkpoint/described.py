"""What a checkpoint holds, by its small files alone: no tensor is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.index import MASTER, WEIGHT, EngineIndex, read_index
from determined_ds.protocol.checkpoint_files import (
    METADATA,
    checkpoint_at,
    is_sealed,
    num_writers,
)

# Degree -> what it is called on a line for people.
LAYOUT = {
    "pipe_parallel_size": "pipeline",
    "model_parallel_size": "model-parallel",
    "sequence_parallel_size": "sequence-parallel",
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine of a checkpoint.

    Args:
        name: Of its folder.
        files: Name -> bytes.
        index: Its tensors; None where an earlier version, DeepSpeed alone or a script wrote it.
    """

    name: str
    files: Mapping[str, int]
    index: EngineIndex | None

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(self.files.values())

    @property
    def num_parameters(self) -> int | None:
        """Elements of its parameters, tied ones once; None if unknown."""
        if self.index is None:
            return None
        return sum(tensor.count for tensor in self.index.tensors.values() if tensor.kind != "buffer")


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a checkpoint holds.

    Args:
        path: Its folder.
        uuid: Its name.
        steps_completed: Batches trained.
        epochs_trained: None where no loop of this library wrote it.
        ranks: How many wrote it; None if unknown.
        trial: Its class.
        experiment: Its name.
        framework: The versions that wrote it.
        strategy: How it was trained: ZeRO stage, precision, batch and so on; absent where unknown.
        is_sealed: Whether it has a manifest.
        files: Name -> bytes of all files.
        engines: Its engines.
    """

    path: Path
    uuid: str
    steps_completed: int
    epochs_trained: int | None = None
    ranks: int | None = None
    trial: str | None = None
    experiment: str | None = None
    framework: str | None = None
    strategy: Mapping[str, Any] = field(default_factory=dict)
    is_sealed: bool = False
    files: Mapping[str, int] = field(default_factory=dict)
    engines: tuple[Engine, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def describe(path: Path) -> Description:
    """Describe a checkpoint; it is not verified.

    Args:
        path: Its folder.

    Raises:
        CheckpointError: an index in it cannot be read.
    """
    load_data, metadata = _read(path / "load_data.json"), _read(path / METADATA)
    experiment = load_data.get("experiment_config") or {}
    files = {
        str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()
    }
    folders = sorted({name.partition("/")[0] for name in files if name.startswith("model") and "/" in name})
    engines = (
        Engine(
            name=folder,
            files={name: size for name, size in files.items() if name.startswith(f"{folder}/")},
            index=read_index(path / folder),
        )
        for folder in folders
    )
    written_with = (metadata.get("framework"), metadata.get("determined_version"))
    return Description(
        path=path,
        uuid=path.name,
        steps_completed=checkpoint_at(path).steps_completed,
        epochs_trained=_read(path / "trial_state.json").get("epochs_trained"),
        ranks=num_writers(path) or None,
        trial=load_data.get("trial_cls_spec"),
        experiment=experiment.get("name"),
        framework=", determined ".join(each for each in written_with if each) or None,
        strategy=_strategy(load_data),
        is_sealed=is_sealed(path),
        files=files,
        engines=tuple(engines),
    )


def _strategy(load_data: Mapping[str, Any]) -> dict[str, Any]:
    """How a checkpoint was trained, by the DeepSpeed configuration and the hyperparameters in it."""
    ds_config, hparams = load_data.get("deepspeed_config"), load_data.get("hparams") or {}
    if not isinstance(ds_config, Mapping):
        return {}
    zero = ds_config.get("zero_optimization") or {}
    precision = next(
        (name for name in ("bf16", "fp16") if (ds_config.get(name) or {}).get("enabled")), "fp32"
    )
    found = {
        "zero_stage": zero.get("stage", 0),
        "precision": precision,
        "train_batch_size": ds_config.get("train_batch_size"),
        "train_micro_batch_size_per_gpu": ds_config.get("train_micro_batch_size_per_gpu"),
        "gradient_accumulation_steps": ds_config.get("gradient_accumulation_steps"),
        "optimizer": (ds_config.get("optimizer") or {}).get("type"),
        "zero_hpz_partition_size": zero.get("zero_hpz_partition_size"),
        **{name: (zero.get(name) or {}).get("device") for name in ("offload_optimizer", "offload_param")},
        **{name: hparams.get(name) for name in (*LAYOUT, "pipe_schedule", "pipe_chunks")},
    }
    return {name: value for name, value in found.items() if value not in (None, "none")}


def in_words(strategy: Mapping[str, Any]) -> str:
    """A strategy for people: ``ZeRO 1, bf16, batch 32 = micro-batch 8 x accumulation 2 x replicas, AdamW``."""
    if not strategy:
        return "unknown"
    words = [f"ZeRO {strategy['zero_stage']}", strategy["precision"]]
    for name, label in LAYOUT.items():
        if isinstance(strategy.get(name), int) and strategy[name] > 1:
            schedule = strategy.get("pipe_schedule") if name == "pipe_parallel_size" else None
            words.append(f"{label} {strategy[name]}{f' ({schedule})' if schedule else ''}")
    if (strategy.get("zero_hpz_partition_size") or 1) > 1:
        words.append(f"hpZ {strategy['zero_hpz_partition_size']}")
    for name in ("offload_optimizer", "offload_param"):
        if name in strategy:
            words.append(f"{name.replace('_', ' ')} to {strategy[name]}")
    words.append(f"batch {strategy.get('train_batch_size', '?')}")
    parts = (
        ("train_micro_batch_size_per_gpu", "micro-batch"),
        ("gradient_accumulation_steps", "accumulation"),
    )
    sizes = [f"{label} {strategy[name]}" for name, label in parts if name in strategy]
    words[-1] += f" ({', '.join(sizes)})" if sizes else ""
    return ", ".join([*words, *filter(None, [strategy.get("optimizer")])])


def tensors_of(index: EngineIndex) -> list[dict[str, Any]]:
    """Each tensor of an engine: name, shape, dtype, kind, norm, bytes, states, aliases."""
    aliases: dict[str, list[str]] = {}
    for alias, name in index.aliases.items():
        aliases.setdefault(name, []).append(alias)
    found = []
    for name, tensor in index.tensors.items():
        shown = tensor.states.get(WEIGHT) or tensor.states.get(MASTER)
        found.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": shown.dtype if shown else None,
                "kind": tensor.kind,
                "norm": shown.norm if shown else None,
                "bytes": sum(state.num_bytes for state in tensor.states.values()),
                "states": {
                    state: {"dtype": each.dtype, "norm": each.norm} for state, each in tensor.states.items()
                },
                "scalars": dict(tensor.scalars),
                "aliases": aliases.get(name, []),
            }
        )
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
