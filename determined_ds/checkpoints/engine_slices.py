"""The slices of an engine's tensors that this rank holds: the one description by which it is written and filled.

    parameter or buffer     a Whole, by its name in the whole model
    -> Held                 the tensor that the optimizer steps for it: itself, or a flat fp32 tensor of many
    -> Slice                a state's elements on this rank, with their place in the whole: a live view

What is copied into a slice changes the engine. Of a tensor that ranks share, a rank's part lies in the whole as
stretches: of a pipeline or ZeRO without gaps, of columns (tensor parallel) or experts with equal gaps.

Source: ``zero/stage_1_and_2.py``, ``zero/stage3.py``, ``bf16_optimizer.py``, ``fp16/fused_optimizer.py`` and
``fp16/unfused_optimizer.py`` in deepspeed 0.19.8's ``runtime``; ``_set_param_uc_meta`` in ``module_inject/layers.py``
and ``_slice_embedding`` in ``module_inject/auto_tp.py`` for tensor parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from determined_ds.checkpoints.index import BUFFER, FROZEN, MASTER, TRAINED, WEIGHT, Described
from determined_ds.train.memory import base_optimizer
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.expert_parallel import PLACE, ExpertPlace
from determined_ds.trial.tensor_parallel import degree_of

MOMENTUM = "momentum_buffer"  # of Muon


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Elements of a part that lie in the whole in one pattern: ``run`` of them, then a step to the next ``stride``."""

    at: int  # the first one, in the flattened part
    start: int  # the same one, in the flattened whole
    count: int
    run: int = 0  # elements between two gaps; 0: there are none
    stride: int = 0  # from the first element of a run to that of the next, in the whole

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
class Slice:
    """A part of one state of a tensor, as a live view."""

    name: str  # of the tensor
    state: str  # weight, fp32, or one of the optimizer's
    tensor: Any  # its elements, one-dimensional
    start: int  # of the first one, in the flattened whole
    run: int = 0  # as of a stretch
    stride: int = 0

    def within(self, stretches: Iterable[Stretch], at: int = 0) -> Iterator[Slice]:
        """Its elements as they lie in the whole by stretches of a part, in which it begins at element ``at``."""
        for each in stretches:
            part = self.tensor[each.at - at : each.at - at + each.count]
            yield replace(self, tensor=part, start=each.start, run=each.run, stride=each.stride)

    def between(self, first: int, last: int) -> Iterator[Slice]:
        """Its elements from ``first`` to ``last``, counted from its own first: with gaps in up to three slices."""
        count = self.tensor.numel()
        own = Stretch(at=0, start=self.start, count=count, run=self.run, stride=self.stride)
        return self.within(own.between(first, last))

    @property
    def key(self) -> str:
        """Its name in a file: no other slice has it."""
        count = self.tensor.numel()
        place = f"{self.run} of {self.stride} x {count // self.run}" if self.run else f"{self.start + count}"
        return f"{self.name}/{self.state}[{self.start}:{place}]"

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return int(self.tensor.numel() * self.tensor.element_size())


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A tensor of the engine, of which a rank holds all, a part, or none."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # of the whole
    kind: str  # trained by the optimizer, frozen, or a buffer
    tensor: Any  # the parameter or buffer
    is_copy: bool  # another rank writes it: a weight that pipeline stages or tensor-parallel ranks share
    cut: (
        tuple[Stretch, ...] | None
    )  # how this rank's part lies in the whole; None: it has all, but for ZeRO's parts
    holders: tuple[int, int]  # this rank, and how many, among those that hold the same of it


