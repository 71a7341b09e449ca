"""Fills an engine from a checkpoint: each rank reads the slices that it holds, and nothing else."""

from __future__ import annotations

from typing import Any

import torch

from determined_ds.checkpoints.index import IMPORTED, MASTER, TRAINED, WEIGHT, StoredTensor
from determined_ds.checkpoints.reader import DTYPES, TORCH_DTYPES, StoredEngine
from determined_ds.errors import CheckpointError
from determined_ds.runtime.checkpoints.held import MOMENTUM, Held, is_along, matrices_of
from determined_ds.runtime.checkpoints.slices import EngineSlices, Slice
from determined_ds.runtime.checkpoints.state_bytes import base_optimizer

ROWS_ELEMENTS = 2**22
# Optimizers that compute the same from the same states.
ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
LIONS = ("Lion", "FusedLion", "DeepSpeedCPULion")
ADAGRADS = ("Adagrad", "DeepSpeedCPUAdagrad")


def same_optimizer(name: str, other: str) -> bool:
    """Whether one optimizer can continue with the states of another."""
    return name == other or any(name in kin and other in kin for kin in (ADAMS, LIONS, ADAGRADS))


class Filling:
    """Fills an engine with what a checkpoint holds of it.

    Args:
        own: The engine.
        stored: What the checkpoint holds.
        exact: Whether the same ranks under the same strategy wrote it.
    """

    def __init__(self, own: EngineSlices, stored: StoredEngine, *, exact: bool) -> None:
        self._own = own
        self._stored = stored
        self._exact = exact

    def fill(self, *, optimizer: bool) -> None:
        """Fill it; under ZeRO 3 a collective.

        Args:
            optimizer: Whether the optimizer's states are taken too; without them they stay as they are.
        """
        own, engine = self._own, self._own.engine
        is_split = own.weights_are_split
        with torch.no_grad():
            if is_split:
                engine.optimizer.checkpoint_event_prologue()
            has_copies = any(not held.is_parameter for held in own.held)
            for each in own.weights():
                self._copy(each, (WEIGHT, MASTER) if has_copies else (MASTER, WEIGHT))
            for each in own.masters():
                self._copy(each, (MASTER, WEIGHT))
            own.put_back()
            if optimizer:
                self._fill_states()
            if is_split:
                _weights_of_copies(engine.optimizer)
                engine.optimizer.checkpoint_event_epilogue()

    def tensor(self, name: str) -> StoredTensor:
        """What is stored under any of a tensor's names.

        Raises:
            CheckpointError: nothing is.
        """
        return self._stored.index.tensors[self._name(name)]

    def _name(self, name: str) -> str:
        found = self._stored.name_of(name, self._own.other_names(name))
        if found is None:
            raise CheckpointError(f"the checkpoint has no {name}")
        return found

    def _copy(self, each: Slice, states: tuple[str, ...]) -> None:
        """Fill a slice from the first state that there is; of 16-bit weights, from one of their own type."""
        there = self.tensor(each.name).states
        dtype = DTYPES[each.tensor.dtype]
        of_type = [state for state in states if state in there and there[state].dtype == dtype]
        state = next(iter([*of_type, *(state for state in states if state in there)]), None)
        if state is None:
            raise CheckpointError(f"the checkpoint has no {states[0]} of {each.name}")
        self._read(each, state)

    def _read(self, each: Slice, state: str) -> None:
        name, count = self._name(each.name), each.tensor.numel()
        if not each.run:
            for at, part in self._stored.parts(name, state, each.start, each.start + count):
                each.tensor[at : at + part.numel()].copy_(part)
            return
        # Some columns of a matrix: its rows are read some at a time, and the columns taken of them.
        rows, step = count // each.run, max(1, ROWS_ELEMENTS // each.stride)
        for row in range(0, rows, step):
            some = min(step, rows - row)
            begin = each.start + row * each.stride
            block = torch.empty(some * each.stride, dtype=each.tensor.dtype)
            for at, part in self._stored.parts(
                name, state, begin, begin + (some - 1) * each.stride + each.run
            ):
                block[at : at + part.numel()].copy_(part)
            columns = block.view(some, each.stride)[:, : each.run]
            each.tensor[row * each.run : (row + some) * each.run].view(some, each.run).copy_(columns)

    # ------------------------------------------------------------------------------------- the optimizer's states

    def _fill_states(self) -> None:
        for held in self._own.held:
            self._make_states(held)
        for each in self._own.states():
            if each.state in self.tensor(each.name).states:
                self._read(each, each.state)
        self._own.put_back()
        for held in self._own.held:
            self._fill_whole_momentum(held)

    def _fill_whole_momentum(self, held: Held) -> None:
        """Give a rank the momentum of all of each matrix that it has a share of, where its optimizer keeps that."""
        matrices = matrices_of(self._own.engine, held)
        names = [self._own.name_of(each.parameter) for each in matrices]
        stored = [self.tensor(name).states.get(MOMENTUM) for name in names]
        if not any(stored):
            return
        dtype = TORCH_DTYPES[next(filter(None, stored)).dtype] if self._exact else held.tensor.dtype
        length = matrices[-1].offset + matrices[-1].count
        momentum = torch.zeros(length, dtype=dtype, device=held.tensor.device)
        for each in matrices:
            part = momentum[each.offset : each.offset + each.count]
            for found in self._own.in_whole(each.parameter, MOMENTUM, 0, part):
                self._read(found, MOMENTUM)
        base_optimizer(self._own.engine).state[held.tensor][MOMENTUM] = momentum

    def _make_states(self, held: Held) -> None:
        """Give a held tensor the states that its parameters have in the checkpoint, with room for their elements."""
        base = base_optimizer(self._own.engine)
        whole = (MOMENTUM,) if matrices_of(self._own.engine, held) else ()
        before = base.state.get(held.tensor, {})
        tensors = [self.tensor(self._own.name_of(lies.parameter)) for lies in held.lies]
        states: dict[str, Any] = {}
        for tensor in tensors:
            for key, stored in tensor.states.items():
                if key in states or key in (WEIGHT, MASTER, *whole):
                    continue
                kept = before.get(key)
                if is_along(kept, held):
                    states[key] = kept
                    continue
                dtype = TORCH_DTYPES[stored.dtype] if self._exact else held.tensor.dtype
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
    is_torchs = type(steps).__module__.startswith("torch.optim")
    if is_torchs:
        group = base.param_groups[held.group]
        device = held.tensor.device if group.get("fused") or group.get("capturable") else "cpu"
        return torch.tensor(value, dtype=torch.get_default_dtype(), device=device)
    return int(value) if key == "step" or isinstance(before, int) else value


