"""Where checkpoints lie: which one is named, room on the disk, whether machines see one folder, its seal, its code."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from determined import constants

from determined_ds.checkpoints.files import (
    MANIFEST,
    PART,
    files_of,
    fingerprint,
    write_manifest,
)
from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.signals import HEART
from determined_ds.train.local_core import AtomicStorage

CODE = "code"
MAX_FILE_BYTES = 2**20  # of a context directory: a larger file is data


# ------------------------------------------------------------------------------------------- which one


def find_checkpoint(context: Any, given: str | os.PathLike[str]) -> str:
    """What to load, by a uuid or a path: a uuid in the storage of this run, or the folder of another checkpoint."""
    name, storage = os.fspath(given), getattr(context._core.checkpoint, "_storage_manager", None)
    if not isinstance(storage, AtomicStorage):
        return name
    folder = storage.folder.absolute()
    if found := next((each.absolute() for each in (folder / name, Path(name)) if each.is_dir()), None):
        return found.name if found.parent == folder else str(found)
    message = f"there is no such checkpoint in {storage.folder}, and no such folder"
    fix = "give its uuid, or the path of its folder"
    raise ConfigError(
        Problem(key="latest_checkpoint", value=name, message=message, fix=fix, code="no-checkpoint")
    )


# ------------------------------------------------------------------------------------------- machines


def share_of(path: Path, distributed: Any, name: str = MANIFEST) -> tuple[int, int, bool]:
    """How the ranks that see one folder divide the reading of it; a collective.

    Two files that were written separately differ in inode or time of change, to the nanosecond.

    Returns:
        Which share is this rank's, of how many, and whether all ranks see one folder.
    """
    if distributed.cross_size > 1:
        mark = None
        with contextlib.suppress(OSError):
            found = (path / name).stat()
            mark = (found.st_ino, found.st_mtime_ns, found.st_size)
        marks = distributed.allgather(mark)
        if None in marks or len(set(marks)) > 1:
            return distributed.local_rank, distributed.local_size, False
    return distributed.rank, distributed.size, True


def seal_folder(path: Path, metadata: Mapping[str, Any], known: Mapping[str, Any], distributed: Any) -> None:
    """Write the manifest, once all ranks have written; those that see one folder share the reading; a collective.

    ``known`` has the fingerprints of files that this rank has written.
    """
    fingerprints = {name: mark for marks in distributed.allgather(known) for name, mark in marks.items()}
    index, count, shared = share_of(path, distributed, PART.format(0))
    names = files_of(path)
    if shared:  # one list for all: a network file system may show some ranks fewer files
        names = sorted({name for seen in distributed.allgather(names) for name in seen})
    marks = {name: fingerprints[name] for name in names if name in fingerprints}
    for name in [name for name in names if name not in fingerprints][index::count]:
        marks[name] = fingerprint(path / name)
        HEART.beat()
    shares = distributed.allgather(marks)
    if index == 0:
        write_manifest(path, {name: mark for share in shares for name, mark in share.items()}, metadata)
    if not shared:
        _keep_apart(path, distributed)


def _keep_apart(folder: Path, distributed: Any) -> None:
    """Have no two machines hold folders of the same device and inode; a collective.

    Determined takes such folders for one, and uploads only the first. Machines that were set up alike may number them
    alike.

    Source: ``_store_path_sharded`` in determined 0.38.1's ``core/_checkpoint.py``.
    """
    while True:
        found = folder.stat()
        own = (found.st_dev, found.st_ino)
        everyone = distributed.allgather((*own, distributed.cross_rank))
        if len({each[:2] for each in everyone}) == len(set(everyone)):
            return
        first = min(each[2] for each in everyone if each[:2] == own)
        if first != distributed.cross_rank and distributed.local_rank == 0:
            other = folder.with_name(f"{folder.name}.renewed")
            other.mkdir()  # while the first is there, so it cannot get its inode
            for entry in folder.iterdir():
                entry.rename(other / entry.name)
            folder.rmdir()
            other.rename(folder)
        distributed.allgather(None)


# ------------------------------------------------------------------------------------------- code


def write_code(checkpoint: Path, context: Path = Path(constants.MANAGED_TRAINING_MODEL_COPY)) -> None:
    """Copy the trial's code out of a context directory into ``code/`` of a checkpoint.

    So a checkpoint in the model registry can be loaded without the checkout that wrote it. Where this library came
    with the context it stays out: who loads the checkpoint has it, and it would be four fifths of the copy.

    Source: ``write_user_code`` in determined 0.38.1's ``util.py``, which copies all of it, whatever the size.
    """

    def left_out(folder: str, names: list[str]) -> list[str]:
        large = [name for name in names if _is_data(Path(folder, name))]
        return [*large, "__pycache__", *(["determined_ds"] if Path(folder) == context else [])]

    if context.is_dir():
        shutil.copytree(context, checkpoint / CODE, ignore=left_out, dirs_exist_ok=True)


def _is_data(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > MAX_FILE_BYTES


@contextlib.contextmanager
def all_but(manager: Any, names: set[str]) -> Iterator[None]:
    """In here, a storage manager leaves out files that are uploaded."""
    if not names:
        yield
        return
    whole = manager.upload

    def rest(src: Any, dst: str, paths: set[str] | None = None) -> None:
        there = set(manager._list_directory(src)) if paths is None else paths
        whole(src, dst, there - names)

    manager.upload = rest
    try:
        yield
    finally:
        del manager.upload
