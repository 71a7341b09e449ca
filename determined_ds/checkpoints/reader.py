"""What a checkpoint holds of one engine, read by name and slice; and its weights, on their way to other files.

index.json, or DeepSpeed's zero_to_fp32 -> StoredEngine -> pieces of a tensor -> Weight, in the type that is asked for

An engine that DeepSpeed wrote in its own layout has no index: ``engine.load_checkpoint`` reads it, on the ranks and
under the strategy that wrote it; here its weights alone are read, into memory.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from determined_ds.checkpoints.files import LOAD_DATA, damage_of, read_object, warn_if_unverified
from determined_ds.checkpoints.index import (
    IMPORTED,
    MASTER,
    WEIGHT,
    EngineIndex,
    Piece,
    StoredState,
    StoredTensor,
    read_index,
)
from determined_ds.checkpoints.safe_load import ANOTHER, read_data, reading
from determined_ds.checkpoints.shard_file import ITEM_BYTES, TYPES
from determined_ds.errors import CheckpointError

CHUNK = 2**20  # elements of a weight that are read at once
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, (_, own) in TYPES.items()}
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SETTINGS = {"groups", "built", "lr_scheduler", "loss_scale", "counters"}  # of an engine, besides its tensors
# Files of what zero_to_fp32 leaves out or does not join: experts, parameters on NVMe, layers of a pipeline.
APART = ("*exp*_rank*", "offloaded_tensors", "layer_*-model_states.pt")
COMPUTES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}  # by a DeepSpeed JSON
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


class StoredEngine:
    """The tensors and settings of an engine in a checkpoint; bytes of ``files`` are in memory, others are mapped."""

    def __init__(self, folder: Path, index: EngineIndex, files: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.index = index
        self.has_weights_alone = files is not None  # DeepSpeed wrote it
        self._files: dict[str, Any] = dict(files or {})
        if missing := index.missing():
            raise CheckpointError(f"{folder} lacks {missing}{ANOTHER}")

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
                raise CheckpointError(f"{file} does not hold the settings of an engine{ANOTHER}")
        return {**stages[0], "groups": [group for stage in stages for group in stage["groups"]]}

    def parts(self, name: str, state: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements ``start`` to ``stop`` of a tensor's state, flattened."""
        stored = self.index.tensors[name].states[state]
        size, dtype = ITEM_BYTES[stored.dtype], TORCH_DTYPES[stored.dtype]
        for file, offset, first, count in stored.places(start, stop):
            path = self.folder / file
            try:
                if file not in self._files:
                    self._files[file] = np.memmap(path, dtype=np.uint8, mode="c")
            except FileNotFoundError:
                raise CheckpointError(
                    f"{path} is missing: another rank or machine wrote it\n  fix: copy it there"
                ) from None
            raw = self._files[file][offset : offset + count * size]
            if raw.size != count * size:
                raise CheckpointError(
                    f"{path} ends before elements {first} to {first + count} of {name} ({state}){ANOTHER}"
                )
            if offset % size:  # the file of another program
                raw = raw.copy()
            yield first - start, torch.from_numpy(raw).view(dtype)

    def pieces(self, name: str, state: str) -> Iterator[torch.Tensor]:
        """All elements of a tensor's state in order, flattened; at least one piece, which may be empty."""
        stored = self.index.tensors[name]
        for start in range(0, max(1, stored.count), CHUNK):
            stop = min(start + CHUNK, stored.count)
            piece = torch.empty(stop - start, dtype=TORCH_DTYPES[stored.states[state].dtype])
            for at, part in self.parts(name, state, start, stop):
                piece[at : at + part.numel()] = part
            yield piece
            for file in self._files.values():
                if isinstance(file, np.memmap):
                    file._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]  # give back the memory


def stored_engine(folder: Path, *, weights_alone: bool = False) -> StoredEngine:
    """An engine in a checkpoint; with ``weights_alone`` also one that DeepSpeed wrote."""
    if (index := read_index(folder)) is not None:
        return StoredEngine(folder, index)
    stage, _, stages = layout_of(folder) or (None, 0, 0)
    is_readable = stages == 1 and not any(any(folder.glob(each)) for each in APART)
    if not weights_alone or not is_readable:
        why = "DeepSpeed wrote it"
        if weights_alone:
            why = "DeepSpeed's zero_to_fp32 does not read such a layout"
        fix = "resume it on the ranks that wrote it"
        raise CheckpointError(f"{folder} has no index of its tensors, and {why}\n  fix: {fix}")
    if stage == 0:
        file = folder / "mp_rank_00_model_states.pt"
        weights: dict[str, torch.Tensor] = read_data(file, map_location="cpu", mmap=True)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with reading(folder, "is not what DeepSpeed's zero_to_fp32 reads"):
            weights = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name)
    names: dict[int, str] = {}
    tensors, aliases, files = {}, dict[str, str](), dict[str, Any]()
    for name, tensor in weights.items():
        first = names.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), name)
        if first != name and weights[first].shape == tensor.shape:
            aliases[name] = first
            continue
        own = str(len(files))
        state = StoredState(dtype=DTYPES[tensor.dtype], pieces=[Piece(own, 0, 0, tensor.numel())])
        tensors[name] = StoredTensor(shape=tuple(tensor.shape), kind=IMPORTED, states={WEIGHT: state})
        files[own] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return StoredEngine(folder, EngineIndex(tensors=tensors, aliases=aliases), files)