@dataclass(frozen=True, kw_only=True)
class Lies:
    """Where a slice of a parameter lies in a held tensor: its first element in both, and how many."""

    parameter: Any
    start: int
    offset: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor that the optimizer steps: the key of its states in the optimizer."""

    tensor: Any
    group: int  # the number of its group in param_groups
    lies: tuple[Lies, ...]  # which slices of which parameters are in it
    is_parameter: bool = False  # it is the parameter, and not a copy of it
    # Muon under ZeRO 1 and 2: a rank keeps the momentum of all of each matrix that it has a share of.
    # Source: _muon_momentum_buffer in deepspeed 0.19.8's runtime/zero/stage_1_and_2.py.
    has_whole_momentum: bool = False

    def is_along(self, key: str, value: Any) -> bool:
        """Whether a state has a number for each element."""
        if key == MOMENTUM and self.has_whole_momentum:
            return False
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == self.tensor.shape


class EngineSlices:
    """What a rank holds of an engine, by name."""

    def __init__(self, engine: Any, common: Mapping[str, Any] | None = None) -> None:
        self.engine = engine
        self.wholes: dict[str, Whole] = {}
        self._own: dict[int, Whole] = {}  # by the id of a tensor
        self._names: dict[int, str] = {}
        self._aliases: dict[str, str] = {}
        self._copied: list[tuple[Any, Any]] = []
        self._group = getattr(engine, "seq_data_parallel_group", None)
        self.replica, self.replicas = 0, 1
        if dist.is_initialized():
            self.replica, self.replicas = dist.get_rank(self._group), dist.get_world_size(self._group)
        is_tensor_parallel = degree_of(engine) > 1
        writes_whole = not is_tensor_parallel or dist.get_rank(groups.get_tensor_model_parallel_group()) == 0
        self.is_first = self.replica == 0 and writes_whole
        self.held = list(_held_by(engine))
        self.is_split = not isinstance(engine, DDPEngine) and bool(engine.zero_optimization())
        trained = _trained_by(engine.optimizer)
        module = engine.module
        tied: dict[str, list[int]] = {}  # key of tied layers -> their indices in the whole pipeline
        if isinstance(module, PipelineModule):
            for index, layer in enumerate(module._layer_specs):
                if isinstance(layer, TiedLayerSpec):
                    tied.setdefault(layer.key, []).append(index)
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *_kept_buffers(module)):
            names = [name]
            if name.startswith("tied_modules."):  # named by the layers that are tied to it
                _, key, rest = name.split(".", 2)
                names = [f"{index}.{rest}" for index in tied[key]]
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            for own in names:
                own = name_of_whole(tensor, own)
                if (first := self._names.setdefault(id(tensor), own)) != own:
                    self._aliases[own] = first
            if id(tensor) in self._own:
                continue
            kind = BUFFER if not is_parameter else TRAINED if id(tensor) in trained else FROZEN
            cut = _cut_of(tensor)
            name = self._names[id(tensor)]
            self._own[id(tensor)] = Whole(
                name=name,
                shape=whole_shape(tensor),
                kind=kind,
                tensor=tensor,
                is_copy=(cut is None and not writes_whole)
                or bool(getattr(tensor, "ds_pipe_replicated", False)),
                cut=cut,
                holders=self._holders_of(tensor),
            )
            self.wholes.setdefault(name, self._own[id(tensor)])  # several may be parts of one
        self._common = {
            name: self._names[id(tensor)]
            for name, tensor in (common or {}).items()
            if id(tensor) in self._names
        }
        self.weights_are_split = any(hasattr(whole.tensor, "ds_tensor") for whole in self.wholes.values())

    def _holders_of(self, tensor: Any) -> tuple[int, int]:
        """Experts are held by fewer than all replicas."""
        if dist.is_initialized() and is_moe_param(tensor):
            group = groups._get_expert_data_parallel_group(tensor.group_name)
            return dist.get_rank(group), dist.get_world_size(group)
        return self.replica, self.replicas

    # ------------------------------------------------------------------------------------- names

    def name_of(self, parameter: Any) -> str:
        """A parameter's name in checkpoints."""
        return self._names[id(parameter)]

    def other_names(self, name: str) -> tuple[str, ...]:
        """The aliases of a tensor, and its common name."""
        names = (*self._common.items(), *self._aliases.items())
        return tuple(alias for alias, own in names if own == name)

    def described(self) -> Described:
        """What this rank's part of the engine is called, less its values."""
        scalars: dict[str, dict[str, float]] = {}
        for held in self.held:
            states = self.state_of(held).items()
            numbers = {key: float(value) for key, value in states if _is_number(value)}
            for lies in held.lies if numbers else ():
                scalars[self.name_of(lies.parameter)] = numbers
        has_optimizer = self.engine.optimizer is not None
        return Described(
            kinds={name: (whole.shape, whole.kind) for name, whole in self.wholes.items()},
            aliases=dict(self._aliases),
            common=dict(self._common),
            scalars=scalars,
            optimizer=type(base_optimizer(self.engine)).__name__ if has_optimizer else "",
        )

    # ------------------------------------------------------------------------------------- what is held

    def weights(self) -> Iterator[Slice]:
        """The weights and buffers. Under ZeRO 3 those that are trained are the optimizer's, see :meth:`masters`."""
        for whole in self._own.values():
            if not hasattr(whole.tensor, "ds_tensor"):
                yield from self.in_whole(whole.tensor, WEIGHT, 0, self._flattened(whole.tensor))
            elif whole.kind != TRAINED:
                part = whole.tensor.ds_tensor
                start = dist.get_rank(whole.tensor.ds_process_group) * part.numel()
                count = max(0, min(part.numel(), whole.tensor.ds_numel - start))
                if count:
                    yield from self.in_whole(whole.tensor, WEIGHT, start, part.data.view(-1)[:count])

    def masters(self) -> Iterator[Slice]:
        """The optimizer's copies of the weights."""
        for held in self.held:
            if not held.is_parameter:
                yield from self._along(held, MASTER, held.tensor)

    def states(self) -> Iterator[Slice]:
        """The optimizer's states that have a number for each element of a parameter."""
        for held in self.held:
            for key, value in self.state_of(held).items():
                if held.is_along(key, value):
                    yield from self._along(held, key, value)

    def others(self) -> dict[int, dict[str, Any]]:
        """Number of a held tensor -> states that are neither along it nor numbers: an optimizer's own."""
        found = {}
        for number, held in enumerate(self.held):
            states = self.state_of(held).items()
            own = {
                key: value
                for key, value in states
                if value is not None and not held.is_along(key, value) and not _is_number(value)
            }
            if own:
                found[number] = own
        return found

    def state_of(self, held: Held) -> dict[str, Any]:
        """The optimizer's state of a held tensor; empty before the first step."""
        return dict(base_optimizer(self.engine).state.get(held.tensor, {}))

    def in_whole(self, own: Any, state: str, start: int, tensor: Any) -> Iterator[Slice]:
        """A state's elements from ``start``, along the part that this rank has of a weight, as slices of the whole."""
        whole = self._own[id(own)]
        found = Slice(name=whole.name, state=state, tensor=tensor, start=start)
        if whole.cut is None:
            yield found
            return
        for stretch in whole.cut:
            yield from found.within(stretch.between(start, start + tensor.numel()), start)

    def _along(self, held: Held, state: str, tensor: Any) -> Iterator[Slice]:
        flat = self._flattened(tensor)
        for lies in held.lies:
            part = flat[lies.offset : lies.offset + lies.count]
            yield from self.in_whole(lies.parameter, state, lies.start, part)

    def _flattened(self, tensor: Any) -> Any:
        """A tensor in one dimension: a view; or a copy where its memory is in another order, see :meth:`put_back`."""
        flat = tensor.data.reshape(-1)
        if not tensor.is_contiguous():
            self._copied.append((tensor, flat))
        return flat

    def put_back(self) -> None:
        """Copy what was written into slices that are copies to where it belongs."""
        while self._copied:
            tensor, flat = self._copied.pop()
            tensor.data.copy_(flat.view(tensor.shape))

    # ------------------------------------------------------------------------------------- what is written

    def written(self, more: Iterable[Slice] = ()) -> list[Slice]:
        """The slices that this rank writes: all ranks together write each element once."""
        self._copied.clear()
        kinds = (self.weights(), self.masters(), self.states())
        weights, *of_optimizer = (
            [each for each in found if not self.wholes[each.name].is_copy] for found in kinds
        )
        optimizers = list(itertools.chain(*of_optimizer))
        apart = [each for each in more if not self.wholes[each.name].is_copy and each.tensor.numel()]
        if self.weights_are_split:
            split = [each for each in weights if hasattr(self.wholes[each.name].tensor, "ds_tensor")]
            whole = [each for each in weights if not hasattr(self.wholes[each.name].tensor, "ds_tensor")]
            # Equal parts first: at one offset in the files of all ranks.
            return [*split, *optimizers, *apart, *self._share(whole)]
        if self.is_split:
            return [*self._share(weights), *optimizers, *apart]
        return [*self._share([*weights, *optimizers]), *apart]

    def _share(self, slices: Iterable[Slice]) -> list[Slice]:
        """This rank's share of slices that several hold; buffers are those of the first."""
        found: list[Slice] = []
        same: dict[tuple[int, int], list[Slice]] = {}
        for each in slices:
            whole = self.wholes[each.name]
            if whole.kind != BUFFER:
                same.setdefault(whole.holders, []).append(each)
            elif whole.holders[0] == 0:
                found.append(each)
        for (replica, replicas), held in same.items():
            total, at = sum(each.tensor.numel() for each in held), 0
            low, high = (total * index // replicas for index in (replica, replica + 1))
            for each in held:
                count = each.tensor.numel()
                if not count and not replica:
                    found.append(each)
                found.extend(each.between(max(low - at, 0), min(high - at, count)))
                at += count
        return found


# ------------------------------------------------------------------------------------------- DeepSpeed's optimizers


def _held_by(engine: Any) -> Iterator[Held]:
    """The tensors that an engine's optimizer steps on this rank; none where it has no optimizer."""
    optimizer = engine.optimizer
    if isinstance(
        optimizer, DeepSpeedZeroOptimizer_Stage3
    ):  # an equal part of each parameter; the last may be short
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
    elif isinstance(
        optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)
    ):  # addresses are kept at the parameters
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            pairs = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
        else:
            pairs = zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True)
        groups = base_optimizer(engine).param_groups
        is_zero = isinstance(optimizer, DeepSpeedZeroOptimizer) and not optimizer.cpu_offload
        for number, (parameters, partition) in enumerate(pairs):
            mapped = [(each, each._hp_mapping) for each in parameters if each._hp_mapping is not None]
            places = ((each, found.lp_fragment_address, found.hp_fragment_address) for each, found in mapped)
            lies = [
                Lies(parameter=each, start=there.start, offset=here.start, count=there.numel)
                for each, there, here in places
            ]
            whole = is_zero and bool(groups[number].get("use_muon", False))
            yield Held(tensor=partition, group=number, lies=tuple(lies), has_whole_momentum=whole)
    elif isinstance(optimizer, FP16_Optimizer):
        for number, (parameters, flat) in enumerate(
            zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)
        ):
            yield Held(tensor=flat, group=number, lies=tuple(_one_by_one(parameters)))
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        for number, (parameters, copies) in enumerate(
            zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        ):
            for parameter, copy in zip(parameters, copies, strict=True):
                yield Held(tensor=copy, group=number, lies=tuple(_one_by_one([parameter])))
    elif optimizer is not None:
        for number, group in enumerate(base_optimizer(engine).param_groups):
            for parameter in group["params"]:
                yield Held(
                    tensor=parameter, group=number, lies=tuple(_one_by_one([parameter])), is_parameter=True
                )