def _weights_of_copies(optimizer: Any) -> None:
    """Under ZeRO 3, give each rank's partitions of the weights what the optimizer's copies are.

    Source: ``_rigid_load_state_dict`` in deepspeed 0.19.8's ``runtime/zero/stage3.py``.
    """
    for number, copies in enumerate(optimizer.fp32_partitioned_groups_flat):
        flat = optimizer.fp16_partitioned_groups_flat[number]
        if copies.numel():
            flat.data.copy_(copies.data)
        parts = optimizer.unflatten(flat, optimizer.fp16_partitioned_groups[number])
        for partition, part in zip(optimizer.fp16_partitioned_groups[number], parts, strict=True):
            partition.data = part.data


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
    """Refuse states that this optimizer cannot continue with."""
    if own.engine.optimizer is None or not stored.index.optimizer:
        return
    here = type(base_optimizer(own.engine)).__name__
    there = stored.index.optimizer
    fix = "resume with that optimizer, or add --reset-optimizer to keep the weights and begin its state anew"
    if not same_optimizer(there, here):
        raise CheckpointError(
            f"checkpoint {uuid} has states of {there}, and this optimizer is {here}\n  fix: {fix}"
        )
    if not exact and any(stored.folder.glob("own_states_rank*.pt")):
        raise CheckpointError(
            f"checkpoint {uuid} has states of {there} that are not cut along the parameters: only the ranks and the "
            f"strategy that wrote them can continue with them\n  fix: {fix}"
        )
