"""The tensors that an engine's optimizer steps, and which slices of which parameters lie in each.

Without ZeRO and half precision that is each parameter itself; otherwise it is a flat fp32 tensor, which holds many
parameters, or this rank's part of them.

Source: ``zero/stage_1_and_2.py``, ``zero/stage3.py``, ``bf16_optimizer.py``, ``fp16/fused_optimizer.py`` and
``fp16/unfused_optimizer.py`` in deepspeed 0.19.8's ``runtime``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from determined_ds.runtime.checkpoints.state_bytes import base_optimizer

MOMENTUM = "momentum_buffer"  # of Muon


@dataclass(frozen=True, kw_only=True)
class Lies:
    """Where a slice of a parameter lies in a held tensor.

    Args:
        parameter: The parameter.
        start: Of the slice, in the flattened parameter.
        offset: In the flattened held tensor.
        count: Elements.
    """

    parameter: Any
    start: int
    offset: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor that the optimizer steps.

    Args:
        tensor: The key of its states in the optimizer.
        group: The number of its group in ``param_groups``.
        lies: What is in it.
        is_parameter: Whether it is the parameter, and not a copy of it.
    """

    tensor: Any
    group: int
    lies: tuple[Lies, ...]
    is_parameter: bool = False


def held_by(engine: Any) -> list[Held]:
    """The tensors that an engine's optimizer steps on this rank; none where it has no optimizer.

    Args:
        engine: DeepSpeed's, or a :class:`~determined_ds.trial.ddp.DDPEngine`.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(_zero3(optimizer))
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(_linked(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups))
    if isinstance(optimizer, BF16_Optimizer):
        return list(_linked(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition))
    if isinstance(optimizer, FP16_Optimizer):
        return list(_flat(optimizer.fp16_groups, optimizer.fp32_groups_flat))
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        copies = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return [
            Held(tensor=copy, group=number, lies=(_whole(parameter),))
            for number, (parameters, tensors) in enumerate(copies)
            for parameter, copy in zip(parameters, tensors, strict=True)
        ]
    groups = [] if optimizer is None else base_optimizer(engine).param_groups
    return [
        Held(tensor=parameter, group=number, lies=(_whole(parameter),), is_parameter=True)
        for number, group in enumerate(groups)
        for parameter in group["params"]
    ]


def _whole(parameter: Any) -> Lies:
    return Lies(parameter=parameter, start=0, offset=0, count=parameter.numel())


def _flat(groups: Sequence[Any], flats: Sequence[Any]) -> Iterator[Held]:
    """Whole parameters, one behind the other."""
    for number, (parameters, flat) in enumerate(zip(groups, flats, strict=True)):
        lies, offset = [], 0
        for parameter in parameters:
            lies.append(Lies(parameter=parameter, start=0, offset=offset, count=parameter.numel()))
            offset += parameter.numel()
        yield Held(tensor=flat, group=number, lies=tuple(lies))


def _linked(groups: Sequence[Any], partitions: Sequence[Any]) -> Iterator[Held]:
    """This rank's partition of each group, by the addresses that DeepSpeed keeps at the parameters."""
    for number, (parameters, partition) in enumerate(zip(groups, partitions, strict=True)):
        lies = []
        for parameter in parameters:
            found = parameter._hp_mapping
            if found is not None:
                lies.append(
                    Lies(
                        parameter=parameter,
                        start=found.lp_fragment_address.start,
                        offset=found.hp_fragment_address.start,
                        count=found.lp_fragment_address.numel,
                    )
                )
        yield Held(tensor=partition, group=number, lies=tuple(lies))


def _zero3(optimizer: Any) -> Iterator[Held]:
    """This rank's equal part of each parameter; the last ranks' may be short, or empty."""
    for number, parameters in enumerate(optimizer.fp16_groups):
        lies = []
        for parameter in parameters:
            _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank(parameter.ds_process_group) * size
            count = max(0, min(size, parameter.ds_numel - start))
            if count:
                lies.append(Lies(parameter=parameter, start=start, offset=offset, count=count))
        group = optimizer.sub_group_to_group_id[number]
        yield Held(tensor=optimizer.fp32_partitioned_groups_flat[number], group=group, lies=tuple(lies))


def state_of(engine: Any, held: Held) -> dict[str, Any]:
    """The optimizer's state of a held tensor, along it; empty before the first step."""
    found = dict(base_optimizer(engine).state.get(held.tensor, {}))
    matrices = matrices_of(engine, held)
    if matrices and MOMENTUM in found:
        found[MOMENTUM] = _cut(found[MOMENTUM], matrices, held)
    return found


def matrices_of(engine: Any, held: Held) -> tuple[Lies, ...]:
    """Where the matrices lie in Muon's momentum, where that is not along the held tensor; else none.

    Under ZeRO 1 and 2 a rank keeps the momentum of all of each matrix that it has a share of.

    Source: ``_muon_momentum_buffer`` in deepspeed 0.19.8's ``runtime/zero/stage_1_and_2.py``.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return ()
    if not base_optimizer(engine).param_groups[held.group].get("use_muon", False):
        return ()
    found, offset = [], 0
    for parameter in optimizer.params_in_partition[held.group]:
        found.append(Lies(parameter=parameter, start=0, offset=offset, count=parameter.numel()))
        offset += parameter.numel()
    return tuple(found)


def _cut(momentum: Any, matrices: Sequence[Lies], held: Held) -> Any:
    """Of the momentum of whole matrices, that of their slices in a held tensor."""
    offsets = {id(each.parameter): each.offset for each in matrices}
    along = torch.zeros_like(held.tensor.data, dtype=momentum.dtype)
    for each in held.lies:
        start = offsets[id(each.parameter)] + each.start
        along[each.offset : each.offset + each.count] = momentum[start : start + each.count]
    return along


def is_along(value: Any, held: Held) -> bool:
    """Whether a state has a number for each element of the held tensor."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == held.tensor.shape


def groups_of(engine: Any) -> list[list[Any]]:
    """The parameters in each group of an engine's optimizer, on whichever rank their states are."""
    optimizer = engine.optimizer
    if optimizer is None:
        return []
    kept = (getattr(optimizer, name, None) for name in ("bit16_groups", "bf16_groups", "fp16_groups"))
    groups = next((each for each in kept if each is not None), None)
    if groups is None:
        return [list(group["params"]) for group in base_optimizer(engine).param_groups]
    numbers = getattr(optimizer, "sub_group_to_group_id", None) or {}
    found: dict[int, list[Any]] = {}
    for number, group in enumerate(groups):
        found.setdefault(numbers.get(number, number), []).extend(group)
    return [found[number] for number in sorted(found)]