def _one_by_one(parameters: Iterable[Any]) -> Iterator[Lies]:
    """Whole parameters, one behind the other."""
    offset = 0
    for parameter in parameters:
        yield Lies(parameter=parameter, start=0, offset=offset, count=parameter.numel())
        offset += parameter.numel()


def _trained_by(optimizer: Any) -> set[int]:
    """The ids of the parameters of an optimizer, on whichever rank their states are."""
    if optimizer is None:
        return set()
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if (found := getattr(optimizer, name, None)) is not None:
            return {id(parameter) for group in found for parameter in group}
    base = getattr(optimizer, "optimizer", None) or optimizer
    return {id(parameter) for group in base.param_groups for parameter in group["params"]}


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kept_buffers(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """The buffers that belong to a state_dict, by name."""
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._buffers
        if name not in part._non_persistent_buffers_set
    }
    return [found for found in module.named_buffers(remove_duplicate=False) if found[0] in kept]


def owners_of(engine: Any) -> tuple[int, ...]:
    """Which stage of a pipeline holds each layer; empty where every rank of a replica holds all of them."""
    module = engine.module
    if not isinstance(module, PipelineModule):
        return ()
    return tuple(module.stage_owner(index) for index in range(len(module._layer_specs)))


# ------------------------------------------------------------------------------------------- layers and experts cut


