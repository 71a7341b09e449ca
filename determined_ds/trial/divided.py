"""Models that DeepSpeed divides among ranks: layers by its AutoTP, experts by its AutoEP.

Of AutoTP, ``model_parallel_size`` ranks make a group, which holds one copy of the model and reads the same batches;
its first rank reports. Of AutoEP, each mixture-of-experts layer of a Hugging Face model is replaced by one that holds a
part of the experts, and its parameters are marked with the original ones, by which checkpoints hold them.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import deepspeed.comm as dist
import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups

from determined_ds.config.strategy import autotp_degree
from determined_ds.errors import ConfigError
from determined_ds.trial.returned import refused

LAYERS, EXPERTS = "tensor_parallel", "expert_parallel"  # sections of the JSON
LAYERS_SIZE, EXPERTS_SIZE = "hyperparameters.model_parallel_size", "hyperparameters.expert_parallel_size"
PLACE = "determined_ds_expert_place"  # attribute of a parameter


@dataclass(frozen=True, kw_only=True)
class ExpertPlace:
    """Where a parameter of DeepSpeed's layer lies in one of the original model."""

    name: str  # of the original parameter
    shape: tuple[int, ...]  # its own: experts, rows of each, columns; or a router's
    first: int = 0  # expert that this rank has
    count: int = 0  # of its experts; 0 for a router, which is whole on each rank
    row: int = 0  # the first of each expert that lies in it
    rows: int = 0  # how many


def degree_of(engine: Any) -> int:
    """Ranks that share a layer of an engine by AutoTP; 1: none."""
    size = getattr(engine, "autotp_size", None)
    return max(1, int(size() or 0)) if callable(size) else 1


def is_copy(engine: Any) -> bool:
    """Whether another rank of a tensor-parallel group computes the same losses, and counts in metrics."""
    return degree_of(engine) > 1 and dist.get_rank(group=groups.get_tensor_model_parallel_group()) > 0


def expert_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Name -> layer of DeepSpeed's, of a model whose experts it divides."""
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, AutoEPMoELayer)}


def expert_degree_of(engine: Any) -> int:
    """Ranks that share the experts of an engine; 0 where DeepSpeed has divided none."""
    return max((int(layer.ep_size) for layer in expert_layers(engine.module).values()), default=0)


