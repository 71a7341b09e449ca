"""What a checkpoint holds of one engine, read by name and slice.

An engine that DeepSpeed wrote in its own layout has no index: ``engine.load_checkpoint`` reads it, on the ranks and
under the strategy that wrote it; only its weights are read here, by DeepSpeed's own ``zero_to_fp32``.
"""

from __future__ import annotations

import mmap
import pickle
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from determined_ds.checkpoints.index import (
    IMPORTED,
    WEIGHT,
    EngineIndex,
    Piece,
    StoredState,
    StoredTensor,
    read_index,
)
from determined_ds.checkpoints.safe_load import only_data, read_data, runs_code
from determined_ds.checkpoints.shard_file import ITEM_BYTES, TYPES
from determined_ds.errors import CheckpointError
from determined_ds.trial.ddp import DDP_FILE

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, (_, own) in TYPES.items()}
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SETTINGS = {"groups", "built", "lr_scheduler", "loss_scale", "counters"}  # of an engine, besides its tensors
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


class StoredEngine:
    """The tensors and settings of an engine in a checkpoint."""

    def __init__(
        self, folder: Path, index: EngineIndex, given: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.folder = folder
        self.index = index
        self.is_given = given is not None  # by DeepSpeed: weights alone
        self._given = given
        self._files: dict[str, Any] = {}
        if missing := index.missing():
            raise CheckpointError(f"{folder} lacks {missing}\n  fix: use another checkpoint")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All but tensors, see :func:`~determined_ds.checkpoints.settings.settings_of`; of all pipeline stages."""
        files = sorted(self.folder.glob("settings_stage*.pt"))
        if not files:
            raise CheckpointError(
                f"{self.folder} has no settings_stage0.pt: it holds weights alone\n"
                "  fix: start from them, by searcher.source_checkpoint_uuid with fit.warm_start: weights"
            )
        stages = [read_data(file, map_location="cpu") for file in files]
        for file, stage in zip(files, stages, strict=True):
            if not isinstance(stage, dict) or not stage.keys() >= SETTINGS:
                raise CheckpointError(
                    f"{file} does not hold the settings of an engine\n  fix: use another checkpoint"
                )
        return {**stages[0], "groups": [group for stage in stages for group in stage["groups"]]}

    def parts(self, name: str, state: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements ``start`` to ``stop`` of a tensor's state, flattened."""
        if self._given is not None:
            yield 0, self._given[name].detach().reshape(-1)[start:stop]
            return
        stored = self.index.tensors[name].states[state]
        size, dtype = ITEM_BYTES[stored.dtype], TORCH_DTYPES[stored.dtype]
        for file, offset, first, count in stored.places(start, stop):
            if file not in self._files:
                try:
                    self._files[file] = np.memmap(self.folder / file, dtype=np.uint8, mode="c")
                except FileNotFoundError:
                    raise CheckpointError(
                        f"{self.folder / file} is missing: another rank or machine wrote it\n  fix: copy it there"
                    ) from None
            raw = self._files[file][offset : offset + count * size]
            if raw.size != count * size:
                raise CheckpointError(
                    f"{self.folder / file} ends before elements {first} to {first + count} of {name} ({state})\n"
                    "  fix: use another checkpoint, or copy the file again"
                )
            if offset % size:  # the file of another program
                raw = raw.copy()
            yield first - start, torch.from_numpy(raw).view(dtype)

    def elements(self, name: str, state: str, start: int, stop: int) -> torch.Tensor:
        """The elements ``start`` to ``stop`` of a tensor's state, as one tensor."""
        parts = list(self.parts(name, state, start, stop))
        if len(parts) == 1:
            return parts[0][1]
        found = torch.empty(stop - start, dtype=TORCH_DTYPES[self.index.tensors[name].states[state].dtype])
        for at, part in parts:
            found[at : at + part.numel()] = part
        return found

    def whole(self, name: str, state: str) -> torch.Tensor:
        """A whole state of a tensor, in its shape."""
        tensor = self.index.tensors[name]
        return self.elements(name, state, 0, tensor.count).view(tensor.shape)

    def release(self) -> None:
        """Give back the memory of what was read; parts that were handed out stay valid."""
        for file in self._files.values():
            file._mmap.madvise(mmap.MADV_DONTNEED)


def stored_engine(folder: Path, *, weights_alone: bool = False) -> StoredEngine:
    """An engine in a checkpoint."""
    index = read_index(folder)
    if index is not None:
        return StoredEngine(folder, index)
    layout = layout_of(folder)
    divided = any(folder.glob("*exp*_rank*")) or any(folder.glob("offloaded_tensors"))
    if (
        not weights_alone
        or layout is None
        or divided
        or layout[2] > 1
        or any(folder.glob("layer_*-model_states.pt"))
    ):
        reader = (
            "DeepSpeed's zero_to_fp32 does not read such a layout" if weights_alone else "DeepSpeed wrote it"
        )
        raise CheckpointError(
            f"{folder} has no index of its tensors, and {reader}\n  fix: resume it on the ranks that wrote it"
        )
    kind, replicas, _ = layout
    if kind == "ddp" or not kind:
        file = folder / (DDP_FILE if kind == "ddp" else "mp_rank_00_model_states.pt")
        weights: dict[str, torch.Tensor] = read_data(file, map_location="cpu", mmap=True)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        try:
            with only_data():
                weights = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name)
        except pickle.UnpicklingError as error:
            raise runs_code(str(folder), error) from error
        except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise CheckpointError(
                f"DeepSpeed's zero_to_fp32 cannot read {folder}, of {replicas} ranks: {error}\n"
                "  fix: resume it on the ranks that wrote it"
            ) from error
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    tensors = {}
    for name, tensor in weights.items():
        first = names.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name)
        if first != name and weights[first].shape == tensor.shape:
            aliases[name] = first
            continue
        state = StoredState(dtype=DTYPES[tensor.dtype], pieces=(Piece("", 0, 0, tensor.numel()),))
        tensors[name] = StoredTensor(shape=tuple(tensor.shape), kind=IMPORTED, states={WEIGHT: state})
    return StoredEngine(folder, EngineIndex(tensors=tensors, aliases=aliases), weights)


def layout_of(folder: Path) -> tuple[int | str, int, int] | None:
    """How DeepSpeed divided the engine in a folder, by the names of its files; None where they are not DeepSpeed's.

    Source: ``_get_ckpt_name`` and ``_get_zero_ckpt_name`` in deepspeed 0.19.8's ``runtime/engine.py``.
    """
    if (folder / DDP_FILE).is_file():
        return "ddp", 1, 1
    ranks = [match for file in folder.glob("*optim_states.pt") if (match := _OPTIMIZER.fullmatch(file.name))]
    if ranks:
        stages = len({match[2] for match in ranks})
        is_split = any(folder.glob("zero_pp_rank_*_model_states.pt"))
        return 3 if is_split else 1, len(ranks) // stages, stages
    mains = len([*folder.glob("mp_rank_*_model_states.pt")])
    return (0, 1, mains) if mains else None
