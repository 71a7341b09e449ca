"""How ranks that share layers or experts cut a parameter: which elements of the whole this rank's part holds.

DeepSpeed says it at each parameter that it has cut::

    by rows (column parallel)        this rank's rows of the whole: elements without gaps
    by columns (row parallel)        of each row of the whole, this rank's columns
    by rows, several in one          the same of each sub-parameter, such as query, key and value
    by experts                       this rank's experts, and of a matrix of two in one this one's rows of each

Source: ``_set_param_uc_meta`` in ``module_inject/layers.py``, ``_slice_embedding`` in ``module_inject/auto_tp.py``
(deepspeed 0.19.8).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups

from determined_ds.trial.expert_parallel import PLACE, ExpertPlace
from determined_ds.trial.tensor_parallel import degree_of


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Elements of a part that lie in the whole in one pattern: ``run`` of them, then a step to the next ``stride``.

    Args:
        at: The first one, in the flattened part.
        start: The same one, in the flattened whole.
        count: How many.
        run: Elements between two gaps; 0: there are none.
        stride: From the first element of a run to that of the next, in the whole; 0 without gaps.
    """

    at: int
    start: int
    count: int
    run: int = 0
    stride: int = 0

    def between(self, first: int, last: int) -> Iterator[Stretch]:
        """Those from ``first`` to ``last`` in the flattened part: a broken run at either end, whole ones between."""
        low, high = max(first, self.at) - self.at, min(last, self.at + self.count) - self.at
        if low >= high:
            return
        if not self.run:
            yield Stretch(at=self.at + low, start=self.start + low, count=high - low)
            return
        whole_low, whole_high = -(-low // self.run) * self.run, high // self.run * self.run
        if whole_low >= whole_high:  # at most two broken runs
            cuts = [low, *([whole_low] if low < whole_low < high else []), high]
        else:
            cuts = sorted({low, whole_low, whole_high, high})
        for begin, end in itertools.pairwise(cuts):
            row, column = divmod(begin, self.run)
            start = self.start + row * self.stride + column
            is_whole = begin == whole_low and end == whole_high
            pattern = {"run": self.run, "stride": self.stride} if is_whole and end - begin > self.run else {}
            yield Stretch(at=self.at + begin, start=start, count=end - begin, **pattern)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A parameter of which this rank holds a part.

    Args:
        shape: Of the whole.
        stretches: Of this rank's part, in its order.
    """

    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    def between(self, first: int, last: int) -> Iterator[Stretch]:
        """The stretches of the elements from ``first`` to ``last`` of the flattened part."""
        for stretch in self.stretches:
            yield from stretch.between(first, last)


def is_cut(parameter: Any) -> bool:
    """Whether each rank of a tensor-parallel group holds another part of a parameter."""
    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    return meta is not None and not meta["replicated"]


def name_of_whole(tensor: Any, name: str) -> str:
    """The name of what a parameter or buffer is, or is a part of.

    Args:
        tensor: The parameter or buffer.
        name: Its own, in the engine's module.
    """
    place = _place(tensor)
    return name if place is None else place.name


def _place(tensor: Any) -> ExpertPlace | None:
    return getattr(tensor, PLACE, None)


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a parameter or buffer, of which a rank may hold a part: by ZeRO 3, of its layers or experts."""
    if (place := _place(tensor)) is not None:
        return place.shape
    if is_cut(tensor):
        return tuple(getattr(tensor, DS_AUTOTP_UC_META)["original_shape"])
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def cut_of(tensor: Any) -> Cut | None:
    """How this rank's part of a parameter lies in the whole; None where it has all of it, but for ZeRO's parts."""
    if (place := _place(tensor)) is not None and place.count:
        return _by_experts(place)
    if not is_cut(tensor):
        return None
    rank = dist.get_rank(group=groups.get_tensor_model_parallel_group())
    return cut_by(getattr(tensor, DS_AUTOTP_UC_META), rank)


def cut_by(meta: Mapping[str, Any], rank: int) -> Cut:
    """The same, by what DeepSpeed says of the parameter.

    Args:
        meta: Its ``ds_autotp_universal_checkpoint_meta``.
        rank: In the tensor-parallel group.
    """
    shape = tuple(meta["original_shape"])
    if meta["sub_param_shard_widths"]:
        return Cut(shape=shape, stretches=tuple(_by_sub_parameters(meta, shape, rank)))
    sizes = meta["partition_sizes"]
    before, own = sum(sizes[:rank]), sizes[rank]
    inner = math.prod(shape[1:])
    if meta["partition_dim"] == 0:
        return Cut(shape=shape, stretches=(Stretch(at=0, start=before * inner, count=own * inner),))
    count = shape[0] * own
    return Cut(shape=shape, stretches=(Stretch(at=0, start=before, count=count, run=own, stride=shape[1]),))


def _by_experts(place: ExpertPlace) -> Cut:
    _, height, width = place.shape
    expert, run = height * width, place.rows * width
    start, count = place.first * expert + place.row * width, place.count * run
    pattern = {"run": run, "stride": expert} if run < expert else {}
    return Cut(shape=place.shape, stretches=(Stretch(at=0, start=start, count=count, **pattern),))


def holders_of(tensor: Any, group: Any) -> tuple[int, int]:
    """(This rank, how many) among those that hold the same of a tensor: experts are held by fewer than all replicas.

    Args:
        tensor: The parameter or buffer.
        group: The replicas.
    """
    if not dist.is_initialized():
        return 0, 1
    if is_moe_param(tensor):
        group = groups._get_expert_data_parallel_group(tensor.group_name)
    return dist.get_rank(group=group), dist.get_world_size(group=group)


def _by_sub_parameters(meta: Mapping[str, Any], shape: tuple[int, ...], rank: int) -> Iterator[Stretch]:
    """One stretch of each sub-parameter, all along the first dimension."""
    inner, at, base = math.prod(shape[1:]), 0, 0
    per_width = shape[0] // sum(sum(widths) for widths in meta["sub_param_shard_widths"])
    for widths in meta["sub_param_shard_widths"]:
        rows = [width * per_width for width in widths]
        count = rows[rank] * inner
        yield Stretch(at=at, start=(base + sum(rows[:rank])) * inner, count=count)
        at, base = at + count, base + sum(rows)


def why_not(engine: Any) -> str:
    """Why the parts of an engine whose layers or experts are divided cannot be put together; "" where they can."""
    if engine.has_moe_layers and any(
        is_moe_param(each) and _place(each) is None for each in engine.module.parameters()
    ):
        return "it has experts"
    if degree_of(engine) == 1:
        return "it is tensor-parallel by its own mpu" if engine.mp_world_size > 1 else ""
    for name, parameter in engine.module.named_parameters():
        meta = getattr(parameter, DS_AUTOTP_UC_META, None)
        if meta is None or meta["replicated"]:
            continue
        if meta["conversion"]["unsupported_reason"] or not _is_described(meta, parameter):
            return (
                f"it is tensor-parallel, and DeepSpeed cuts {name} in a pattern that cannot be put together"
            )
    return ""


def _is_described(meta: Mapping[str, Any], parameter: Any) -> bool:
    shape, widths = meta["original_shape"], meta["sub_param_shard_widths"]
    if shape is None or len(shape) > 2:
        return False
    if widths:
        return meta["partition_dim"] == 0 and shape[0] % sum(sum(each) for each in widths) == 0
    own = parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
    if not meta["partition_sizes"] or meta["partition_dim"] not in (0, 1):
        return False
    rank = dist.get_rank(group=groups.get_tensor_model_parallel_group())
    return bool(sum(each.count for each in cut_by(meta, rank).stretches) == own)


def first_in_group(engine: Any) -> bool:
    """Whether this rank writes what all ranks of its tensor-parallel group hold."""
    return degree_of(engine) == 1 or dist.get_rank(group=groups.get_tensor_model_parallel_group()) == 0


def is_trained_copy(tensor: Any) -> bool:
    """Whether all ranks of a tensor-parallel group train their own copy of a parameter, and hold it whole."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return is_parameter and not is_cut(tensor) and not hasattr(tensor, "ds_tensor")
