"""The weights of an engine in a checkpoint, read one by one when they are written to other files, or asked for.

model<I>, by slice -> Weight: its elements in order, in any type -> a file of safetensors or of torch's
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from determined_ds.checkpoints.files import LOAD_DATA
from determined_ds.checkpoints.index import AVERAGE, IMPORTED, MASTER, WEIGHT, average_state, is_average
from determined_ds.checkpoints.reader import DTYPES, TORCH_DTYPES, StoredEngine, stored_engine
from determined_ds.checkpoints.shard_file import Streamed, write_shard
from determined_ds.errors import CheckpointError

CHUNK = 2**20  # elements that are read at once


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

    def cast(self) -> Iterator[torch.Tensor]:
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

    def whole(self) -> torch.Tensor:
        """All of it, in its shape."""
        found, at = torch.empty(math.prod(self.shape), dtype=self.dtype), 0
        for piece in self.cast():
            found[at : at + piece.numel()] = piece
            at += piece.numel()
        return found.view(self.shape)


def open_engine(path: Path, number: int) -> StoredEngine:
    """An engine of a checkpoint, for its weights."""
    folder = path / f"model{number}"
    if number == 0:
        folder = next(path.glob("checkpoint-*/global_step*"), folder)
    if not folder.is_dir():
        there = sorted(found.name.removeprefix("model") for found in path.glob("model*") if found.is_dir())
        message = f"checkpoint {path} has no engine {number}; it has: {', '.join(there) or 'none'}"
        raise CheckpointError(f"{message}\n  fix: ask for one of them")
    return stored_engine(folder, weights_alone=True)


def weights_of(
    path: Path, engine: StoredEngine, *, dtype: torch.dtype | None = None, average: str | None = None
) -> dict[str, Weight]:
    """All weights and buffers of an engine by their names in the index."""
    kinds = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    try:
        ds_config: Any = json.loads((path / LOAD_DATA).read_text())["deepspeed_config"] or {}
        enabled = (kind for key, kind in kinds.items() if (ds_config.get(key) or {}).get("enabled") is True)
        computes_in = next(enabled, torch.float32)
    except (OSError, ValueError, KeyError, TypeError):  # it does not say
        computes_in = None
    averaged = "" if average is None else average_state(average)
    states = {state for tensor in engine.index.tensors.values() for state in tensor.states}
    if averaged and averaged not in states:
        there = ", ".join(sorted(state.removeprefix(f"{AVERAGE}.") for state in states if is_average(state)))
        raise CheckpointError(
            f"checkpoint {path} holds no average of a callback {average!r}; it has: {there or 'none'}"
        )

    def read(name: str, state: str) -> Iterator[torch.Tensor]:
        count = engine.index.tensors[name].count
        for start in range(0, count, CHUNK):
            yield engine.elements(name, state, start, min(start + CHUNK, count))
            engine.release()

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
        state = (
            averaged
            if averaged in types
            else next((each for each in kept if types[each] == written), kept[-1])
        )
        found[name] = Weight(shape=stored.shape, dtype=written, read=partial(read, name, state))
    return found


# ------------------------------------------------------------------------------------------- files


def write_safetensors(
    path: Path, weights: Mapping[str, Weight], advance: Callable[[int], object] = lambda _: None
) -> None:
    """Write one file of safetensors; ``advance`` is called with the bytes of each piece that was written."""
    streams = {
        name: Streamed(DTYPES[each.dtype], each.shape, partial(_bytes_of, each))
        for name, each in weights.items()
    }
    write_shard(path, streams, advance, sealed=False)


def write_torch(
    path: Path, weights: Mapping[str, Weight], aliases: Mapping[str, str], advance: Callable[[int], object]
) -> None:
    """Write one file that ``torch.load`` reads: first with room for the tensors, which are then filled in there."""
    # What is never touched takes no memory.
    state = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in weights.items()}
    state.update({alias: state[name] for alias, name in aliases.items()})
    with torch.serialization.skip_data():
        torch.save(state, path)
    records: Any = torch._C.PyTorchFileReader(str(path))
    with path.open("r+b") as file:
        for number, each in enumerate(weights.values()):  # torch numbers them as it comes upon them
            file.seek(records.get_record_offset(f"data/{number}"))
            for piece in _bytes_of(each):
                file.write(piece)
                advance(piece.nbytes)


def _bytes_of(weight: Weight) -> Iterator[memoryview]:
    for piece in weight.cast():
        yield piece.contiguous().view(torch.uint8).numpy().data