@contextlib.contextmanager
def carried_out(model: torch.nn.Module, ds_config: Mapping[str, Any]) -> Iterator[Any]:
    """Around ``deepspeed.initialize``, which divides the model as its configuration says; a collective.

    It yields the model-parallel unit, by which DeepSpeed counts replicas; None without tensor parallel. Refused is a
    model that DeepSpeed would divide without a word, and train on other numbers (``module_inject/auto_tp.py``).
    """
    degree, experts = autotp_degree(ds_config), ds_config.get(EXPERTS) or {}  # never both: config.rules
    if degree == 1 and not experts.get("enabled"):
        yield None
        return
    key, size = (LAYERS_SIZE, degree) if degree > 1 else (EXPERTS_SIZE, experts.get("autoep_size", 1))

    def undivided(message: str, fix: str) -> ConfigError:
        return refused(key, f"{type(model).__name__}: {message}", fix, "undivided", value=size)

    kinds = {type(module) for module in model.modules()}
    if any(kind.__module__.startswith("peft.") for kind in kinds):
        message = "DeepSpeed would replace its adapters by layers without them"
        raise undivided(message, "train all of it (lora: null), or share no layers or experts")
    if degree == 1:
        before = _tensors(model)
        with _recorders_by_name():
            yield None
        if not (layers := expert_layers(model)):
            fix = "use a model of the type mixtral, qwen3_moe or deepseek_v3, or leave expert_parallel out"
            raise undivided("DeepSpeed finds no experts in it", fix)
        for name, layer in layers.items():
            _mark(f"{name}.", layer, before)
        return

    if "Conv1D" in {kind.__name__ for kind in kinds}:
        message = "its matrices are Conv1D, which hold the transposed weights: DeepSpeed cuts nn.Linear alone"
        raise undivided(message, "use a model of nn.Linear, such as model_type: llama")
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)
    if (made := groups.get_tensor_model_parallel_world_size()) != degree:
        message = f"this process has groups of {made} ranks already, and DeepSpeed makes them once"
        raise undivided(message, "start a process for each degree")
    # Of DeepSpeed's own specs for a family several match each layer, and the first is meant: it warns 32 times.
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(is_news := lambda record: "matched multiple layer_specs" not in record.getMessage())
    try:
        yield groups
    finally:
        logger.removeFilter(is_news)
    cut = [module for module in model.modules() if isinstance(module, TensorParallel_Layer)]
    if not cut:
        fix = "name them in tensor_parallel.partition_config.layer_specs, or use a model of the type llama or qwen3"
        raise undivided("none of its layers was cut, so all ranks would compute the same", fix)
    uneven = [module.name for module in cut if len(set(getattr(module, "_partition_sizes", None) or ())) > 1]
    settings = vars(getattr(model, "config", None) or object).items()
    draws = [value for name, value in settings if "dropout" in name or "pdrop" in name]
    draws += [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    if uneven and any(isinstance(value, (int, float)) and value > 0 for value in draws):
        message = f"{uneven[0]} is cut unevenly: the ranks would draw different dropout for what they share"
        fix = "use a model_parallel_size that divides its heads and widths, or train without dropout"
        raise undivided(message, fix)


Original = tuple[tuple[int, ...], "weakref.ref[torch.Tensor]"]  # shape; the tensor, which is not kept alive


def _tensors(module: torch.nn.Module) -> dict[str, Original]:
    """Of each parameter, and each buffer that a checkpoint holds."""
    saved = module.state_dict(keep_vars=True).keys()
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: (_shape(each), weakref.ref(each)) for name, each in named if name in saved}


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _mark(prefix: str, layer: Any, before: Mapping[str, Original]) -> None:
    """Mark all of a layer of DeepSpeed's (``moe/ep_repack.py``), if each of its tensors has an original ``before``."""
    own = {name: each for name, each in before.items() if name.startswith(prefix)}
    alive = {id(tensor): name for name, (_, ref) in own.items() if (tensor := ref()) is not None}
    places: dict[torch.Tensor, ExpertPlace] = {}
    fused, down = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
    if {fused, down} <= own.keys():  # transformers' tensors of all experts
        experts = layer.experts
        local, inner, width = _shape(experts.w1)
        shapes = {fused: (own[fused][0][0], 2 * inner, width), down: (own[fused][0][0], width, inner)}
        if all(own[name][0] == shape for name, shape in shapes.items()):
            rank = torch.distributed.get_rank(groups._get_expert_parallel_group(layer.ep_group_name))
            parts = (("w1", fused, 0, inner), ("w3", fused, inner, inner), ("w2", down, 0, width))
            for weight, name, row, rows in parts:
                held = {"first": rank * local, "count": local, "row": row, "rows": rows}
                places[getattr(experts, weight)] = ExpertPlace(name=name, shape=shapes[name], **held)
    for name, (shape, ref) in _tensors(layer).items():
        tensor = ref()
        if tensor is None or tensor in places:
            continue
        # Shared experts are the same tensors; a router's are copies, under the names that they had in the gate.
        last = name.removeprefix("router.").removeprefix("gate.")
        copied = (original for original in own if original.endswith(f"gate.{last}"))
        whole = alive.get(id(tensor)) or next(copied, "")
        if not whole or own[whole][0] != shape:
            return
        places[tensor] = ExpertPlace(name=whole, shape=shape)
    if {place.name for place in places.values()} == own.keys():
        for tensor, place in places.items():
            setattr(tensor, PLACE, place)


def _recorders_by_name() -> Any:
    """Within, AutoEP (``auto_ep_presets/base.py``) can ask transformers 5.23 by a class's name what is recorded."""
    from transformers.utils import output_capturing

    kind: Any = type(output_capturing._CAN_RECORD_REGISTRY)
    by_model, put = kind.get, kind.__setitem__

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return dict.get(self, key, default) if isinstance(key, str) else by_model(self, key)

    def set_item(self: Any, key: Any, value: Any) -> None:
        (dict.__setitem__ if isinstance(key, str) else put)(self, key, value)

    is_old = kind is dict
    return contextlib.nullcontext() if is_old else mock.patch.multiple(kind, get=get, __setitem__=set_item)


def clip_by_all_experts(parameters: Sequence[Any], max_norm: float) -> float:
    """Clip gradients by their norm over all experts, and return it; a collective. DeepSpeed's averages the ranks'."""
    gradients: dict[str, list[torch.Tensor]] = {"": []}
    for parameter in (each for each in parameters if each.grad is not None):
        name = parameter.group_name if is_moe_param(parameter) else ""
        gradients.setdefault(name, []).append(parameter.grad)
    total = torch.zeros((), device=parameters[0].device)
    for name, found in gradients.items():
        squares = sum((each.float().square().sum() for each in found), torch.zeros_like(total))
        if name:  # each rank of the group has other experts
            torch.distributed.all_reduce(squares, group=groups._get_expert_parallel_group(name))
        total += squares
    norm = float(total.sqrt())
    if norm > max_norm:
        for found in gradients.values():
            torch._foreach_mul_(found, max_norm / (norm + 1e-6))
    return norm
