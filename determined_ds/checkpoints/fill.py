"""Fill an engine from a checkpoint: each rank reads the slices that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from determined_ds.checkpoints.engine_slices import EngineSlices, Held, Slice
from determined_ds.checkpoints.index import IMPORTED, MASTER, TRAINED, WEIGHT, is_average
from determined_ds.checkpoints.reader import DTYPES, TORCH_DTYPES, StoredEngine
from determined_ds.errors import CheckpointError
from determined_ds.train.memory import base_optimizer

ROWS_ELEMENTS = 2**22  # of a matrix that are read at once for some of its columns
# Optimizers that compute the same from the same states.
KIN = (
    ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
    ("Lion", "FusedLion", "DeepSpeedCPULion"),
    ("Adagrad", "DeepSpeedCPUAdagrad"),
)


class Filling:
    """What fills one engine from what a checkpoint holds of it."""

    def __init__(self, own: EngineSlices, stored: StoredEngine) -> None:
        self.own = own
        self.stored = stored
        self._base = base_optimizer(own.engine) if own.engine.optimizer is not None else None

    def misfits(self) -> tuple[list[str], set[str]]:
        """Why the checkpoint does not fit, in words; and which of its tensors this rank takes."""
        reasons, taken = [], set()
        for name, whole in self.own.wholes.items():
            found = self.stored.index.name_of(name, self.own.other_names(name))
            if found is None:
                reasons.append(f"it has no {name} {whole.shape}")
                continue
            taken.add(found)
            there = self.stored.index.tensors[found]
            if there.shape != whole.shape:
                reasons.append(f"{name} has shape {there.shape} in it, and {whole.shape} in this model")
            elif there.kind != IMPORTED and (there.kind == TRAINED) != (whole.kind == TRAINED):
                reasons.append(f"{name} is {there.kind} in it, and {whole.kind} in this model")
        return reasons, taken

    def check_optimizer(self, uuid: str, *, exact: bool) -> None:
        """Refuse states that this optimizer cannot continue with; ``exact`` as of :meth:`fill`."""
        there = self.stored.index.optimizer
        if self._base is None or not there:
            return
        here, reason = type(self._base).__name__, ""
        if there != here and not any(there in kin and here in kin for kin in KIN):
            reason = f", and this optimizer is {here}"
        elif not exact and (
            any(self.stored.folder.glob("own_states_rank*.pt"))
            or ("Muon" in here and isinstance(self.own.engine.optimizer, DeepSpeedZeroOptimizer))
        ):
            reason = (
                " that are not cut along the parameters: only the ranks and the strategy that wrote them can "
            )
            reason += "continue with them"
        if reason:
            raise CheckpointError(
                f"checkpoint {uuid} has states of {there}{reason}\n  fix: resume with that optimizer, or add "
                "--reset-optimizer to keep the weights and begin its state anew"
            )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def fill(self, *, exact: bool, optimizer: bool) -> None:
        """Fill the engine; under ZeRO 3 a collective.

        Args:
            exact: Nothing at all has changed since the checkpoint was written.
            optimizer: Whether its states are filled too.
        """
        own, zero = self.own, self.own.engine.optimizer
        if own.weights_are_split:
            zero.checkpoint_event_prologue()
        has_copies = any(not held.is_parameter for held in own.held)
        for each in own.weights():
            self._fill_weight(each, (WEIGHT, MASTER) if has_copies else (MASTER, WEIGHT))
        for each in own.masters():
            self._fill_weight(each, (MASTER, WEIGHT))
        own.put_back()
        if optimizer:
            for held in own.held:
                self._make_states(held, exact=exact)
            self.fill_states(own.states())
            own.put_back()
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

    def fill_states(self, slices: Iterable[Slice]) -> None:
        """Fill slices from the states of their names, where the checkpoint has those of their tensors."""
        for each in slices:
            name = self._name(each.name)
            if each.state in self.stored.index.tensors[name].states:
                self._read(name, each.state, each)

    def _name(self, name: str) -> str:
        """The name under which a tensor of the engine is stored."""
        found = self.stored.index.name_of(name, self.own.other_names(name))
        if found is None:  # of an average, where the trial's own ``load`` took a part of the checkpoint
            raise CheckpointError(f"the checkpoint has no {name}")
        return found

    def _fill_weight(self, each: Slice, states: tuple[str, str]) -> None:
        """Fill a slice from the first state that there is; of 16-bit weights, from one of their own type."""
        name, dtype = self._name(each.name), DTYPES[each.tensor.dtype]
        there = self.stored.index.tensors[name].states
        found = [state for state in states if state in there]
        if not found:
            raise CheckpointError(f"the checkpoint has no {states[0]} of {each.name}")
        self._read(name, next((state for state in found if there[state].dtype == dtype), found[0]), each)

    def _read(self, name: str, state: str, into: Slice) -> None:
        """Fill a slice from a state by its name in the checkpoint."""
        start, count, run, stride = into.place
        if not run:
            for at, part in self.stored.parts(name, state, start, start + count):
                into.tensor[at : at + part.numel()].copy_(part)
            return
        # Some columns of a matrix: its rows are read some at a time, and the columns taken of them.
        step = max(1, ROWS_ELEMENTS // stride)
        for row in range(0, count // run, step):
            rows = min(step, count // run - row)
            begin = start + row * stride
            block = torch.empty(rows * stride, dtype=into.tensor.dtype)
            for at, part in self.stored.parts(name, state, begin, begin + (rows - 1) * stride + run):
                block[at : at + part.numel()].copy_(part)
            columns = block.view(rows, stride)[:, :run]
            into.tensor[row * run : (row + rows) * run].view(rows, run).copy_(columns)

    def _make_states(self, held: Held, *, exact: bool) -> None:
        """Give a held tensor the states that its parameters have in the checkpoint, with room for their elements."""
        assert self._base is not None
        before = self._base.state.pop(held.tensor, {})
        states: dict[str, Any] = {}
        for lies in held.lies:
            tensor = self.stored.index.tensors[self._name(self.own.name_of(lies.parameter))]
            for key, there in tensor.states.items():
                if key in states or key in (WEIGHT, MASTER) or is_average(key):
                    continue
                states[key] = before.get(key)
                if not held.is_along(key, states[key]):
                    dtype = TORCH_DTYPES[there.dtype] if exact else held.tensor.dtype
                    states[key] = torch.zeros_like(held.tensor.data, dtype=dtype)
            for key, number in tensor.scalars.items():
                states[key] = max(states.get(key, number), number)
        for key, value in states.items():
            if isinstance(value, (int, float)):
                states[key] = self._number(held, before.get(key), key, value)
        if states:
            self._base.state[held.tensor] = states

    def _number(self, held: Held, before: Any, key: str, value: float) -> Any:
        """An optimizer's number in the type that it keeps: torch's own keep tensors, DeepSpeed's plain numbers.

        DeepSpeed's Muon leaves all but matrices to an Adam, which may be torch's.

        Source: ``_init_group`` of torch 2.13's ``optim/adam.py``: on the host, but for kernels that read it on the
        device.
        """
        if isinstance(before, torch.Tensor):
            return torch.full_like(before, value)
        base: Any = self._base
        if type(getattr(base, "aux_optimizer", None) or base).__module__.startswith("torch.optim"):
            group = base.param_groups[held.group]
            device = held.tensor.device if group.get("fused") or group.get("capturable") else "cpu"
            return torch.tensor(value, dtype=torch.get_default_dtype(), device=device)
        return int(value) if key == "step" or isinstance(before, int) else value
