"""``det-ds checkpoint import``: weights of another program as a checkpoint to start from.

    files of safetensors, linked -> index.json over their bytes -> searcher.source_checkpoint_uuid: FOLDER

A rank then reads the slices that it holds, and no process ever holds all.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors

from determined_ds.checkpoints.export import refused, replacing
from determined_ds.checkpoints.files import STATE, files_of, fingerprint, write_manifest
from determined_ds.checkpoints.index import (
    IMPORTED,
    WEIGHT,
    EngineIndex,
    Piece,
    StoredState,
    StoredTensor,
    write_index,
)
from determined_ds.checkpoints.rank_state import TrialState
from determined_ds.checkpoints.shard_file import ITEM_BYTES, LENGTH_BYTES

FIX = (
    "give a file of safetensors, or a folder that save_pretrained has written. Of a state_dict: "
    "safetensors.torch.save_file(torch.load(FILE), OUT); of DeepSpeed's files: "
    "python -m deepspeed.utils.zero_to_fp32 --safe_serialization DIR OUT"
)


def import_weights(
    given: Path, out: Path, *, prefix: str, skip: Sequence[str], force: bool
) -> dict[str, Any]:
    """Make a checkpoint of weights.

    Args:
        given: A file of safetensors, or a folder of them.
        out: The checkpoint's folder, to make.
        prefix: To put before every name.
        skip: Shell patterns of names to leave out.
        force: Whether an earlier import at ``out`` is replaced.

    Returns:
        ``tensors`` and their ``bytes``; ``linked``: whether its files take no room of their own.

    Raises:
        ConfigError: these are not such files, or ``out`` exists.
    """
    files = _files_at(given)
    tensors: dict[str, StoredTensor] = {}
    linked = True
    with replacing(out.resolve(), given, force=force) as made:
        folder = made / "model0"
        folder.mkdir(parents=True)
        for file in files:
            for name, tensor in _tensors_in(file):
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
                    continue
                if prefix + name in tensors:
                    message = f"{name} is in several files"
                    raise refused("WEIGHTS", file.name, message, "give the folder of one model")
                tensors[prefix + name] = tensor
            try:
                os.link(file.resolve(), folder / file.name)  # of a link what it means
            except OSError:  # another disk, another's file, or a file system without links
                linked = False
                shutil.copyfile(file, folder / file.name)
        if not tensors:
            raise refused("WEIGHTS", given, "holds no tensors that are not skipped", "skip fewer")
        write_index(folder, EngineIndex(tensors=tensors))
        (made / STATE).write_text(json.dumps(asdict(TrialState())) + "\n")
        prints = {name: fingerprint(made / name) for name in files_of(made)}
        write_manifest(made, prints, {"steps_completed": 0, "framework": "", "format": "pickle"})
    num_bytes = sum(each.states[WEIGHT].num_bytes for each in tensors.values())
    return {"tensors": len(tensors), "bytes": num_bytes, "linked": linked}


def _files_at(given: Path) -> list[Path]:
    """The files with weights that a path means: of an index those that it names, else all of a folder."""
    names: set[str] = set()
    for file in given.glob("*.safetensors.index.json"):
        try:
            names.update(json.loads(file.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise refused("WEIGHTS", file, f"is not an index: {error!r}", "copy it again") from None
    files = [given / name for name in sorted(names)] or sorted(given.glob("*.safetensors"))
    if given.is_file() and given.suffix == ".safetensors":
        files = [given]
    if not files:
        raise refused("WEIGHTS", given, "is no file of safetensors, and no folder of such files", FIX)
    if missing := [file.name for file in files if not file.is_file()]:
        message = f"{missing[0]} is missing, which its index names"
        raise refused("WEIGHTS", given, message, "copy it again")
    return files


def _tensors_in(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a file by name, as an index has them; none is read."""
    try:
        # It checks all of the header, and that the bytes of the tensors follow each other to the end of the file.
        with safetensors.safe_open(file, framework="pt") as opened, file.open("rb") as stream:
            at = LENGTH_BYTES + int.from_bytes(stream.read(LENGTH_BYTES), "little")
            kinds = {name: opened.get_slice(name) for name in opened.offset_keys()}
            for name, kind in kinds.items():
                shape, dtype = tuple(kind.get_shape()), kind.get_dtype()
                if dtype not in ITEM_BYTES:
                    message = f"holds numbers of the type {dtype}, which no engine trains"
                    raise refused("WEIGHTS", file, message, "convert it, or save the model without it")
                piece = Piece(file=file.name, offset=at, start=0, length=math.prod(shape))
                states = {WEIGHT: StoredState(dtype=dtype, pieces=[piece])}
                yield name, StoredTensor(shape=shape, kind=IMPORTED, states=states)
                at += piece.length * ITEM_BYTES[dtype]
    except (safetensors.SafetensorError, ValueError) as error:
        fix = "copy it again; an interrupted download is too short"
        raise refused("WEIGHTS", file, f"is not a whole file of safetensors: {error}", fix) from None
