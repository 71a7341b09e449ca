"""The slices of an engine's tensors that this rank holds: the one description by which it is written and filled.

A slice is a live view: what is copied into it changes the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from determined_ds.checkpoints.index import BUFFER, FROZEN, MASTER, TRAINED, WEIGHT, place_of
from determined_ds.runtime.checkpoints.cut_tensors import (
    Cut,
    Stretch,
    cut_of,
    first_in_group,
    holders_of,
    is_trained_copy,
    name_of_whole,
    whole_shape,
    why_not,
)
from determined_ds.runtime.checkpoints.held import Held, groups_of, held_by, is_along, state_of
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.tensor_parallel import degree_of

# Optimizers that keep errors or statistics that are not cut along the parameters.
OWN_LAYOUT = ("OnebitAdam", "ZeroOneAdam", "OnebitLamb")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of one state of a tensor.

    Args:
        name: Of the tensor.
        state: ``weight``, ``fp32``, or one of the optimizer's.
        start: Of its first element in the flattened tensor.
        tensor: One-dimensional.
        run: Elements between two gaps, of a tensor that tensor-parallel ranks cut by columns; 0: it has no gaps.
        stride: From the first element of a run to that of the next, in the flattened tensor; 0 without gaps.
    """

    name: str
    state: str
    start: int
    tensor: Any
    run: int = 0
    stride: int = 0

    def between(self, first: int, last: int) -> Iterator[Slice]:
        """Its elements from ``first`` to ``last``, counted from its own first: with gaps in up to three slices."""
        pattern = {"run": self.run, "stride": self.stride}
        whole = Stretch(at=0, start=self.start, count=int(self.tensor.numel()), **pattern)
        for each in whole.between(first, last):
            yield replace(
                self,
                start=each.start,
                tensor=self.tensor[each.at : each.at + each.count],
                run=each.run,
                stride=each.stride,
            )

    @property
    def key(self) -> str:
        """Its name in a file: no other slice has it."""
        return f"{self.name}/{self.state}[{place_of(self.start, int(self.tensor.numel()), self.run, self.stride)}]"

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return int(self.tensor.numel() * self.tensor.element_size())


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A tensor of the engine, of which a rank holds all, a part, or none.

    Args:
        name: In the checkpoint.
        shape: Of the whole.
        kind: ``trained`` by the optimizer, ``frozen`` or ``buffer``.
        tensor: The parameter or buffer.
        is_copy: Whether another rank writes it: a weight that pipeline stages or tensor-parallel ranks share.
        cut: How ranks that share it cut it; None: this rank has all of it, but for ZeRO's parts.
        holders: (This rank, how many) among those that hold the same of it.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    tensor: Any
    is_copy: bool
    cut: Cut | None = None
    holders: tuple[int, int] = (0, 1)


def own_layout(engine: Any) -> str:
    """Why an engine's tensors cannot be written as slices, as far as this rank sees; "" where they can.

    Such an engine is written by DeepSpeed, and read back by as many ranks under the same strategy.
    """
    if isinstance(engine, DDPEngine):
        return ""
    zero = engine._config.zero_config
    offloads = (zero.offload_optimizer, zero.offload_param)
    kind = type(getattr(engine, "basic_optimizer", None)).__name__
    if isinstance(engine.module, PipelineModule):
        if engine.has_moe_layers:
            return "it has experts"
        if engine.grid.get_slice_parallel_world_size() > 1:
            return "it is tensor-parallel"
    elif reason := why_not(engine):
        return reason
    if any(offload is not None and offload.device == "nvme" for offload in offloads):
        return "its states are on NVMe"
    if kind in OWN_LAYOUT:
        return f"{kind} keeps errors of its compression"
    if getattr(zero, "mics_shard_size", -1) > 0:
        return "MiCS shards it"
    if getattr(engine, "zenflow", False) or getattr(engine, "super_offload", bool)() is True:
        return "its optimizer runs beside it"
    if engine.random_ltd_enabled() or engine.curriculum_learning_enabled():
        return "DeepSpeed's data efficiency keeps its own state"
    return _unshared(engine.module) if isinstance(engine.module, PipelineModule) else ""


