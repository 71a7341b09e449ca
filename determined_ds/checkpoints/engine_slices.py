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

from determined_ds.checkpoints.index import BUFFER, FROZEN, MASTER, TRAINED, WEIGHT, EngineIndex, StoredTensor
from determined_ds.train.memory import base_optimizer
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.divided import PLACE, ExpertPlace, degree_of

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


class Whole(NamedTuple):
    """A parameter or buffer of the engine, of which a rank holds all, a part, or none."""

    name: str  # in the checkpoint, of what it is or is a part of
    tensor: Any
    kind: str  # trained by the optimizer, frozen, or a buffer
    cut: tuple[Stretch, ...] | None  # this rank's part of it; None: it has all, but for ZeRO's parts
    holders: tuple[int, int]  # this rank, and how many, among those that hold the same of it
    is_copy: bool  # another rank writes it: a weight that pipeline stages or tensor-parallel ranks share


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of one state of a tensor, as a live view."""

    whole: Whole  # the tensor
    state: str  # weight, fp32, or one of the optimizer's
    tensor: Any  # its elements, one-dimensional
    place: Stretch  # of its elements in the whole
    is_alone: bool  # no other rank holds it

    def between(self, first: int, last: int) -> Iterator[Slice]:
        """Its elements from ``first`` to ``last``, counted from its own first: with gaps in up to three slices."""
        for at, place in self.place.between(first, last):
            yield replace(self, tensor=self.tensor[at : at + place.length], place=place)

    @property
    def key(self) -> str:
        """Its name in a file: no other slice has it."""
        start, length, run, stride = self.place
        place = f"{run} of {stride} x {length // run}" if run else f"{start + length}"
        return f"{self.whole.name}/{self.state}[{start}:{place}]"

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return int(self.tensor.numel() * self.tensor.element_size())


class Lies(NamedTuple):
    """Where a slice of a parameter lies in a held tensor."""

    parameter: Any
    start: int  # its first element in the flattened parameter
    offset: int  # and in the held tensor
    length: int


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
    """What a rank holds of an engine of DeepSpeed or of ours, by name; ``common`` as in an index, with the tensors.

    Attributes:
        index: The tensors of which this rank has a part, without their states: names, shapes, kinds.
        held: What the optimizer steps.
    """

    def __init__(self, engine: Any, common: Mapping[str, Any] | None = None) -> None:
        self.engine, self.held = engine, list(_held_by(engine))
        self.is_split = not isinstance(engine, DDPEngine) and bool(engine.zero_optimization())
        self.replica, self.replicas = _place_in(getattr(engine, "seq_data_parallel_group", None))
        writes_whole = degree_of(engine) == 1 or _place_in(groups.get_tensor_model_parallel_group())[0] == 0
        self.is_first = self.replica == 0 and writes_whole
        optimizer = "" if engine.optimizer is None else type(base_optimizer(engine)).__name__
        self.index = EngineIndex(tensors={}, optimizer=optimizer)
        self._own: dict[int, Whole] = {}  # by the id of a tensor
        self._copied: list[tuple[Any, Any]] = []
        module = engine.module
        trained = {id(parameter) for group in _groups_of(engine) for parameter in group}
        tied: dict[str, list[int]] = {}  # key of tied layers -> their indices in the whole pipeline
        for index, layer in enumerate(module._layer_specs if isinstance(module, PipelineModule) else ()):
            if isinstance(layer, TiedLayerSpec):
                tied.setdefault(layer.key, []).append(index)
        for own_name, tensor in (*module.named_parameters(remove_duplicate=False), *_kept_buffers(module)):
            name, shape, cut = place_of(tensor, own_name)
            names = [name]
            if name.startswith("tied_modules."):  # named by the layers that are tied to it
                _, key, rest = name.split(".", 2)
                names = [f"{index}.{rest}" for index in tied[key]]
            if id(tensor) not in self._own:
                kind = TRAINED if id(tensor) in trained else FROZEN
                is_shared = bool(getattr(tensor, "ds_pipe_replicated", False))
                holders = self.replica, self.replicas
                if dist.is_initialized() and is_moe_param(tensor):  # held by fewer than all replicas
                    holders = _place_in(groups._get_expert_data_parallel_group(tensor.group_name))
                self._own[id(tensor)] = whole = Whole(
                    name=names[0],
                    tensor=tensor,
                    kind=kind if isinstance(tensor, torch.nn.Parameter) else BUFFER,
                    cut=cut,
                    holders=holders,
                    is_copy=is_shared or (cut is None and not writes_whole),
                )
                # Several may be parts of one.
                self.index.tensors.setdefault(whole.name, StoredTensor(shape=shape, kind=whole.kind))
            first = self.name_of(tensor)
            self.index.aliases.update((other, first) for other in names if other != first)
        for name, tensor in (common or {}).items():
            if id(tensor) in self._own:
                self.index.common[name] = self.name_of(tensor)
        self.weights_are_split = any(hasattr(whole.tensor, "ds_tensor") for whole in self._own.values())

    def name_of(self, parameter: Any) -> str:
        """A parameter's name in checkpoints."""
        return self._own[id(parameter)].name

    def wholes(self) -> Iterable[Whole]:
        """Its parameters and buffers."""
        return self._own.values()

    def described(self) -> EngineIndex:
        """What this rank's part of the engine is, less its slices."""
        scalars: dict[str, dict[str, float]] = {}
        for held in self.held:
            if numbers := {key: float(value) for key, value in self.states_of(held)[1].items()}:
                scalars.update((self.name_of(lies.parameter), numbers) for lies in held.lies)
        tensors = {
            name: replace(tensor, states={}, scalars=scalars.get(name, {}))
            for name, tensor in self.index.tensors.items()
        }
        return replace(self.index, tensors=tensors)

    # ------------------------------------------------------------------------------------- what is held

    def weights(self) -> Iterator[Slice]:
        """The weights and buffers. Under ZeRO 3 those that are trained are the optimizer's, see :meth:`masters`."""
        for whole in self._own.values():
            if not hasattr(whole.tensor, "ds_tensor"):
                flat = self._flattened(whole.tensor)
                yield from self._in_whole(whole.tensor, WEIGHT, 0, flat, is_alone=False)
            elif whole.kind != TRAINED:
                part = whole.tensor.ds_tensor
                start = dist.get_rank(whole.tensor.ds_process_group) * part.numel()
                count = max(0, min(part.numel(), whole.tensor.ds_numel - start))
                if count:
                    yield from self._in_whole(whole.tensor, WEIGHT, start, part.data.view(-1)[:count])

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
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if held.is_along(key, value):
                along[key] = value
            elif is_number or (isinstance(value, torch.Tensor) and value.ndim == 0):
                numbers[key] = value
            elif value is not None:
                others[key] = value
        return along, numbers, others

    def _in_whole(
        self, own: Any, state: str, start: int, tensor: Any, *, is_alone: bool = True
    ) -> Iterator[Slice]:
        """A state's elements from ``start``, along the part that this rank has of a weight, as slices of the whole."""
        whole, end = self._own[id(own)], start + tensor.numel()
        if whole.cut is None:
            place = Stretch(start, tensor.numel())
            yield Slice(whole=whole, state=state, tensor=tensor, place=place, is_alone=is_alone)
        before = 0  # elements of this rank's part in earlier stretches
        for stretch in whole.cut or ():
            for at, place in stretch.between(start - before, end - before):
                part = tensor[before + at - start :][: place.length]
                yield Slice(whole=whole, state=state, tensor=part, place=place, is_alone=is_alone)
            before += stretch.length

    def _along(self, held: Held, state: str, tensor: Any) -> Iterator[Slice]:
        flat = self._flattened(tensor)
        for parameter, start, offset, length in held.lies:
            part = flat[offset : offset + length]
            yield from self._in_whole(parameter, state, start, part, is_alone=self.is_split)

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

    def written(self) -> list[Slice]:
        """The slices that this rank writes: all ranks together write each element once.

        Those that several ranks hold are shared out by their elements; buffers are those of the first.
        """
        self._copied.clear()
        alone: list[Slice] = []
        shared: list[Slice] = []
        same: dict[tuple[int, int], list[Slice]] = {}
        for each in itertools.chain(self.weights(), self.masters(), self.states()):
            if each.whole.is_copy:
                continue
            if each.is_alone:
                alone.extend([each] if each.tensor.numel() else [])
            elif each.whole.kind != BUFFER:
                same.setdefault(each.whole.holders, []).append(each)
            elif each.whole.holders[0] == 0:
                shared.append(each)
        for (replica, replicas), held in same.items():
            total, at = sum(each.place.length for each in held), 0
            low, high = (total * index // replicas for index in (replica, replica + 1))
            for each in held:
                if not each.place.length and not replica:
                    shared.append(each)
                shared.extend(each.between(low - at, high - at))
                at += each.place.length
        return [*alone, *shared]  # equal parts first: at one offset in the files of all ranks


def _place_in(group: Any) -> tuple[int, int]:
    """The number of this rank among those of a group, and how many they are."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


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
                if (count := min(size, parameter.ds_numel - start)) > 0:
                    found.append(Lies(parameter, start, offset, count))
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
                    found.append(Lies(parameter, there.start, here.start, there.numel))
            is_muon = bool(param_groups[number].get("use_muon", False))
            whole = is_zero and is_muon and not optimizer.cpu_offload
            yield Held(tensor=partition, group=number, lies=tuple(found), has_whole_momentum=whole)
    else:
        for number, parameters in enumerate(_groups_of(engine)):
            tensors = param_groups[number]["params"]
            if isinstance(optimizer, FP16_Optimizer):  # one tensor of all, one behind the other
                offsets = itertools.accumulate((each.numel() for each in parameters), initial=0)
                pairs = zip(parameters, offsets, strict=False)
                lies = tuple(Lies(each, 0, offset, each.numel()) for each, offset in pairs)
                yield Held(tensor=tensors[0], group=number, lies=lies)
                continue
            for each, tensor in zip(parameters, tensors, strict=True):
                yield Held(tensor=tensor, group=number, lies=(Lies(each, 0, 0, each.numel()),))


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
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def owners_of(engine: Any) -> tuple[int, ...]:
    """Which stage of a pipeline holds each layer; empty where every rank of a replica holds all of them."""
    module = engine.module
    if not isinstance(module, PipelineModule):
        return ()
    return tuple(module.stage_owner(index) for index in range(len(module._layer_specs)))


# ------------------------------------------------------------------------------------------- layers and experts cut


def _meta_of(tensor: Any) -> Mapping[str, Any] | None:
    """How each rank of a tensor-parallel group holds another part of a parameter; None where all hold the same."""
    meta: Mapping[str, Any] | None = getattr(tensor, DS_AUTOTP_UC_META, None)
    return None if meta is None or meta["replicated"] else meta


def place_of(tensor: Any, name: str) -> tuple[str, tuple[int, ...], tuple[Stretch, ...] | None]:
    """Name and shape of what a tensor of this name in the module is a part of, by layers or experts that ranks share.

    And how this rank's part lies in it; None where it has all of it, but for ZeRO's parts, and where DeepSpeed has cut
    it in a pattern that cannot be put together.
    """
    place: ExpertPlace | None = getattr(tensor, PLACE, None)
    if place is not None:
        _, height, width = place.shape if place.count else (0, 0, 0)
        expert, run = (
            height * width,
            place.rows * width,
        )  # of a matrix of two in one, this one's rows of each expert
        pattern = (run, expert) if run < expert else (0, 0)
        own = Stretch(place.first * expert + place.row * width, place.count * run, *pattern)
        return place.name, place.shape, (own,) if place.count else None
    meta, shape = _meta_of(tensor), tuple(getattr(tensor, "ds_shape", tensor.shape))
    if meta is None or meta["original_shape"] is None:
        return name, shape, None
    shape = tuple(meta["original_shape"])
    rank, inner = dist.get_rank(groups.get_tensor_model_parallel_group()), math.prod(shape[1:])
    parts, dimension, cut = meta["sub_param_shard_widths"], meta["partition_dim"], list[Stretch]()
    if parts and dimension == 0 and shape[0] % sum(map(sum, parts)) == 0:
        unit, base = shape[0] // sum(map(sum, parts)) * inner, 0
        for widths in parts:  # such as query, key and value: this rank's rows of each
            cut.append(Stretch((base + sum(widths[:rank])) * unit, widths[rank] * unit))
            base += sum(widths)
    elif not parts and (sizes := meta["partition_sizes"]):
        before, own_size = sum(sizes[:rank]), sizes[rank]
        if dimension == 0:
            cut = [Stretch(before * inner, own_size * inner)]
        elif dimension == 1 and len(shape) == 2:
            cut = [Stretch(before, shape[0] * own_size, own_size, shape[1])]
    is_known = not meta["conversion"]["unsupported_reason"] and len(shape) <= 2
    is_known &= sum(each.length for each in cut) == getattr(tensor, "ds_numel", tensor.numel())
    return name, shape, tuple(cut) if is_known else None


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
    if cut := [name for name, each in parameters.items() if _meta_of(each) and not place_of(each, name)[2]]:
        return f"it is tensor-parallel, and DeepSpeed cuts {cut[0]} in a pattern that cannot be put together"
    if any(
        each is not None and each.device == "nvme" for each in (zero.offload_optimizer, zero.offload_param)
    ):
        return "its states are on NVMe"
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
