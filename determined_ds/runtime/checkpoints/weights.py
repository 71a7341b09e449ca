"""The weights in a checkpoint, each read when it is needed; and averages in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from determined_ds.checkpoints.index import MASTER, WEIGHT
from determined_ds.checkpoints.reader import StoredEngine, stored_weights
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.trial.own_parts import merge_parts


def weights_in(path: Path, engine: int) -> dict[str, Any]:
    """The weights of one engine; where ZeRO split them, they come from the optimizer's fp32 copy.

    Args:
        path: A checkpoint's folder.
        engine: Counted from 0.

    Returns:
        Name -> an object whose ``.contiguous()`` is a tensor on the CPU, which is read only then. Of a pipeline,
        names begin with the index of the layer.
    """
    stored = stored_weights(path / f"model{engine}")
    names = {**{name: name for name in stored.index.tensors}, **stored.index.aliases}
    return {name: StoredWeight(stored, own) for name, own in names.items()}


@dataclass(frozen=True)
class StoredWeight:
    """A weight that is read when it is needed: the optimizer's fp32 copy, where there is one."""

    stored: StoredEngine
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.stored.index.tensors[self.name].shape

    def contiguous(self) -> torch.Tensor:
        """The tensor."""
        states = self.stored.index.tensors[self.name].states
        return self.stored.whole(self.name, MASTER if MASTER in states else WEIGHT)


def averages_in(path: Path, engine: int, callback: str) -> dict[str, torch.Tensor]:
    """The averages of one engine's parameters that an ``EMA`` keeps, by name.

    Args:
        path: A checkpoint's folder.
        engine: Counted from 0.
        callback: The name of the EMA.

    Raises:
        CheckpointError: the checkpoint holds no such average.
    """
    files = sorted(path.glob("det_state_dict_rank*.pth"))
    states = [torch.load(file, map_location="cpu", mmap=True).get("callbacks", {}) for file in files]
    found = [own[callback]["engines"] for own in states if own.get(callback, {}).get("engines")]
    if not found:
        there = ", ".join(sorted({name for own in states for name in own})) or "none"
        raise CheckpointError(
            f"checkpoint {path} holds no average of a callback {callback!r}; it has: {there}"
        )
    return dict(merge_parts([engines[engine] for engines in found]))


def averaged_weights(
    path: Path, engine: int, callback: str, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights of one engine, those that an ``EMA`` averages replaced by its average.

    Args:
        path: A checkpoint's folder.
        engine: Counted from 0.
        callback: The name of the EMA.
        weights: By name.

    Raises:
        CheckpointError: the checkpoint holds no such average.
    """
    averages = averages_in(path, engine, callback)
    if strangers := sorted(averages.keys() - weights.keys()):
        raise CheckpointError(
            f"checkpoint {path} averages {strangers[0]}, whose name in the weights is another: a weight that pipeline "
            "stages share"
        )
    tied = {
        other: name
        for other, value in weights.items()
        if other not in averages
        for name in averages
        if value.shape == weights[name].shape and torch.equal(value, weights[name])
    }
    return {**weights, **averages, **{other: averages[name] for other, name in tied.items()}}


def read_own_weights(engine: Any, path: Path, index: int) -> None:
    """Have DeepSpeed fill an engine with its weights alone, of a checkpoint that the same ranks wrote.

    Args:
        engine: One whose tensors cannot be cut, see :func:`~determined_ds.runtime.checkpoints.slices.own_layout`.
        path: The checkpoint's folder.
        index: Of the engine.

    Raises:
        ConfigError: DeepSpeed cannot.
    """
    if getattr(engine, "zero_nvme_offload_optimizer", bool)():
        raise _refused("the optimizer's copy of the weights lies on NVMe, where it cannot be replaced")
    if engine.zero_optimization_partition_weights():
        raise _refused("the weights of a model-parallel engine under ZeRO 3 cannot be read alone")
    engine.load_checkpoint(
        str(path),
        tag=f"model{index}",
        load_optimizer_states=False,
        load_lr_scheduler_states=False,
        load_module_only=True,
    )


def _refused(message: str) -> ConfigError:
    key, fix = (
        "hyperparameters.fit.warm_start",
        "write all, at the ZeRO stage and the slots of the checkpoint",
    )
    return ConfigError(Problem(key=key, value="weights", message=message, fix=fix, code="warm-start"))
