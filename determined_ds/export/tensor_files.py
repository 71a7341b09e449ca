"""Outgoing tensors as files: safetensors in shards, each streamed; or one file of torch's."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from determined_ds.checkpoints.reader import DTYPES
from determined_ds.checkpoints.shard_file import Streamed, write_shard
from determined_ds.export.outgoing import Outgoing

Advance = Callable[[int], None]
LENGTHS_AT = (
    26  # in the header of a zip file's record, before its name: how long that is, and what follows it
)


def write_safetensors(
    folder: Path, tensors: Mapping[str, Outgoing], shard_bytes: int, advance: Advance, stem: str = "model"
) -> list[str]:
    """Write tensors as ``model.safetensors``, or as shards with their index.

    Args:
        folder: Where.
        tensors: By name.
        shard_bytes: Most of one file; a larger tensor has a file of its own.
        advance: Called with the bytes that were written.
        stem: Of the files' names.

    Returns:
        The names of the files.
    """
    pattern = stem + "{suffix}.safetensors"
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda each: each.num_bytes,
        filename_pattern=pattern,
        max_shard_size=shard_bytes,
    )
    for name, names in split.filename_to_tensors.items():
        write_file(folder / name, {each: tensors[each] for each in names}, advance)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return list(split.filename_to_tensors)


def write_file(path: Path, tensors: Mapping[str, Outgoing], advance: Advance) -> None:
    """Write one file of safetensors; what is in memory at once is a piece of a tensor.

    Args:
        path: The file.
        tensors: By name.
        advance: Called with the bytes that were written.
    """

    def streamed(each: Outgoing) -> Streamed:
        def chunks() -> Iterator[memoryview]:
            for chunk in each.cast():
                yield chunk.contiguous().view(torch.uint8).numpy().data

        return Streamed(dtype=DTYPES[each.dtype], shape=each.shape, chunks=chunks)

    write_shard(path, {name: streamed(each) for name, each in tensors.items()}, advance, sealed=False)


def write_torch(
    path: Path,
    advance: Advance,
    *,
    tensors: Mapping[str, Outgoing],
    aliases: Mapping[str, str],
) -> None:
    """Write one file that ``torch.load`` reads: first with room for the tensors, which are then filled in there.

    Args:
        path: The file.
        advance: Called with the bytes that were written.
        tensors: By name.
        aliases: Other name of a tied weight -> its name; both share their bytes.
    """
    # What is never touched takes no memory.
    state = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items()}
    state.update({alias: state[name] for alias, name in aliases.items()})
    with torch.serialization.skip_data():
        torch.save(state, path)
    places = _places(path)
    with path.open("r+b") as file:
        for number, each in enumerate(tensors.values()):  # torch numbers them as it comes upon them
            file.seek(places[number])
            for chunk in each.cast():
                file.write(chunk.contiguous().view(torch.uint8).numpy().data)
                advance(chunk.numel() * chunk.element_size())


def _places(path: Path) -> dict[int, int]:
    """Number of a tensor in a file of torch's -> its first byte there: each is a record of a zip file."""
    places = {}
    with zipfile.ZipFile(path) as records, path.open("rb") as file:
        for record in records.infolist():
            *_, folder, name = ("", *record.filename.split("/"))
            if folder == "data":
                file.seek(record.header_offset + LENGTHS_AT)
                lengths = struct.unpack("<HH", file.read(4))
                places[int(name)] = record.header_offset + LENGTHS_AT + 4 + sum(lengths)
    return places