def _unshared(module: Any) -> str:
    """Parameters of one name on several stages, with values of their own, as far as this rank has any."""
    for key, tied in module.tied_comms.items():
        if len(tied["ranks"]) == 1:
            continue
        shared = tied["weight_attr"]
        for name, _ in tied["module"].named_parameters():
            if name not in ([shared] if isinstance(shared, str) else shared):
                return f"tied layer {key} has {name}, which its stages do not share"
    return ""


class EngineSlices:
    """What a rank holds of an engine, by name.

    Args:
        engine: One that :func:`own_layout` has no reason against.
        common: Name -> parameter or buffer, by names that all forms of the model have in common.

    Attributes:
        wholes: Name -> tensor, of this rank. Of a pipeline, names begin with the index of the layer.
        aliases: Other names of the same tensors in the model -> the name in ``wholes``.
        common: The names that all forms of the model have in common -> the name in ``wholes``.
        held: What the optimizer steps.
    """

    def __init__(self, engine: Any, common: Mapping[str, Any] | None = None) -> None:
        self.engine = engine
        self.wholes: dict[str, Whole] = {}
        self._own: dict[int, Whole] = {}
        self.aliases: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._copied: list[tuple[Any, Any]] = []
        self._optimized = {id(parameter) for group in groups_of(engine) for parameter in group}
        module = engine.module
        kept = _kept_buffers(module)
        buffers = [found for found in module.named_buffers(remove_duplicate=False) if found[0] in kept]
        layers = _tied_layers(module) if isinstance(module, PipelineModule) else {}
        self._shared: set[int] = set()
        self._first_in_group = first_in_group(engine)
        group = getattr(engine, "seq_data_parallel_group", None)
        self.replica, self.replicas = 0, 1
        if dist.is_initialized():
            self.replica, self.replicas = dist.get_rank(group), dist.get_world_size(group)
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *buffers):
            if name.startswith("tied_modules.") or (degree_of(engine) > 1 and is_trained_copy(tensor)):
                self._shared.add(id(tensor))
            for each in _by_layer(name, layers):
                self._add(each, tensor)
        self.common = {
            name: self._names[id(tensor)]
            for name, tensor in (common or {}).items()
            if id(tensor) in self._names
        }
        self.held = held_by(engine)
        # One rank of each pipeline stage writes what belongs to no tensor.
        self.is_first = self.replica == 0 and self._first_in_group

    def _add(self, name: str, tensor: Any) -> None:
        name = name_of_whole(tensor, name)
        first = self._names.setdefault(id(tensor), name)
        if first != name:
            self.aliases[name] = first
        if id(tensor) in self._own:
            return
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        cut = cut_of(tensor)
        is_replicated = cut is None and not self._first_in_group
        group = getattr(self.engine, "seq_data_parallel_group", None)
        self._own[id(tensor)] = whole = Whole(
            name=name,
            shape=whole_shape(tensor),
            kind=BUFFER if not is_parameter else TRAINED if id(tensor) in self._optimized else FROZEN,
            tensor=tensor,
            is_copy=is_replicated or bool(getattr(tensor, "ds_pipe_replicated", False)),
            cut=cut,
            holders=holders_of(tensor, group),
        )
        self.wholes.setdefault(name, whole)  # several may be parts of one

    # ------------------------------------------------------------------------------------- held

    @property
    def is_split(self) -> bool:
        """Whether replicas hold parts of the optimizer's tensors, and not the same ones."""
        return not isinstance(self.engine, DDPEngine) and bool(self.engine.zero_optimization())

    @property
    def weights_are_split(self) -> bool:
        """Whether replicas hold parts of the weights: ZeRO 3."""
        return any(hasattr(whole.tensor, "ds_tensor") for whole in self.wholes.values())

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
            for key, value in state_of(self.engine, held).items():
                if is_along(value, held):
                    yield from self._along(held, key, value)

    def _along(self, held: Held, state: str, tensor: Any) -> Iterator[Slice]:
        flat = self._flattened(tensor)
        for lies in held.lies:
            part = flat[lies.offset : lies.offset + lies.count]
            yield from self.in_whole(lies.parameter, state, lies.start, part)

    def in_whole(self, own: Any, state: str, start: int, tensor: Any) -> Iterator[Slice]:
        """A state's elements from ``start``, along the part that this rank has of a weight, as slices of the whole."""
        name, cut = self._own[id(own)].name, self._own[id(own)].cut
        if cut is None:
            yield Slice(name=name, state=state, start=start, tensor=tensor)
            return
        for each in cut.between(start, start + tensor.numel()):
            at = each.at - start
            part = tensor[at : at + each.count]
            yield Slice(
                name=name, state=state, start=each.start, tensor=part, run=each.run, stride=each.stride
            )

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

    def name_of(self, parameter: Any) -> str:
        """A parameter's name in checkpoints."""
        return self._names[id(parameter)]

    def other_names(self, name: str) -> tuple[str, ...]:
        """The aliases of a tensor, and its common name."""
        return tuple(alias for alias, own in (*self.common.items(), *self.aliases.items()) if own == name)

    def shared_norms(self) -> dict[str, float]:
        """The norms of the weights that stages or tensor-parallel ranks share: equal on all of them, bit for bit."""
        return {
            name: float(torch.linalg.vector_norm(whole.tensor.detach(), dtype=torch.float64))
            for name, whole in self.wholes.items()
            if id(whole.tensor) in self._shared and whole.kind == TRAINED
        }

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Parameter -> the optimizer's numbers of it, such as ``step``."""
        found: dict[str, dict[str, Any]] = {}
        for held in self.held:
            numbers = {key: value for key, value in state_of(self.engine, held).items() if is_number(value)}
            for lies in held.lies if numbers else ():
                found[self.name_of(lies.parameter)] = numbers
        return found

    def others(self) -> dict[int, dict[str, Any]]:
        """Number of a held tensor -> states that are neither along it nor numbers: an optimizer's own."""
        found = {}
        for number, held in enumerate(self.held):
            own = {
                key: value
                for key, value in state_of(self.engine, held).items()
                if value is not None and not is_along(value, held) and not is_number(value)
            }
            if own:
                found[number] = own
        return found

    # ------------------------------------------------------------------------------------- written

    def written(self) -> list[Slice]:
        """The slices that this rank writes: all ranks together write each element once."""
        self._copied.clear()
        weights = [each for each in self.weights() if not self.wholes[each.name].is_copy]
        copies = [each for each in self.masters() if not self.wholes[each.name].is_copy]
        states = [each for each in self.states() if not self.wholes[each.name].is_copy]
        if self.weights_are_split:
            whole = [each for each in weights if not hasattr(self.wholes[each.name].tensor, "ds_tensor")]
            split = [each for each in weights if hasattr(self.wholes[each.name].tensor, "ds_tensor")]
            # Equal parts first: at one offset in the files of all ranks.
            return [*split, *copies, *states, *self._share(whole)]
        if self.is_split:
            return [*self._share(weights), *copies, *states]
        return self._share([*weights, *copies, *states])

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
                first, last = max(low - at, 0), min(high - at, count)
                if first < last:
                    found.extend(each.between(first, last))
                elif not count and not replica:
                    found.append(each)
                at += count
        return found


def owners_of(engine: Any) -> tuple[int, ...]:
    """Which stage of a pipeline holds each layer; empty where every rank of a replica holds all of them."""
    module = engine.module
    if not isinstance(module, PipelineModule):
        return ()
    return tuple(module.stage_owner(index) for index in range(len(module._layer_specs)))


def _tied_layers(module: Any) -> dict[str, list[int]]:
    """Key of tied layers -> the indices of those layers in the whole pipeline."""
    found: dict[str, list[int]] = {}
    for index, layer in enumerate(module._layer_specs):
        if isinstance(layer, TiedLayerSpec):
            found.setdefault(layer.key, []).append(index)
    return found


def _by_layer(name: str, tied: Mapping[str, list[int]]) -> list[str]:
    """A name in a pipeline's module by the index of its layer, or of each layer that it is tied to."""
    if not name.startswith("tied_modules."):
        return [name]
    _, key, rest = name.split(".", 2)
    return [f"{index}.{rest}" for index in tied[key]]


def _kept_buffers(module: torch.nn.Module) -> set[str]:
    """The names of the buffers that belong to a state_dict."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._buffers
        if name not in part._non_persistent_buffers_set
    }


def is_number(value: Any) -> bool:
    """Whether a state is one number."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)
