"""What a checkpoint holds of one engine, read by name and slice.

An engine that DeepSpeed wrote in its own layout has no index: ``engine.load_checkpoint`` reads it, on the ranks and
under the strategy that wrote it; only its weights are read here, by DeepSpeed's own ``zero_to_fp32``.
"""

from __future__ import annotations

import mmap
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
    incomplete,
    read_index,
)
from determined_ds.checkpoints.safe_load import only_data, read_data
from determined_ds.checkpoints.shard_file import ITEM_BYTES, TYPES
from determined_ds.errors import CheckpointError
from determined_ds.trial.ddp import DDP_FILE

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, (_, own) in TYPES.items()}
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SETTINGS = {"groups", "built", "lr_scheduler", "loss_scale", "counters"}  # of an engine, besides its tensors
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


class StoredEngine:
    """The tensors and settings of an engine in a checkpoint.

    Args:
        folder: ``model<I>`` of the checkpoint.
        index: Its tensors.
        given: Name -> whole weight, where they are not in files that the index names.
    """

    def __init__(
        self, folder: Path, index: EngineIndex, given: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.folder = folder
        self.index = index
        self._given = given
        self._files: dict[str, Any] = {}
        if missing := next(iter(incomplete(index)), None):
            raise CheckpointError(f"{folder} lacks {missing}\n  fix: use another checkpoint")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All but tensors, see :func:`~determined_ds.checkpoints.settings.settings_of`; of all pipeline stages.

        Raises:
            CheckpointError: it has none, or a file of something else.
        """
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
        """The elements ``start`` to ``stop`` of a tensor's state.

        Args:
            name: A key of ``index.tensors``.
            state: A key of its ``states``.
            start: In the flattened tensor.
            stop: In the flattened tensor.

        Yields:
            Where a part begins, counted from ``start``, and the part, one-dimensional and on the CPU: only what is
            read of it is loaded into memory.
        """
        if self._given is not None:
            yield 0, self._given[name].reshape(-1)[start:stop]
            return
        stored = self.index.tensors[name].states[state]
        size, dtype = ITEM_BYTES[stored.dtype], TORCH_DTYPES[stored.dtype]
        for file, offset, first, count in stored.places(start, stop):
            raw = self._file(file)[offset : offset + count * size]
            if raw.size != count * size:
                raise CheckpointError(
                    f"{self.folder / file} ends before elements {first} to {first + count} of {name} ({state})\n"
                    "  fix: use another checkpoint, or copy the file again"
                )
            if offset % size:  # the file of another program
                raw = raw.copy()
            yield first - start, torch.from_numpy(raw).view(dtype)

    def whole(self, name: str, state: str) -> torch.Tensor:
        """A whole state of a tensor, in its shape."""
        tensor = self.index.tensors[name]
        found = torch.empty(tensor.count, dtype=TORCH_DTYPES[tensor.states[state].dtype])
        for at, part in self.parts(name, state, 0, tensor.count):
            found[at : at + part.numel()].copy_(part)
        return found.view(tensor.shape)

    def name_of(self, name: str, aliases: tuple[str, ...] = ()) -> str | None:
        """The key in ``index.tensors`` of a tensor by any of its names; None where it is not there."""
        for each in (*aliases, name):  # a name of one form may be that of another tensor in the other
            found = self.index.common.get(each) or self.index.aliases.get(each, each)
            if found in self.index.tensors:
                return found
        return None

    def release(self) -> None:
        """Give back the memory of what was read; parts that were handed out stay valid."""
        for file in self._files.values():
            file._mmap.madvise(mmap.MADV_DONTNEED)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = np.memmap(self.folder / name, dtype=np.uint8, mode="c")
            except FileNotFoundError:
                raise CheckpointError(
                    f"{self.folder / name} is missing: another rank or machine wrote it\n  fix: copy it there"
                ) from None
        return self._files[name]


def stored_engine(folder: Path) -> StoredEngine:
    """An engine in a checkpoint that was written as slices, by name and slice.

    Args:
        folder: ``model<I>`` of the checkpoint.

    Raises:
        CheckpointError: it is damaged, or DeepSpeed wrote it.
    """
    index = read_index(folder)
    if index is None:
        raise CheckpointError(
            f"{folder} has no index of its tensors: DeepSpeed wrote it in its own layout, which only the ranks and the "
            "strategy that wrote it can read\n  fix: resume it with those"
        )
    return StoredEngine(folder, index)


def stored_weights(folder: Path) -> StoredEngine:
    """The weights of an engine in a checkpoint, also of one that DeepSpeed wrote: those are read into memory, in fp32.

    Args:
        folder: ``model<I>`` of the checkpoint.

    Raises:
        CheckpointError: it is damaged, or DeepSpeed wrote it in a layout that ``zero_to_fp32`` does not read.
    """
    index = read_index(folder)
    if index is not None:
        return StoredEngine(folder, index)
    layout = layout_of(folder)
    divided = any(folder.glob("*exp*_rank*")) or any(folder.glob("offloaded_tensors"))
    if layout is None or divided or layout[2] > 1 or any(folder.glob("layer_*-model_states.pt")):
        raise CheckpointError(
            f"{folder} has no index of its tensors, and DeepSpeed's zero_to_fp32 does not read such a layout\n"
            "  fix: resume it on the ranks that wrote it"
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
        except (ValueError, KeyError, FileNotFoundError, NotImplementedError) as error:
            raise CheckpointError(
                f"DeepSpeed's zero_to_fp32 cannot read {folder}, of {replicas} ranks: {error}"
            ) from error
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in weights.items():
        first = names.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name)
        if first != name and weights[first].shape == tensor.shape:
            aliases[name] = first
    tensors = {}
    for name in weights.keys() - aliases.keys():
        count, dtype = weights[name].numel(), DTYPES[weights[name].dtype]
        state = StoredState(dtype=dtype, pieces=(Piece("", 0, 0, count),))
        tensors[name] = StoredTensor(shape=tuple(weights[name].shape), kind=IMPORTED, states={WEIGHT: state})
    ordered = {name: tensors[name] for name in weights if name in tensors}
    return StoredEngine(folder, EngineIndex(tensors=ordered, aliases=aliases), weights)


def layout_of(folder: Path) -> tuple[int | str, int, int] | None:
    """How DeepSpeed divided the engine in a folder, by the names of its files; None where they are not DeepSpeed's.

    Returns:
        The ZeRO stage: 0; 1 for 1 and 2, which are written alike; or 3; ``ddp`` for torch's DistributedDataParallel.
        The ranks that divided its states; 1 without ZeRO. The pipeline stages.

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
