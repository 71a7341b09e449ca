"""Fill an engine from a checkpoint: each rank reads the slices that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from determined_ds.checkpoints.engine_slices import EngineSlices, Held, Slice
from determined_ds.checkpoints.index import IMPORTED, MASTER, TRAINED, WEIGHT, StoredTensor
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
        self.own, self.stored = own, stored
        # The engine's names -> those in the checkpoint, where it has the tensor.
        self.names = {name: stored.index.find(own.index.names_of(name)) for name in own.index.tensors}

    def misfits(self) -> list[str]:
        """Why what this rank holds does not fit, in words."""
        reasons = []
        for name, here in self.own.index.tensors.items():
            there = self.stored.index.tensors.get(self.names[name] or "")
            if there is None:
                reasons.append(f"it has no {name} {here.shape}")
            elif there.shape != here.shape:
                reasons.append(f"{name} has shape {there.shape} in it, and {here.shape} in this model")
            elif there.kind != IMPORTED and (there.kind == TRAINED) != (here.kind == TRAINED):
                reasons.append(f"{name} is {there.kind} in it, and {here.kind} in this model")
        return reasons

    def check_optimizer(self, uuid: str, *, exact: bool) -> None:
        """Refuse states that this optimizer cannot continue with; ``exact`` as of :meth:`fill`."""
        there, here, reason = self.stored.index.optimizer, self.own.index.optimizer, ""
        if not here or not there:
            return
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
                f"checkpoint {uuid} has states of {there}{reason}\n  fix: resume with that optimizer, or start a new "
                "run from its weights: --set searcher.source_checkpoint_uuid=CHECKPOINT"
            )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def fill(self, *, exact: bool, optimizer: bool) -> None:
        """Fill the engine, with an optimizer's states; ``exact``: nothing has changed. Under ZeRO 3 a collective."""
        own, zero = self.own, self.own.engine.optimizer
        if own.weights_are_split:
            zero.checkpoint_event_prologue()
        has_copies = any(not held.is_parameter for held in own.held)
        self._fill_weights(own.weights(), (WEIGHT, MASTER) if has_copies else (MASTER, WEIGHT))
        self._fill_weights(own.masters(), (MASTER, WEIGHT))
        own.put_back()
        if optimizer:
            for held in own.held:
                self._make_states(held, exact=exact)
            for each in own.states():
                if each.state in self._stored(each.whole.name).states:
                    self._read(each.state, each)
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

    def _stored(self, name: str) -> StoredTensor:
        """What is stored of a tensor of the engine."""
        if (
            found := self.names[name]
        ) is None:  # where the trial's own ``load`` took a part of the checkpoint
            raise CheckpointError(f"the checkpoint has no {name}")
        return self.stored.index.tensors[found]

    def _fill_weights(self, slices: Iterable[Slice], states: tuple[str, str]) -> None:
        """Fill slices from the first state that there is; of 16-bit weights, from one of their own type."""
        for each in slices:
            there = self._stored(each.whole.name).states
            found = [state for state in states if state in there]
            if not found:
                raise CheckpointError(f"the checkpoint has no {states[0]} of {each.whole.name}")
            dtype = DTYPES[each.tensor.dtype]
            self._read(next((state for state in found if there[state].dtype == dtype), found[0]), each)

    def _read(self, state: str, into: Slice) -> None:
        """Fill a slice from a state of its tensor."""
        name, (start, count, run, stride) = self.names[into.whole.name], into.place
        assert name is not None
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
        base = base_optimizer(self.own.engine)
        before, states, numbers = base.state.pop(held.tensor, {}), dict[str, Any](), dict[str, float]()
        for lies in held.lies:
            tensor = self._stored(self.own.name_of(lies.parameter))
            for key, there in tensor.states.items():
                if key in states or key in (WEIGHT, MASTER):
                    continue
                states[key] = before.get(key)
                if not held.is_along(key, states[key]):
                    dtype = TORCH_DTYPES[there.dtype] if exact else held.tensor.dtype
                    states[key] = torch.zeros_like(held.tensor.data, dtype=dtype)
            for key, number in tensor.scalars.items():
                numbers[key] = max(numbers.get(key, number), number)
        # torch's own optimizers keep tensors, DeepSpeed's plain numbers; DeepSpeed's Muon leaves all but matrices to an
        # Adam, which may be torch's. On the host, but for kernels that read them on the device.
        # Source: _init_group of torch 2.13's optim/adam.py.
        is_torchs = type(getattr(base, "aux_optimizer", None) or base).__module__.startswith("torch.optim")
        group = base.param_groups[held.group]
        for key, number in numbers.items():
            was = before.get(key)
            if isinstance(was, torch.Tensor):
                states[key] = torch.full_like(was, number)
            elif is_torchs:
                device = held.tensor.device if group.get("fused") or group.get("capturable") else "cpu"
                states[key] = torch.tensor(number, dtype=torch.get_default_dtype(), device=device)
            else:
                states[key] = int(number) if key == "step" or isinstance(was, int) else number
        if states:
            base.state[held.tensor] = states
