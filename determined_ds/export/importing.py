"""``det-ds checkpoint import``: files of safetensors as a checkpoint to start from, without a copy of their bytes.

    weights of another program -> index.json over their bytes, files linked -> searcher.source_checkpoint_uuid: FOLDER

A rank then reads the slices that it holds, and no process ever holds all.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from determined_ds.checkpoints.index import (
    IMPORTED,
    WEIGHT,
    EngineIndex,
    Piece,
    StoredState,
    StoredTensor,
    write_index,
)
from determined_ds.checkpoints.reader import layout_of
from determined_ds.checkpoints.shard_file import ITEM_BYTES, Entry, read_header
from determined_ds.export.exporting import aside, check_disk, check_target
from determined_ds.export.wanted import Stage, refused, unseen
from determined_ds.protocol.checkpoint_files import files_of, fingerprint, write_manifest
from determined_ds.runtime.checkpoints.trial_state import STATE, TrialState

INDEX_SUFFIX = ".safetensors.index.json"
FOLDER = "model0"
FIX = "a file of safetensors, or a folder that save_pretrained has written"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was imported.

    Args:
        out: The checkpoint's folder.
        num_tensors: In it.
        num_bytes: Of them.
        linked: Whether its files take no room of their own.
    """

    out: Path
    num_tensors: int
    num_bytes: int
    linked: bool


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
        force: Whether ``out`` is replaced.
        stage: Shows how far it is.

    Raises:
        ConfigError: these are not such files, or ``out`` exists.
    """
    files = files_at(given)
    check_target(given, out, force=force)
    tensors = _tensors_of(files, prefix, skip)
    can_link = _same_disk(files, out)
    num_bytes = sum(file.stat().st_size for file in files.values())
    if not can_link:
        check_disk(out, num_bytes)
    with aside(out, force=force) as made, stage("read", num_bytes) as read:
        (made / FOLDER).mkdir(parents=True)
        linked = [_place(file, made / FOLDER / name, can_link) for name, file in files.items()]
        write_index(made / FOLDER, EngineIndex(tensors=tensors))
        (made / STATE).write_text(json.dumps(asdict(TrialState())) + "\n")
        prints = {name: fingerprint(made / name, read=read) for name in files_of(made)}
        write_manifest(made, prints, {"steps_completed": 0, "framework": "", "format": "pickle"})
    held = sum(state.num_bytes for tensor in tensors.values() for state in tensor.states.values())
    return Imported(out=out, num_tensors=len(tensors), num_bytes=held, linked=all(linked))


def files_at(given: Path) -> dict[str, Path]:
    """Name -> the files of safetensors that a path means: of an index those that it names, else all of a folder.

    Raises:
        ConfigError: there are none, or one is missing.
    """
    if given.is_file():
        if given.suffix != ".safetensors":
            raise refused("WEIGHTS", str(given), "is not a file of safetensors", FIX)
        return {given.name: given.resolve()}
    if not given.is_dir():
        raise refused("WEIGHTS", str(given), "there is no such file or folder", FIX)
    indexes = sorted(given.glob(f"*{INDEX_SUFFIX}"))
    try:
        named = {name for file in indexes for name in json.loads(file.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise refused("WEIGHTS", str(given), f"{indexes[0].name} is not an index: {error!r}", FIX) from None
    names = sorted(named) or sorted(file.name for file in given.glob("*.safetensors"))
    if not names:
        others = sorted(file.name for file in given.glob("*.bin"))
        message = f"holds no *.safetensors{f', only {others[0]}' if others else ''}"
        fix = "load it with transformers and save_pretrained, which writes them" if others else FIX
        if (given / "latest").is_file() or layout_of(given) is not None:
            message, fix = (
                "holds a checkpoint of DeepSpeed's",
                f"python -m deepspeed.utils.zero_to_fp32 --safe_serialization {given} OUT; import OUT",
            )
        raise refused("WEIGHTS", str(given), message, fix)
    if missing := [name for name in names if not (given / name).is_file()]:
        raise refused(
            "WEIGHTS", str(given), f"{missing[0]} is missing, which its index names", "copy it again"
        )
    return {name: (given / name).resolve() for name in names}


def _tensors_of(files: Mapping[str, Path], prefix: str, skip: Sequence[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file_name, file in files.items():
        for name, tensor in _in_file(file_name, file):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
                continue
            if prefix + name in tensors:
                message = f"{name} is in several files"
                raise refused("WEIGHTS", file_name, message, "give the folder of one model")
            tensors[prefix + name] = tensor
    if not tensors:
        raise refused("WEIGHTS", next(iter(files)), "holds no tensors that are not skipped", FIX)
    return tensors


def _in_file(name: str, file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    try:
        for tensor, entry in read_header(file).items():
            yield tensor, _tensor(name, entry, size)
    except ValueError as error:
        message = f"is not a whole file of safetensors: {error}"
        raise refused(
            "WEIGHTS", str(file), message, "copy it again; an interrupted download is too short"
        ) from None


def _tensor(file: str, entry: Entry, size: int) -> StoredTensor:
    dtype, shape, begin, end = entry
    if dtype not in ITEM_BYTES:
        raise ValueError(f"it holds numbers of the type {dtype}, which no engine trains")
    count = math.prod(shape)
    if end - begin != count * ITEM_BYTES[dtype] or begin < 0 or end > size:
        raise ValueError(f"a tensor of shape {shape} lies at bytes {begin} to {end} of {size}")
    piece = Piece(file=file, offset=begin, start=0, count=count)
    return StoredTensor(
        shape=shape, kind=IMPORTED, states={WEIGHT: StoredState(dtype=dtype, pieces=(piece,))}
    )


def _same_disk(files: Mapping[str, Path], out: Path) -> bool:
    folder = out.absolute().parent
    folder = next(each for each in (folder, *folder.parents) if each.exists())
    return all(file.stat().st_dev == folder.stat().st_dev for file in files.values())


def _place(file: Path, target: Path, can_link: bool) -> bool:
    """Link a file, or copy it where that cannot be. Returns whether it was linked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if can_link:
        try:
            os.link(file, target)
            return True
        except OSError:  # another's file, or a file system without links
            pass
    shutil.copyfile(file, target)
    return False
