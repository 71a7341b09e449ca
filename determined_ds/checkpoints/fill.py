"""Fills an engine from a checkpoint: each rank reads the slices that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from determined_ds.checkpoints.engine_slices import MOMENTUM, EngineSlices, Held, Slice
from determined_ds.checkpoints.index import IMPORTED, MASTER, TRAINED, WEIGHT, StoredTensor, is_average
from determined_ds.checkpoints.reader import DTYPES, TORCH_DTYPES, StoredEngine
from determined_ds.errors import CheckpointError
from determined_ds.train.state_bytes import base_optimizer

ROWS_ELEMENTS = 2**22  # of a matrix that are read at once for some of its columns
# Optimizers that compute the same from the same states.
KIN = (
    ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
    ("Lion", "FusedLion", "DeepSpeedCPULion"),
    ("Adagrad", "DeepSpeedCPUAdagrad"),
)


def misfits(own: EngineSlices, stored: StoredEngine) -> tuple[list[str], set[str]]:
    """Why what is stored does not fit an engine.

    Returns:
        The reasons in words: tensors that are missing, or have another shape or kind; and the names of the stored
        tensors that this rank has.
    """
    reasons, taken = [], set()
    for name, whole in own.wholes.items():
        found = stored.name_of(name, own.other_names(name))
        if found is None:
            reasons.append(f"it has no {name} {whole.shape}")
            continue
        taken.add(found)
        there = stored.index.tensors[found]
        if there.shape != whole.shape:
            reasons.append(f"{name} has shape {there.shape} in it, and {whole.shape} in this model")
        elif there.kind != IMPORTED and (there.kind == TRAINED) != (whole.kind == TRAINED):
            reasons.append(f"{name} is {there.kind} in it, and {whole.kind} in this model")
    return reasons, taken


def check_optimizer(own: EngineSlices, stored: StoredEngine, uuid: str, *, exact: bool) -> None:
    """Refuse states that this optimizer cannot continue with; ``exact`` as of :func:`fill`."""
    there = stored.index.optimizer
    if own.engine.optimizer is None or not there:
        return
    here = type(base_optimizer(own.engine)).__name__
    fix = "resume with that optimizer, or add --reset-optimizer to keep the weights and begin its state anew"
    if there != here and not any(there in kin and here in kin for kin in KIN):
        raise CheckpointError(
            f"checkpoint {uuid} has states of {there}, and this optimizer is {here}\n  fix: {fix}"
        )
    if not exact and any(stored.folder.glob("own_states_rank*.pt")):
        raise CheckpointError(
            f"checkpoint {uuid} has states of {there} that are not cut along the parameters: only the ranks and the "
            f"strategy that wrote them can continue with them\n  fix: {fix}"
        )


def fill_state(own: EngineSlices, stored: StoredEngine, slices: Iterable[Slice]) -> None:
    """Fill slices from the states of their names, where the checkpoint has those of their tensors."""
    for each in slices:
        name = _name_in(own, stored, each.name)
        if each.state in stored.index.tensors[name].states:
            _read(stored, name, each.state, each)


@torch.no_grad()  # type: ignore[untyped-decorator]
def fill(own: EngineSlices, stored: StoredEngine, *, exact: bool, optimizer: bool) -> None:
    """Fill an engine with what a checkpoint holds of it; under ZeRO 3 a collective.

    Args:
        own: The engine.
        stored: What the checkpoint holds, which fits it, see :func:`misfits`.
        exact: Whether the same ranks under the same strategy wrote it: then states keep the type that they had.
        optimizer: Whether the optimizer's states are taken too; without them they stay as they are.
    """
    zero = own.engine.optimizer
    if own.weights_are_split:
        zero.checkpoint_event_prologue()
    has_copies = any(not held.is_parameter for held in own.held)
    for each in own.weights():
        _fill_weight(own, stored, each, (WEIGHT, MASTER) if has_copies else (MASTER, WEIGHT))
    for each in own.masters():
        _fill_weight(own, stored, each, (MASTER, WEIGHT))
    own.put_back()
    if optimizer:
        for held in own.held:
            _make_states(own, stored, held, exact=exact)
        fill_state(own, stored, own.states())
        own.put_back()
        for held in own.held:
            _fill_whole_momentum(own, stored, held, exact=exact)
    if own.weights_are_split:
        # Each rank's partitions of the weights are what the optimizer's copies are.
        # Source: _rigid_load_state_dict in deepspeed 0.19.8's runtime/zero/stage3.py.
        for number, copies in enumerate(zero.fp32_partitioned_groups_flat):
            flat = zero.fp16_partitioned_groups_flat[number]
            if copies.numel():
                flat.data.copy_(copies.data)
            parts = zero.unflatten(flat, zero.fp16_partitioned_groups[number])
            for partition, part in zip(zero.fp16_partitioned_groups[number], parts, strict=True):
                partition.data = part.data
        zero.checkpoint_event_epilogue()


def _name_in(own: EngineSlices, stored: StoredEngine, name: str) -> str:
    """The name under which a tensor of the engine is stored."""
    found = stored.name_of(name, own.other_names(name))
    if found is None:
        raise CheckpointError(f"the checkpoint has no {name}")
    return found


def _tensor(own: EngineSlices, stored: StoredEngine, parameter: Any) -> StoredTensor:
    return stored.index.tensors[_name_in(own, stored, own.name_of(parameter))]


def _fill_weight(own: EngineSlices, stored: StoredEngine, each: Slice, states: Sequence[str]) -> None:
    """Fill a slice from the first state that there is; of 16-bit weights, from one of their own type."""
    name, dtype = _name_in(own, stored, each.name), DTYPES[each.tensor.dtype]
    there = stored.index.tensors[name].states
    found = [state for state in states if state in there]
    if not found:
        raise CheckpointError(f"the checkpoint has no {states[0]} of {each.name}")
    of_type = (state for state in found if there[state].dtype == dtype)
    _read(stored, name, next(of_type, found[0]), each)


def _read(stored: StoredEngine, name: str, state: str, into: Slice) -> None:
    """Fill a slice from a state by its name in the checkpoint."""
    count = into.tensor.numel()
    if not into.run:
        for at, part in stored.parts(name, state, into.start, into.start + count):
            into.tensor[at : at + part.numel()].copy_(part)
        return
    # Some columns of a matrix: its rows are read some at a time, and the columns taken of them.
    rows, step = count // into.run, max(1, ROWS_ELEMENTS // into.stride)
    for row in range(0, rows, step):
        some = min(step, rows - row)
        begin = into.start + row * into.stride
        block = torch.empty(some * into.stride, dtype=into.tensor.dtype)
        for at, part in stored.parts(name, state, begin, begin + (some - 1) * into.stride + into.run):
            block[at : at + part.numel()].copy_(part)
        columns = block.view(some, into.stride)[:, : into.run]
        into.tensor[row * into.run : (row + some) * into.run].view(some, into.run).copy_(columns)


def _make_states(own: EngineSlices, stored: StoredEngine, held: Held, *, exact: bool) -> None:
    """Give a held tensor the states that its parameters have in the checkpoint, with room for their elements."""
    base = base_optimizer(own.engine)
    before = base.state.get(held.tensor, {})
    left_out = {WEIGHT, MASTER, *((MOMENTUM,) if own.matrices_of(held) else ())}
    states: dict[str, Any] = {}
    for lies in held.lies:
        tensor = _tensor(own, stored, lies.parameter)
        for key, there in tensor.states.items():
            if key in states or key in left_out or is_average(key):
                continue
            states[key] = before.get(key)
            if not held.is_along(states[key]):
                dtype = TORCH_DTYPES[there.dtype] if exact else held.tensor.dtype
                states[key] = torch.zeros_like(held.tensor.data, dtype=dtype)
        for key, value in tensor.scalars.items():
            states[key] = value if key not in states else max(states[key], value)
    for key, value in states.items():
        if isinstance(value, (int, float)):
            states[key] = _number(base, held, before.get(key), key, value)
    if states:
        base.state[held.tensor] = states
    else:
        base.state.pop(held.tensor, None)


def _number(base: Any, held: Held, before: Any, key: str, value: float) -> Any:
    """An optimizer's number in the type that it keeps: torch's own keep tensors, DeepSpeed's plain numbers.

    DeepSpeed's Muon leaves all but matrices to an Adam, which may be torch's.

    Source: ``_init_group`` of torch 2.13's ``optim/adam.py``: on the host, but for kernels that read it on the device.
    """
    if isinstance(before, torch.Tensor):
        return torch.full_like(before, value)
    steps = getattr(base, "aux_optimizer", None) or base
    if type(steps).__module__.startswith("torch.optim"):
        group = base.param_groups[held.group]
        device = held.tensor.device if group.get("fused") or group.get("capturable") else "cpu"
        return torch.tensor(value, dtype=torch.get_default_dtype(), device=device)
    return int(value) if key == "step" or isinstance(before, int) else value


def _fill_whole_momentum(own: EngineSlices, stored: StoredEngine, held: Held, *, exact: bool) -> None:
    """Give a rank the momentum of all of each matrix that it has a share of, where its optimizer keeps that."""
    matrices = own.matrices_of(held)
    kept = [_tensor(own, stored, each.parameter).states.get(MOMENTUM) for each in matrices]
    if not any(kept):
        return
    dtype = TORCH_DTYPES[next(filter(None, kept)).dtype] if exact else held.tensor.dtype
    length = matrices[-1].offset + matrices[-1].count
    momentum = torch.zeros(length, dtype=dtype, device=held.tensor.device)
    for each in matrices:
        part = momentum[each.offset : each.offset + each.count]
        for found in own.in_whole(each.parameter, MOMENTUM, 0, part):
            _read(stored, _name_in(own, stored, found.name), MOMENTUM, found)
    base_optimizer(own.engine).state[held.tensor][MOMENTUM] = momentum
