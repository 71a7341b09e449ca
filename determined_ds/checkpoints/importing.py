"""``det-ds checkpoint import``: weights of another program as a checkpoint to start from.

    files of safetensors, linked -> index.json over their bytes -> searcher.source_checkpoint_uuid: FOLDER

A rank then reads the slices that it holds, and no process ever holds all.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors

from determined_ds.checkpoints.export import Stage, check_disk, check_target, refused, replacing, unseen
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
from determined_ds.checkpoints.reader import layout_of
from determined_ds.checkpoints.shard_file import ITEM_BYTES, Placed, read_header
from determined_ds.errors import ConfigError

FIX = "give a file of safetensors, or a folder that save_pretrained has written"
TO_SAFETENSORS = "save its state_dict as safetensors: safetensors.torch.save_file(torch.load(FILE), OUT)"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was imported."""

    num_tensors: int
    num_bytes: int  # of them
    linked: bool  # whether its files take no room of their own


def import_weights(
    given: Path,
    out: Path,
    *,
    prefix: str = "",
    skip: Sequence[str] = (),
    force: bool = False,
    stage: Stage = unseen,
) -> Imported:
    """Make a checkpoint of weights.

    Args:
        given: A file of safetensors, or a folder of them.
        out: The checkpoint's folder, to make.
        prefix: To put before every name.
        skip: Shell patterns of names to leave out.
        force: Whether an earlier import at ``out`` is replaced.
        stage: Shows how far it is.

    Raises:
        ConfigError: these are not such files, or ``out`` exists.
        CheckpointError: the disk has no room.
    """
    out = out.resolve()
    files = _files_at(given)
    check_target(given, out, force=force)
    headers = {file: _header_of(file) for file in files}
    tensors: dict[str, StoredTensor] = {}
    linked, left = True, sum(file.stat().st_size for file in files)
    with replacing(out) as made, stage("read", left) as read:
        folder = made / "model0"
        folder.mkdir(parents=True)
        for file in files:
            target = folder / file.name
            try:
                os.link(file.resolve(), target)  # of a link what it means
            except OSError:  # another disk, another's file, or a file system without links
                linked = False
                check_disk(out, left)
                shutil.copyfile(file, target)
            left -= file.stat().st_size
            for name, entry in headers[file].items():
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
                    continue
                if prefix + name in tensors:
                    raise refused(
                        "WEIGHTS", file.name, f"{name} is in several files", "give the folder of one model"
                    )
                count = (entry.end - entry.begin) // ITEM_BYTES[entry.dtype]
                piece = Piece(file=target.name, offset=entry.begin, start=0, length=count)
                states = {WEIGHT: StoredState(dtype=entry.dtype, pieces=(piece,))}
                tensors[prefix + name] = StoredTensor(shape=entry.shape, kind=IMPORTED, states=states)
        if not tensors:
            raise refused("WEIGHTS", given, "holds no tensors that are not skipped", FIX)
        write_index(folder, EngineIndex(tensors=tensors))
        (made / STATE).write_text(json.dumps(asdict(TrialState())) + "\n")
        prints = {name: fingerprint(made / name, read=read) for name in files_of(made)}
        write_manifest(made, prints, {"steps_completed": 0, "framework": "", "format": "pickle"})
    num_bytes = sum(state.num_bytes for each in tensors.values() for state in each.states.values())
    return Imported(num_tensors=len(tensors), num_bytes=num_bytes, linked=linked)


def _files_at(given: Path) -> list[Path]:
    """The files with weights that a path means: of an index those that it names, else all of a folder."""

    def wrong(message: str, fix: str = FIX) -> ConfigError:
        return refused("WEIGHTS", given, message, fix)

    if given.is_file():
        if given.suffix != ".safetensors":
            raise wrong("is not a file of safetensors", TO_SAFETENSORS)
        return [given]
    if not given.is_dir():
        raise wrong("there is no such file or folder")
    if (given / "latest").is_file() or layout_of(given) is not None:
        fix = "give OUT of: python -m deepspeed.utils.zero_to_fp32 --safe_serialization DIR OUT"
        raise wrong("is a checkpoint of DeepSpeed's", fix)
    indexes = sorted(given.glob("*.safetensors.index.json"))
    try:
        named = {name for file in indexes for name in json.loads(file.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise wrong(f"{indexes[0].name} is not an index: {error!r}") from None
    files = [given / name for name in sorted(named)] or sorted(given.glob("*.safetensors"))
    if not files:
        raise wrong("holds no *.safetensors", TO_SAFETENSORS)
    if missing := [file.name for file in files if not file.is_file()]:
        raise wrong(f"{missing[0]} is missing, which its index names", "copy it again")
    return files


def _header_of(file: Path) -> Mapping[str, Placed]:
    try:
        with safetensors.safe_open(
            file, framework="pt"
        ):  # it checks all of the header, and the length of the file
            found = read_header(file)
    except (safetensors.SafetensorError, ValueError) as error:
        fix = "copy it again; an interrupted download is too short"
        raise refused("WEIGHTS", file, f"is not a whole file of safetensors: {error}", fix) from None
    if odd := next((each for each in found.values() if each.dtype not in ITEM_BYTES), None):
        raise refused("WEIGHTS", file, f"holds numbers of the type {odd.dtype}, which no engine trains", FIX)
    return found