def layout_of(folder: Path) -> tuple[int, int, int] | None:
    """How DeepSpeed divided an engine, by the names of its files: ZeRO stage, replicas, and stages of a pipeline.

    The stage is 1 for 2, too. None where the files are not DeepSpeed's.

    Source: ``_get_ckpt_name`` and ``_get_zero_ckpt_name`` in deepspeed 0.19.8's ``runtime/engine.py``.
    """
    ranks = [match for file in folder.glob("*optim_states.pt") if (match := _OPTIMIZER.fullmatch(file.name))]
    if ranks:
        stages = len({match[2] for match in ranks})
        is_split = any(folder.glob("zero_pp_rank_*_model_states.pt"))
        return 3 if is_split else 1, len(ranks) // stages, stages
    mains = len([*folder.glob("mp_rank_*_model_states.pt")])
    return (0, 1, mains) if mains else None


# ------------------------------------------------------------------------------------------- its weights


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor on its way out."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype  # that it is written in
    read: Callable[[], Iterable[torch.Tensor]]  # yields its elements in order, in any type

    @property
    def num_bytes(self) -> int:
        """Bytes when it is written."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """Its elements in its type, one-dimensional."""
        for part in self.read():
            for piece in part.detach().reshape(-1).split(CHUNK):
                found = piece.to(self.dtype)
                if self.dtype == torch.float16 and not found.isfinite().all() and piece.isfinite().all():
                    largest = float(piece.abs().max())
                    raise CheckpointError(
                        f"a weight of {largest:g} is too large for fp16\n  fix: --dtype bf16 or fp32"
                    )
                yield found

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of :meth:`pieces`."""
        for piece in self.pieces():
            yield piece.contiguous().view(torch.uint8).numpy().data

    def whole(self) -> torch.Tensor:
        """All of it, in its shape."""
        return torch.cat(list(self.pieces())).view(self.shape)


def open_engine(path: Path, number: int, *, verify: bool = True) -> StoredEngine:
    """An engine of a checkpoint, for its weights; if ``verify``, all files are compared with the manifest first."""
    if verify:
        if damage := damage_of(path):
            raise CheckpointError(f"checkpoint {path} is damaged: {damage}\n  fix: use another checkpoint")
        warn_if_unverified(path)
    folder = path / f"model{number}"
    if number == 0:
        folder = next(path.glob("checkpoint-*/global_step*"), folder)
    if not folder.is_dir():
        there = sorted(found.name.removeprefix("model") for found in path.glob("model*") if found.is_dir())
        message = f"checkpoint {path} has no engine {number}; it has: {', '.join(there) or 'none'}"
        raise CheckpointError(f"{message}\n  fix: ask for one of them")
    return stored_engine(folder, weights_alone=True)


def weights_of(path: Path, engine: StoredEngine, *, dtype: torch.dtype | None = None) -> dict[str, Weight]:
    """All weights and buffers of an engine by their names in the index; of floating-point in ``dtype``.

    None: as the model computes.
    """
    ds_config = read_object(path / LOAD_DATA).get("deepspeed_config") or {}
    enabled = (kind for key, kind in COMPUTES.items() if (ds_config.get(key) or {}).get("enabled") is True)
    computes_in = next(enabled, None)
    found: dict[str, Weight] = {}
    for name, stored in engine.index.tensors.items():
        types = {state: TORCH_DTYPES[each.dtype] for state, each in stored.states.items()}
        kept = [state for state in (WEIGHT, MASTER) if state in types]
        if not kept:
            raise CheckpointError(f"checkpoint {path} has no weight of {name}")
        written = types[kept[0]]
        if written.is_floating_point:
            is_known = WEIGHT in kept and stored.kind != IMPORTED  # what DeepSpeed wrote is read in fp32
            written = dtype or (written if is_known else computes_in or written)
        # Of what is in that type already, else of the most exact.
        state = next((each for each in kept if types[each] == written), kept[-1])
        found[name] = Weight(shape=stored.shape, dtype=written, read=partial(engine.pieces, name, state))
    return found
