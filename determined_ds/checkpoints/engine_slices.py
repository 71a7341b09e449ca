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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.moe.utils import is_moe_param
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from determined_ds.checkpoints.index import BUFFER, FROZEN, MASTER, TRAINED, WEIGHT, Described
from determined_ds.train.memory import base_optimizer
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.expert_parallel import PLACE, ExpertPlace
from determined_ds.trial.tensor_parallel import degree_of

MOMENTUM = "momentum_buffer"  # of Muon


class Stretch(NamedTuple):
    """Elements that lie in a flattened whole in one pattern: ``run`` of them, then a step to the next ``stride``."""

    start: int  # the first one
    length: int
    run: int = 0  # elements between two gaps; 0: there are none
    stride: int = 0  # from the first element of a run to that of the next

    def between(self, first: int, last: int) -> Iterator[tuple[int, Stretch]]:
        """Its elements from ``first`` to ``last``, in up to three parts; each with the number of its first element."""
        low, high, run = max(first, 0), min(last, self.length), self.run or self.length
        if low >= high:
            return
        edges = (-(-low // run) * run, high // run * run)
        cuts = sorted({low, high, *(edge for edge in edges if low < edge < high)})
        for begin, end in itertools.pairwise(cuts):
            row, column = divmod(begin, run)
            pattern = (self.run, self.stride) if end - begin > run else (0, 0)
            yield begin, Stretch(self.start + row * self.stride + column, end - begin, *pattern)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of one state of a tensor, as a live view."""

    name: str  # of the tensor
    state: str  # weight, fp32, or one of the optimizer's
    tensor: Any  # its elements, one-dimensional
    place: Stretch  # of its elements in the whole

    def between(self, first: int, last: int) -> Iterator[Slice]:
        """Its elements from ``first`` to ``last``, counted from its own first: with gaps in up to three slices."""
        for at, place in self.place.between(first, last):
            yield replace(self, tensor=self.tensor[at : at + place.length], place=place)

    @property
    def key(self) -> str:
        """Its name in a file: no other slice has it."""
        start, length, run, stride = self.place
        place = f"{run} of {stride} x {length // run}" if run else f"{start + length}"
        return f"{self.name}/{self.state}[{start}:{place}]"

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
    cut: tuple[Stretch, ...] | None  # this rank's part of it; None: it has all, but for ZeRO's parts
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
    # Muon under ZeRO 1 and 2: a rank keeps the momentum of all of each matrix that it has a share of.
    # Source: _muon_momentum_buffer in deepspeed 0.19.8's runtime/zero/stage_1_and_2.py.
    has_whole_momentum: bool = False

    @property
    def is_parameter(self) -> bool:
        """Whether it is the parameter, and not a copy of it."""
        return any(lies.parameter is self.tensor for lies in self.lies)

    def is_along(self, key: str, value: Any) -> bool:
        """Whether a state has a number for each element."""
        if key == MOMENTUM and self.has_whole_momentum:
            return False
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == self.tensor.shape


class EngineSlices:
    """What a rank holds of an engine, by name.

    Args:
        engine: DeepSpeed's, or a :class:`~determined_ds.trial.ddp.DDPEngine`.
        common: Name that all forms of the model have in common -> parameter or buffer.
    """

    def __init__(self, engine: Any, common: Mapping[str, Any] | None = None) -> None:
        self.engine = engine
        self.wholes: dict[str, Whole] = {}
        self.held = list(_held_by(engine))
        self.is_split = not isinstance(engine, DDPEngine) and bool(engine.zero_optimization())
        self.replica, self.replicas = 0, 1
        if dist.is_initialized():
            group = getattr(engine, "seq_data_parallel_group", None)
            self.replica, self.replicas = dist.get_rank(group), dist.get_world_size(group)
        writes_whole = degree_of(engine) == 1 or dist.get_rank(groups.get_tensor_model_parallel_group()) == 0
        self.is_first = self.replica == 0 and writes_whole
        self._own: dict[int, Whole] = {}  # by the id of a tensor
        self._aliases: dict[str, str] = {}
        self._copied: list[tuple[Any, Any]] = []
        module = engine.module
        trained = {id(parameter) for group in _groups_of(engine) for parameter in group}
        tied: dict[str, list[int]] = {}  # key of tied layers -> their indices in the whole pipeline
        if isinstance(module, PipelineModule):
            for index, layer in enumerate(module._layer_specs):
                if isinstance(layer, TiedLayerSpec):
                    tied.setdefault(layer.key, []).append(index)
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *_kept_buffers(module)):
            names = [name_of_whole(tensor, name)]
            if name.startswith("tied_modules."):  # named by the layers that are tied to it
                _, key, rest = name.split(".", 2)
                names = [f"{index}.{rest}" for index in tied[key]]
            if id(tensor) not in self._own:
                is_parameter, cut = isinstance(tensor, torch.nn.Parameter), _cut_of(tensor)
                holders = (self.replica, self.replicas)
                if dist.is_initialized() and is_moe_param(tensor):  # held by fewer than all replicas
                    among = groups._get_expert_data_parallel_group(tensor.group_name)
                    holders = (dist.get_rank(among), dist.get_world_size(among))
                whole = self._own[id(tensor)] = Whole(
                    name=names[0],
                    shape=whole_shape(tensor),
                    kind=BUFFER if not is_parameter else TRAINED if id(tensor) in trained else FROZEN,
                    tensor=tensor,
                    is_copy=bool(
                        getattr(tensor, "ds_pipe_replicated", False) or (cut is None and not writes_whole)
                    ),
                    cut=cut,
                    holders=holders,
                )
                self.wholes.setdefault(whole.name, whole)  # several may be parts of one
            first = self._own[id(tensor)].name
            self._aliases.update((other, first) for other in names if other != first)
        self._common = {
            name: self._own[id(tensor)].name
            for name, tensor in (common or {}).items()
            if id(tensor) in self._own
        }
        self.weights_are_split = any(hasattr(whole.tensor, "ds_tensor") for whole in self.wholes.values())

    # ------------------------------------------------------------------------------------- names

    def name_of(self, parameter: Any) -> str:
        """A parameter's name in checkpoints."""
        return self._own[id(parameter)].name

    def other_names(self, name: str) -> tuple[str, ...]:
        """The aliases of a tensor, and its common name."""
        names = (*self._common.items(), *self._aliases.items())
        return tuple(alias for alias, own in names if own == name)

    def described(self) -> Described:
        """What this rank's part of the engine is called, less its values."""
        scalars: dict[str, dict[str, float]] = {}
        for held in self.held:
            if numbers := {key: float(value) for key, value in self.states_of(held)[1].items()}:
                scalars.update((self.name_of(lies.parameter), numbers) for lies in held.lies)
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
            for key, value in self.states_of(held)[0].items():
                yield from self._along(held, key, value)

    def states_of(self, held: Held) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The optimizer's states of a held tensor: those along it, numbers, and others; none before the first step."""
        along, numbers, others = {}, {}, {}
        for key, value in base_optimizer(self.engine).state.get(held.tensor, {}).items():
            is_tensor = isinstance(value, torch.Tensor)
            if held.is_along(key, value):
                along[key] = value
            elif (
                value.ndim == 0 if is_tensor else isinstance(value, (int, float)) and value is not bool(value)
            ):
                numbers[key] = value
            elif value is not None:
                others[key] = value
        return along, numbers, others

    def in_whole(self, own: Any, state: str, start: int, tensor: Any) -> Iterator[Slice]:
        """A state's elements from ``start``, along the part that this rank has of a weight, as slices of the whole."""
        whole, end = self._own[id(own)], start + tensor.numel()
        if whole.cut is None:
            place = Stretch(start, tensor.numel())
            yield Slice(name=whole.name, state=state, tensor=tensor, place=place)
        before = 0  # elements of this rank's part in earlier stretches
        for stretch in whole.cut or ():
            for at, place in stretch.between(start - before, end - before):
                begin = before + at - start
                part = tensor[begin : begin + place.length]
                yield Slice(name=whole.name, state=state, tensor=part, place=place)
            before += stretch.length

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
        """The slices that this rank writes, with ``more`` of its own: all ranks together write each element once."""

        def own(*slices: Iterable[Slice]) -> list[Slice]:
            return [each for each in itertools.chain(*slices) if not self.wholes[each.name].is_copy]

        self._copied.clear()
        weights, optimizers = own(self.weights()), own(self.masters(), self.states())
        apart = [each for each in own(more) if each.tensor.numel()]
        if not self.is_split:
            return [*self._share([*weights, *optimizers]), *apart]
        parts: dict[bool, list[Slice]] = {True: [], False: []}
        for each in weights:
            parts[hasattr(self.wholes[each.name].tensor, "ds_tensor")].append(each)
        # Equal parts first: at one offset in the files of all ranks.
        return [*parts[True], *optimizers, *apart, *self._share(parts[False])]

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
            total, at = sum(each.place.length for each in held), 0
            low, high = (total * index // replicas for index in (replica, replica + 1))
            for each in held:
                if not each.place.length and not replica:
                    found.append(each)
                found.extend(each.between(low - at, high - at))
                at += each.place.length
        return found


# ------------------------------------------------------------------------------------------- DeepSpeed's optimizers


def _held_by(engine: Any) -> Iterator[Held]:
    """The tensors that an engine's optimizer steps on this rank; none where it has no optimizer."""
    optimizer = engine.optimizer
    if optimizer is None:
        return
    param_groups = base_optimizer(engine).param_groups
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for number, parameters in enumerate(optimizer.fp16_groups):
            found = []
            for parameter in parameters:  # an equal part of each; the last may be short
                _, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = dist.get_rank(parameter.ds_process_group) * size
                count = max(0, min(size, parameter.ds_numel - start))
                if count:
                    found.append(Lies(parameter=parameter, start=start, offset=offset, count=count))
            group = optimizer.sub_group_to_group_id[number]
            yield Held(tensor=optimizer.fp32_partitioned_groups_flat[number], group=group, lies=tuple(found))
    elif isinstance(optimizer, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
        is_zero = isinstance(optimizer, DeepSpeedZeroOptimizer)
        split = optimizer.bit16_groups if is_zero else optimizer.bf16_groups
        flat = optimizer.single_partition_of_fp32_groups if is_zero else optimizer.fp32_groups_flat_partition
        for number, (parameters, partition) in enumerate(zip(split, flat, strict=True)):
            found = []
            for parameter in parameters:  # which keep the addresses
                if (mapping := parameter._hp_mapping) is not None:
                    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                    start, offset, count = there.start, here.start, there.numel
                    found.append(Lies(parameter=parameter, start=start, offset=offset, count=count))
            whole = (
                is_zero and not optimizer.cpu_offload and bool(param_groups[number].get("use_muon", False))
            )
            yield Held(tensor=partition, group=number, lies=tuple(found), has_whole_momentum=whole)
    else:
        for number, parameters in enumerate(_groups_of(engine)):
            found = [Lies(parameter=each, start=0, offset=0, count=each.numel()) for each in parameters]
            tensors = param_groups[number]["params"]
            if isinstance(optimizer, FP16_Optimizer):  # one tensor of all, one behind the other
                offsets = itertools.accumulate((each.count for each in found), initial=0)
                lies = tuple(replace(each, offset=at) for each, at in zip(found, offsets, strict=False))
                yield Held(tensor=tensors[0], group=number, lies=lies)
                continue
            for each, tensor in zip(found, tensors, strict=True):
                yield Held(tensor=tensor, group=number, lies=(each,))


def _groups_of(engine: Any) -> list[list[Any]]:
    """The parameters of each group of an engine's optimizer, on whichever rank their states are."""
    optimizer = engine.optimizer
    if optimizer is None:
        return []
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if (found := getattr(optimizer, name, None)) is not None:
            return list(found)
    return [group["params"] for group in base_optimizer(engine).param_groups]


def _kept_buffers(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """The buffers that belong to a state_dict, by name."""
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._buffers.keys() - part._non_persistent_buffers_set
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
        pattern = (run, expert) if run < expert else (0, 0)
        return (Stretch(place.first * expert + place.row * width, place.count * run, *pattern),)
    if not is_cut(tensor):
        return None
    meta: Mapping[str, Any] = getattr(tensor, DS_AUTOTP_UC_META)
    rank, shape = dist.get_rank(groups.get_tensor_model_parallel_group()), tuple(meta["original_shape"])
    inner = math.prod(shape[1:])
    if meta["sub_param_shard_widths"]:  # such as query, key and value: this rank's rows of each
        found, base = [], 0
        per_width = shape[0] // sum(sum(widths) for widths in meta["sub_param_shard_widths"])
        for widths in meta["sub_param_shard_widths"]:
            rows = [width * per_width for width in widths]
            found.append(Stretch((base + sum(rows[:rank])) * inner, rows[rank] * inner))
            base += sum(rows)
        return tuple(found)
    before, own = sum(meta["partition_sizes"][:rank]), meta["partition_sizes"][rank]
    if meta["partition_dim"] == 0:
        return (Stretch(before * inner, own * inner),)
    return (Stretch(before, shape[0] * own, own, shape[1]),)


# ------------------------------------------------------------------------------------------- what cannot be cut


def own_layout(engine: Any) -> str:
    """Why an engine's tensors cannot be written as slices, as far as this rank sees; "" where they can.

    Such an engine is written by DeepSpeed, and read back by as many ranks under the same strategy.
    """
    if isinstance(engine, DDPEngine):
        return ""
    zero, module = engine._config.zero_config, engine.module
    is_pipeline = isinstance(module, PipelineModule)
    parameters = dict(module.named_parameters())
    has_experts = engine.has_moe_layers and (
        is_pipeline or any(is_moe_param(each) and not hasattr(each, PLACE) for each in parameters.values())
    )
    if has_experts:
        return "it has experts"
    if is_pipeline and engine.grid.get_slice_parallel_world_size() > 1:
        return "it is tensor-parallel"
    if not is_pipeline and degree_of(engine) == 1 and engine.mp_world_size > 1:
        return "it is tensor-parallel by its own mpu"
    if unknown := [name for name, each in parameters.items() if is_cut(each) and not _is_known_cut(each)]:
        return (
            f"it is tensor-parallel, and DeepSpeed cuts {unknown[0]} in a pattern that cannot be put together"
        )
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


def _is_known_cut(parameter: Any) -> bool:
    """Whether the parts of a parameter that tensor-parallel ranks hold can be put together."""
    meta = getattr(parameter, DS_AUTOTP_UC_META)
    shape, widths, sizes = meta["original_shape"], meta["sub_param_shard_widths"], meta["partition_sizes"]
    if meta["conversion"]["unsupported_reason"] or shape is None or len(shape) > 2:
        return False
    if widths:
        return bool(meta["partition_dim"] == 0 and shape[0] % sum(sum(each) for each in widths) == 0)
    own = getattr(parameter, "ds_numel", parameter.numel())
    cut = _cut_of(parameter) if sizes and meta["partition_dim"] in (0, 1) else None
    return cut is not None and sum(each.length for each in cut) == own
