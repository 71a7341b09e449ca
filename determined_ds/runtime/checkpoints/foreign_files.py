"""Engines in DeepSpeed's own layout, read by name and slice: of its checkpoints, and of universal ones.

    mp_rank_<M>_model_states.pt, layer_<L>-model_states.pt      weights, schedule, counts; without ZeRO the optimizer
    [bf16_]zero_pp_rank_<D>_mp_rank_<M>_optim_states.pt         a rank's flat parts of the optimizer
    zero_pp_rank_<D>_mp_rank_<M>_model_states.pt                ZeRO 3: parts of frozen weights, buffers
    zero/<parameter>/{fp32,exp_avg,...}.pt                      universal: each state whole

Files are mapped into memory, and of a tensor only the requested slice is read.

Source: ``_save_checkpoint`` and ``_save_zero_checkpoint`` in deepspeed 0.19.8's ``runtime/engine.py``, ``state_dict``
of its optimizers, and ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import CheckpointError
from determined_ds.protocol.index_gaps import incomplete
from determined_ds.protocol.names_of_deepspeed import DDP_FILE, UNIVERSAL, why_rigid
from determined_ds.protocol.tensor_index import (
    BUFFER,
    FROZEN,
    MASTER,
    TRAINED,
    WEIGHT,
    EngineIndex,
    Piece,
    StoredState,
    StoredTensor,
)
from determined_ds.runtime.checkpoints.besides_tensors import SCALE
from determined_ds.runtime.checkpoints.contents import read_data
from determined_ds.runtime.checkpoints.shards import DTYPES
from determined_ds.runtime.checkpoints.tensors_by_name import StoredEngine, same_bytes
from determined_ds.trial.ddp import STEPS

FIX = "use another checkpoint, or copy the files of all ranks"
Parts = dict[tuple[str, str], list[tuple[int, torch.Tensor]]]


class DeepSpeedFiles(StoredEngine):
    """An engine that DeepSpeed wrote, or a :class:`~determined_ds.trial.ddp.DDPEngine`.

    Args:
        folder: ``model<I>`` of a checkpoint, or a folder of a universal one.
        order: The names of the parameters in each group of the optimizer, as the engine to be filled has them: without
            ZeRO, DeepSpeed stores the optimizer's states by number. If None, those states are not read.

    Raises:
        CheckpointError: a file is missing, or its states cannot be cut.
    """

    def __init__(self, folder: Path, order: Sequence[Sequence[str]] | None = None) -> None:
        self.folder = folder
        self._parts: Parts = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, str] = {}
        self._scalars: dict[str, dict[str, float]] = {}
        self._aliases: dict[str, str] = {}
        self._optimizer = ""
        self._groups: list[dict[str, Any]] = []
        self._loss_scale: dict[str, Any] = {}
        self._given: set[str] = set()  # names of parameters as the optimizer's files have them
        self._main = self._read_weights()
        if (folder / UNIVERSAL).is_dir():
            self._read_universal()
        elif files := _optimizer_files(folder):
            self._read_zero(files)
        else:
            self._read_whole_optimizer(order)
        self.index = self._made_index()

    # ------------------------------------------------------------------------------------- settings

    @property
    def settings(self) -> dict[str, Any]:
        """See the base class; ``layout`` is not known, so nothing counts as written by the same ranks."""
        main = self._main
        return {
            "groups": self._groups,
            "built": None,
            "lr_scheduler": main.get("lr_scheduler"),
            "loss_scale": self._loss_scale,
            "counters": {
                key: main[key] for key in ("global_steps", "global_samples", "skipped_steps") if key in main
            },
        }

    def parts(self, name: str, state: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """See the base class."""
        for at, tensor in self._parts[name, state]:
            first, last = max(start, at), min(stop, at + tensor.numel())
            if first < last:
                yield first - start, tensor[first - at : last - at]

    # ------------------------------------------------------------------------------------- weights

    def _read_weights(self) -> dict[str, Any]:
        folder = self.folder
        layers = sorted(folder.glob("layer_*-model_states.pt"))
        mains = sorted(folder.glob("mp_rank_*_model_states.pt"))
        partial = sorted(folder.glob("zero_pp_rank_*_mp_rank_*_model_states.pt"), key=_rank_of)
        if reason := why_rigid(folder):
            raise CheckpointError(f"only the ranks that wrote {folder} can read it: {reason}")
        if (folder / DDP_FILE).is_file():
            main = _load(folder / DDP_FILE)
            self._add_module(main["module"], frozenset())
            steps = json.loads((folder / STEPS).read_text())
            return {**main, "global_steps": steps[0], "skipped_steps": steps[2]}
        for file in layers:
            index = int(file.name.split("-")[0].removeprefix("layer_"))
            self._add_module({f"{index}.{name}": each for name, each in _load(file).items()}, frozenset())
        if not mains and not partial:
            raise CheckpointError(f"{folder} holds no *_model_states.pt: DeepSpeed did not write it")
        main = _load((mains or partial)[0])
        self._stages = [_load(file) for file in mains] or [main]
        if partial and not mains:
            self._read_split_weights([_load(file) for file in partial])
        elif not layers:
            self._add_module(main["module"], frozenset(main.get("buffer_names") or ()))
        self._aliases.update(main.get("shared_params") or {})
        return main

    def _add_module(self, module: Mapping[str, Any], buffers: frozenset[str]) -> None:
        """Whole tensors; of those that share memory, the others are other names of the first."""
        first: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in module.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if tensor.numel() and first.setdefault(key, name) != name:
                self._aliases[name] = first[key]
                continue
            self._add(name, WEIGHT, 0, tensor.reshape(-1), tuple(tensor.shape))
            self._kinds[name] = BUFFER if name in buffers or not tensor.is_floating_point() else FROZEN

    def _read_split_weights(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Under ZeRO 3: buffers, and the parts of frozen parameters; the others are the optimizer's."""
        first = ranks[0]
        buffers = frozenset(first.get("buffer_names") or ())
        self._add_module({name: each for name, each in first["module"].items() if name in buffers}, buffers)
        for name, shape in (first.get("frozen_param_shapes") or {}).items():
            at, count = 0, torch.Size(shape).numel()
            for rank in ranks:
                part = rank["frozen_param_fragments"][name].reshape(-1)
                self._add(name, WEIGHT, at, part[: max(0, count - at)], tuple(shape))
                at += part.numel()
            self._kinds[name] = FROZEN

    def _add(self, name: str, state: str, start: int, tensor: Any, shape: tuple[int, ...]) -> None:
        self._shapes.setdefault(name, shape)
        if tensor.numel() or not torch.Size(shape).numel():
            self._parts.setdefault((name, state), []).append((start, tensor))

    # ------------------------------------------------------------------------------------- the optimizer

    def _read_zero(self, files: Mapping[int, Sequence[Path]]) -> None:
        """The parts of all ranks, of each pipeline stage."""
        self._given = {name for main in self._stages for group in main["param_shapes"] for name in group}
        for stage, of_stage in sorted(files.items()):
            ranks = [_load(file)["optimizer_state_dict"] for file in of_stage]
            self._check_ranks(ranks)
            main = self._stages[stage] if stage < len(self._stages) else self._stages[0]
            shapes = main["param_shapes"]
            split = int(ranks[0].get("zero_stage", 1)) == 3
            base = "optimizer_state_dict" if split else "base_optimizer_state"
            if split:
                for number, group in enumerate(shapes):
                    self._add_zero3(number, group, ranks)
            else:
                for number, group in enumerate(shapes):
                    self._add_linked(number, group, ranks)
            self._add_settings(ranks[0][base], shapes if not split else None)
            self._loss_scale = _scale_of(ranks[0].get("loss_scaler"))

    def _check_ranks(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Refuse the files of fewer ranks than divided the states between them."""
        stated = ranks[0].get("partition_count")
        num_ranks = max(stated, default=0) if isinstance(stated, (list, tuple)) else stated
        if isinstance(num_ranks, int) and num_ranks != len(ranks):
            raise CheckpointError(
                f"{self.folder} has *optim_states.pt of {len(ranks)} ranks, and {num_ranks} wrote it\n  fix: {FIX}"
            )

    def _add_zero3(self, number: int, shapes: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> None:
        """A subgroup: each parameter's equal parts on the ranks, one parameter behind the other."""
        for rank, found in enumerate(ranks):
            states = {MASTER: found["fp32_flat_groups"][number]}
            states.update(found["optimizer_state_dict"]["state"].get(number, {}))
            offset = 0
            for given, shape in shapes.items():
                name, count = self._name_in_layers(given), torch.Size(shape).numel()
                size = -(-count // len(ranks))
                own = max(0, min(size, count - rank * size))
                self._add_states(
                    name, states, states[MASTER].numel(), rank * size, (offset, own), tuple(shape)
                )
                offset += size

    def _add_linked(self, number: int, shapes: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> None:
        """A group under ZeRO 1 or 2: the addresses in each rank's part, in the order of ranks."""
        at: dict[str, int] = {}
        for found in ranks:
            states = {MASTER: found["single_partition_of_fp32_groups"][number]}
            states.update(found["base_optimizer_state"]["state"].get(number, {}))
            flat = max([each.numel() for each in states.values() if isinstance(each, torch.Tensor)])
            for given, address in found["param_slice_mappings"][number].items():
                name, start = self._name_in_layers(given), at.get(given, 0)
                self._add_states(
                    name, states, flat, start, (address.start, address.numel), tuple(shapes[given])
                )
                at[given] = start + address.numel

    def _add_states(
        self,
        name: str,
        states: Mapping[str, Any],
        flat: int,
        start: int,
        place: tuple[int, int],
        shape: tuple[int, ...],
    ) -> None:
        """A parameter's slices of a rank's flat states.

        Args:
            name: The parameter.
            states: Of the flat tensor.
            flat: Elements of the flat tensor.
            start: Of the slice, in the parameter.
            place: Where it begins in the flat tensor, and its elements.
            shape: Of the parameter.
        """
        self._kinds[name] = TRAINED
        offset, count = place
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                if key != MASTER and value.numel() < offset + count:
                    raise CheckpointError(
                        f"{self.folder} has a state {key} of {name} that is not cut along it"
                    )
                self._add(name, key, start, value.reshape(-1)[offset : offset + count], shape)
            elif value is not None and not isinstance(value, (bool, str)):
                self._scalars.setdefault(name, {})[key] = float(value)

    def _read_whole_optimizer(self, order: Sequence[Sequence[str]] | None) -> None:
        """Without ZeRO: states by the number of the parameter."""
        found = self._main.get("optimizer")
        if found is None or order is None:
            return
        inner = found.get("optimizer_state_dict", found)
        flats = found.get("fp32_groups_flat")
        self._loss_scale = {key: found[key] for key in SCALE if key in found}
        if flats is not None:
            for number, (names, flat) in enumerate(zip(order, flats, strict=True)):
                states, offset = {MASTER: flat, **inner["state"].get(number, {})}, 0
                for name in names:
                    count = torch.Size(self._shapes[name]).numel()
                    self._add_states(name, states, flat.numel(), 0, (offset, count), self._shapes[name])
                    offset += count
        else:
            numbers = [number for group in inner["param_groups"] for number in group["params"]]
            names = [name for group in order for name in group]
            copies = [copy for group in found.get("fp32_groups", ()) for copy in group]
            for position, (number, name) in enumerate(zip(numbers, names, strict=True)):
                shape = self._shapes[name]
                count = torch.Size(shape).numel()
                states = {**({MASTER: copies[position]} if copies else {}), **inner["state"].get(number, {})}
                self._add_states(name, states, count, 0, (0, count), shape)
        self._add_settings(inner, [dict.fromkeys(names) for names in order])

    def _read_universal(self) -> None:
        folder = self.folder / UNIVERSAL
        self._given = {each.name for each in folder.iterdir() if each.is_dir()}
        shapes = {  # ZeRO 3's states are flat
            name: tuple(shape)
            for main in self._stages
            for group in main.get("param_shapes") or ()
            for name, shape in group.items()
        }
        for own in (folder / name for name in sorted(self._given)):
            name = self._name_in_layers(own.name)
            for file in sorted(own.glob("*.pt")):
                found = _load(file)
                value = found["param"] if isinstance(found, dict) else found
                if file.stem == "step" or not isinstance(value, torch.Tensor) or not value.ndim:
                    self._scalars.setdefault(name, {})[file.stem] = float(value)
                else:
                    shape = self._shapes.get(name) or shapes.get(own.name) or tuple(value.shape)
                    self._add(name, file.stem, 0, value.reshape(-1), shape)
        stepped = {name for name, state in self._parts if state not in (WEIGHT, MASTER)}
        mastered = {name for name, state in self._parts if state == MASTER}
        self._kinds.update(dict.fromkeys(stepped or mastered, TRAINED))
        file = folder / "optimizer_state.pt"
        if file.is_file():
            found = _load(file)
            inner = found.get("optimizer_state_dict") or found.get("base_optimizer_state") or {}
            if "param_groups" in inner:
                self._add_settings(inner, None)
            for state in inner.get("state", {}).values():  # the step is that of all
                if "step" in state:
                    for name in [name for name, kind in self._kinds.items() if kind == TRAINED]:
                        self._scalars.setdefault(name, {}).setdefault("step", float(state["step"]))
                    break

    def _add_settings(self, found: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]] | None) -> None:
        for number, group in enumerate(found["param_groups"]):
            names = [] if shapes is None else [self._name_in_layers(name) for name in shapes[number]]
            settings = {key: value for key, value in group.items() if key != "params"}
            self._groups.append({"names": names, "settings": settings, "built": None})

    def _name_in_layers(self, name: str) -> str:
        """Of a pipeline's tied weight, its name in the first of the layers that have it."""
        if not name.startswith("tied_modules."):
            return name
        rest = name.split(".", 2)[2]
        pattern = re.compile(rf"\d+\.{re.escape(rest)}")
        layers = [other for other in self._shapes if pattern.fullmatch(other) and other not in self._given]
        layers.sort(key=lambda each: int(each.split(".")[0]))
        if not layers:
            raise CheckpointError(f"{self.folder} has states of {name}, and no layer with it")
        self._aliases.update(dict.fromkeys(layers[1:], layers[0]))
        return layers[0]

    # ------------------------------------------------------------------------------------- the index

    def _made_index(self) -> EngineIndex:
        states: dict[str, dict[str, StoredState]] = {}
        for (name, state), parts in self._parts.items():
            parts.sort(key=lambda part: part[0])
            self._parts[name, state] = self._once(name, state, parts)
            pieces = tuple(
                Piece(file="", offset=0, start=start, count=tensor.numel())
                for start, tensor in self._parts[name, state]
            )
            dtype = DTYPES[parts[0][1].dtype]
            states.setdefault(name, {})[state] = StoredState(dtype=dtype, pieces=pieces)
        tensors = {
            name: StoredTensor(
                shape=shape,
                kind=self._kinds.get(name, FROZEN),
                states=states.get(name, {}),
                scalars=self._scalars.get(name, {}),
            )
            for name, shape in self._shapes.items()
            if name not in self._aliases
        }
        aliases = {name: own for name, own in self._aliases.items() if own in tensors}
        for name, own in aliases.items():
            for copy, first in zip(
                self._parts.get((name, WEIGHT), ()), self._parts.get((own, WEIGHT), ()), strict=False
            ):
                self._check_tied(f"{own} and {name}", copy[1], first[1])
        index = EngineIndex(tensors=tensors, aliases=aliases)
        if missing := next(iter(incomplete(index)), None):
            raise CheckpointError(f"{self.folder} lacks {missing}\n  fix: {FIX}")
        return index

    def _once(self, name: str, state: str, parts: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Parts of a state in their order, each once: a weight that is tied is on several pipeline stages."""
        unique: dict[int, Any] = {}
        for start, tensor in parts:
            self._check_tied(f"{name} ({state})", unique.setdefault(start, tensor), tensor)
        return sorted(unique.items())

    def _check_tied(self, name: str, first: Any, other: Any) -> None:
        if first is not other and not same_bytes(first, other):
            raise CheckpointError(f"{self.folder} holds two values of the tied weight {name}\n  fix: {FIX}")


def _load(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_data(file, map_location="cpu", mmap=True)
    return found


def _optimizer_files(folder: Path) -> dict[int, list[Path]]:
    """Pipeline stage -> the files of its ranks, in their order."""
    found: dict[int, list[Path]] = {}
    for file in folder.glob("*zero_pp_rank_*_mp_rank_*optim_states.pt"):
        match = re.search(r"zero_pp_rank_(\d+)_mp_rank_(\d+)", file.name)
        if match:
            found.setdefault(int(match[2]), []).append(file)
    return {stage: sorted(files, key=_rank_of) for stage, files in found.items()}


def _rank_of(file: Path) -> int:
    match = re.search(r"zero_pp_rank_(\d+)", file.name)
    return int(match[1]) if match else 0


def _scale_of(scaler: Any) -> dict[str, Any]:
    return {key: getattr(scaler, key) for key in SCALE if hasattr(scaler, key)}
