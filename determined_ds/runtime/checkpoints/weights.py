"""The weights in a checkpoint: read whole, and loaded into engines without the optimizer (a warm start).

In a warm start the chief reads the weights and broadcasts them one by one, so neither the number of slots nor the ZeRO
stage has to be that of the checkpoint. Pipelines and model-parallel engines read their own parts by DeepSpeed's loader.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.protocol.tensor_index import MASTER, WEIGHT
from determined_ds.runtime.checkpoints.built import differing_parameters
from determined_ds.runtime.checkpoints.contents import another_model
from determined_ds.runtime.checkpoints.stored import StoredEngine, stored_engine
from determined_ds.runtime.group.collectives import as_chief
from determined_ds.trial.ddp import CHECKPOINT
from determined_ds.trial.own_parts import merge_parts

WHOLE = ("mp_rank_00_model_states.pt", CHECKPOINT)


def weights_in(path: Path, engine: int) -> dict[str, Any]:
    """The weights of one engine; where ZeRO split them, they come from the optimizer's fp32 copy.

    Args:
        path: A checkpoint's folder.
        engine: Counted from 0.

    Returns:
        Name -> an object whose ``.contiguous()`` is a tensor on the CPU: a part of ZeRO 3 is merged only then, so the
        whole need not fit in memory. Of a pipeline, names begin with the index of the layer.
    """
    folder = path / f"model{engine}"
    if (stored := stored_engine(folder)) is not None:
        names = {**{name: name for name in stored.index.tensors}, **stored.index.aliases}
        return {name: StoredWeight(stored, own) for name, own in names.items()}
    layers = sorted(folder.glob("layer_*-model_states.pt"))
    if layers:
        return {
            f"{_index(file)}.{name}": tensor
            for file in layers
            for name, tensor in torch.load(file, map_location="cpu").items()
        }
    weights: dict[str, Any] = {}
    whole = next((file for name in WHOLE if (file := folder / name).is_file()), None)
    if whole is not None:
        weights.update(torch.load(whole, map_location="cpu", mmap=True)["module"])
    if any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints what it merges
            # With ZeRO 1 it leaves out what is frozen, which is in the file above.
            weights.update(get_fp32_state_dict_from_zero_checkpoint(str(path), folder.name, lazy_mode=True))
    return weights


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
    files = sorted(path.glob("det_state_dict_rank*.pth"))
    states = [torch.load(file, map_location="cpu", mmap=True).get("callbacks", {}) for file in files]
    found = [own[callback]["engines"] for own in states if own.get(callback, {}).get("engines")]
    if not found:
        there = ", ".join(sorted({name for own in states for name in own})) or "none"
        raise CheckpointError(
            f"checkpoint {path} holds no average of a callback {callback!r}; it has: {there}"
        )
    averages = merge_parts([engines[engine] for engines in found])
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


def _index(layer_file: Path) -> int:
    return int(layer_file.name.split("-")[0].removeprefix("layer_"))


# ------------------------------------------------------------------------------------------- a warm start


def take_weights(context: Any, path: Path, uuid: str) -> None:
    """Fill the engines with the weights of a checkpoint; optimizers and schedules stay as built. A collective.

    In 16-bit training the optimizer's fp32 copies begin at the 16-bit weights.

    Args:
        context: Of the trial, its engines wrapped and untrained.
        path: The checkpoint's folder.
        uuid: Of the checkpoint, for messages.

    Raises:
        ConfigError: it is of another model, or the weights lie on NVMe.
    """
    there, here = sum(1 for found in path.glob("model*") if found.is_dir()), len(context.models)
    if there != here:
        raise another_model(uuid, f"it holds {there} engines, and this trial has {here}")
    own_parts = context.resolved.topology.model_parallel_size > 1
    for index, engine in enumerate(context.models):
        if own_parts or isinstance(engine.module, PipelineModule):
            _read_own_part(engine, path, index)
        else:
            _take_from_chief(engine, path, index, context.distributed, uuid)


def _read_own_part(engine: Any, path: Path, index: int) -> None:
    if engine.zero_optimization_partition_weights():
        raise _refused("the weights of a model-parallel engine under ZeRO 3 cannot be read alone")
    engine.load_checkpoint(
        str(path),
        tag=f"model{index}",
        load_optimizer_states=False,
        load_lr_scheduler_states=False,
        load_module_only=True,
    )


def _take_from_chief(engine: Any, path: Path, index: int, distributed: Any, uuid: str) -> None:
    if getattr(engine, "zero_nvme_offload_optimizer", bool)():
        raise _refused("the optimizer's copy of the weights lies on NVMe, where it cannot be replaced")
    stored: dict[str, Any] = {}

    def read() -> None:
        stored.update(weights_in(path, index))
        shapes = {name: f"{tuple(tensor.shape)}" for name, tensor in stored.items()}
        if reasons := differing_parameters(shapes, _wanted(engine, shapes)):
            raise another_model(uuid, "; ".join(reasons))

    as_chief(distributed, read)
    is_chief = distributed.rank == 0
    with torch.no_grad():
        for names, tensor in _tensors(engine):
            if hasattr(tensor, "ds_id"):  # split by ZeRO 3; on leaving, the chief's values are scattered
                with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                    if is_chief:
                        tensor.data.copy_(_first(names, stored))
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                if is_chief:
                    whole.copy_(_first(names, stored))
                if distributed.size > 1:
                    dist.broadcast(whole, src=0)
                tensor.data.copy_(whole)
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:  # every optimizer of DeepSpeed's that keeps a copy of the weights
        refresh()


def _tensors(engine: Any) -> list[tuple[list[str], Any]]:
    """Each parameter and each buffer that a checkpoint holds, with all of its names: a tied weight has several."""
    module = engine.module
    kept = module.state_dict().keys()
    names: dict[int, list[str]] = {}
    tensors: dict[int, Any] = {}
    buffers = (found for found in module.named_buffers(remove_duplicate=False) if found[0] in kept)
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *buffers):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(names[key], tensors[key]) for key in tensors]


def _wanted(engine: Any, stored: Mapping[str, str]) -> dict[str, str]:
    """Name -> shape of what the engine holds, under every name that the checkpoint has, or else the first."""
    wanted = {}
    for names, tensor in _tensors(engine):
        shape = f"{tuple(getattr(tensor, 'ds_shape', tensor.shape))}"
        for name in [name for name in names if name in stored] or names[:1]:
            wanted[name] = shape
    return wanted


def _first(names: list[str], stored: Mapping[str, Any]) -> torch.Tensor:
    found: torch.Tensor = next(stored[name] for name in names if name in stored).contiguous()
    return found


def _refused(message: str) -> ConfigError:
    key, fix = (
        "hyperparameters.fit.warm_start",
        "write all, at the ZeRO stage and the slots of the checkpoint",
    )
    return ConfigError(Problem(key=key, value="weights", message=message, fix=fix, code="warm-start"))