def is_cut(parameter: Any) -> bool:
    """Whether each rank of a tensor-parallel group holds another part of a parameter."""
    meta = getattr(parameter, DS_AUTOTP_UC_META, None)
    return meta is not None and not meta["replicated"]


def name_of_whole(tensor: Any, name: str) -> str:
    """The name of what a parameter or buffer is, or is a part of; ``name`` is its own, in the engine's module."""
    place: ExpertPlace | None = getattr(tensor, PLACE, None)
    return name if place is None else place.name


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a parameter or buffer, of which a rank may hold a part: by ZeRO 3, of its layers or experts."""
    place: ExpertPlace | None = getattr(tensor, PLACE, None)
    if place is not None:
        return place.shape
    if is_cut(tensor):
        return tuple(getattr(tensor, DS_AUTOTP_UC_META)["original_shape"])
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _cut_of(tensor: Any) -> tuple[Stretch, ...] | None:
    """How this rank's part of a parameter lies in the whole; None where it has all of it, but for ZeRO's parts."""
    place: ExpertPlace | None = getattr(tensor, PLACE, None)
    if place is not None and place.count:  # of a matrix of two in one, this one's rows of each expert
        _, height, width = place.shape
        expert, run = height * width, place.rows * width
        pattern = {"run": run, "stride": expert} if run < expert else {}
        start = place.first * expert + place.row * width
        return (Stretch(at=0, start=start, count=place.count * run, **pattern),)
    if not is_cut(tensor):
        return None
    meta: Mapping[str, Any] = getattr(tensor, DS_AUTOTP_UC_META)
    rank, shape = dist.get_rank(groups.get_tensor_model_parallel_group()), tuple(meta["original_shape"])
    inner = math.prod(shape[1:])
    if meta["sub_param_shard_widths"]:  # such as query, key and value: this rank's rows of each
        found, at, base = [], 0, 0
        per_width = shape[0] // sum(sum(widths) for widths in meta["sub_param_shard_widths"])
        for widths in meta["sub_param_shard_widths"]:
            rows = [width * per_width for width in widths]
            found.append(Stretch(at=at, start=(base + sum(rows[:rank])) * inner, count=rows[rank] * inner))
            at, base = at + rows[rank] * inner, base + sum(rows)
        return tuple(found)
    before, own = sum(meta["partition_sizes"][:rank]), meta["partition_sizes"][rank]
    if meta["partition_dim"] == 0:
        return (Stretch(at=0, start=before * inner, count=own * inner),)
    return (Stretch(at=0, start=before, count=shape[0] * own, run=own, stride=shape[1]),)


# ------------------------------------------------------------------------------------------- what cannot be cut


def own_layout(engine: Any) -> str:
    """Why an engine's tensors cannot be written as slices, as far as this rank sees; "" where they can.

    Such an engine is written by DeepSpeed, and read back by as many ranks under the same strategy.
    """
    if isinstance(engine, DDPEngine):
        return ""
    zero, module = engine._config.zero_config, engine.module
    is_pipeline = isinstance(module, PipelineModule)
    if is_pipeline and engine.has_moe_layers:
        return "it has experts"
    if is_pipeline and engine.grid.get_slice_parallel_world_size() > 1:
        return "it is tensor-parallel"
    if not is_pipeline and (reason := _unknown_cut(engine)):
        return reason
    offloads = (zero.offload_optimizer, zero.offload_param)
    if any(offload is not None and offload.device == "nvme" for offload in offloads):
        return "its states are on NVMe"
    if getattr(zero, "mics_shard_size", -1) > 0:
        return "MiCS shards it"
    if getattr(engine, "zenflow", False) or getattr(engine, "super_offload", bool)() is True:
        return "its optimizer runs beside it"
    if engine.random_ltd_enabled() or engine.curriculum_learning_enabled():
        return "DeepSpeed's data efficiency keeps its own state"
    for key, tied in module.tied_comms.items() if is_pipeline else ():
        shared = [tied["weight_attr"]] if isinstance(tied["weight_attr"], str) else tied["weight_attr"]
        for name, _ in tied["module"].named_parameters() if len(tied["ranks"]) > 1 else ():
            if name not in shared:  # of one name on several stages, with values of its own
                return f"tied layer {key} has {name}, which its stages do not share"
    return ""


def _unknown_cut(engine: Any) -> str:
    """Why the parts of an engine whose layers or experts are divided cannot be put together; "" where they can."""
    parameters = dict(engine.module.named_parameters())
    if engine.has_moe_layers and any(
        is_moe_param(each) and not hasattr(each, PLACE) for each in parameters.values()
    ):
        return "it has experts"
    if degree_of(engine) == 1:
        return "it is tensor-parallel by its own mpu" if engine.mp_world_size > 1 else ""
    for name, parameter in parameters.items():
        if not is_cut(parameter):
            continue
        meta = getattr(parameter, DS_AUTOTP_UC_META)
        shape, widths = meta["original_shape"], meta["sub_param_shard_widths"]
        is_known = not meta["conversion"]["unsupported_reason"] and shape is not None and len(shape) <= 2
        if is_known and widths:
            is_known = meta["partition_dim"] == 0 and shape[0] % sum(sum(each) for each in widths) == 0
        elif is_known:
            is_known = bool(meta["partition_sizes"]) and meta["partition_dim"] in (0, 1)
            own = parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
            is_known = is_known and sum(each.count for each in _cut_of(parameter) or ()) == own
        if not is_known:
            return (
                f"it is tensor-parallel, and DeepSpeed cuts {name} in a pattern that cannot be put together"
            )
    return ""
