"""Where checkpoints lie: which one is named, room on the disk, whether machines see one folder, its seal, its code."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import appdirs
from determined import constants, core
from determined.errors import CheckpointNotFound

from determined_ds.checkpoints.files import (
    MANIFEST,
    PART,
    STATE,
    checkpoints_in,
    files_of,
    fingerprint,
    write_manifest,
)
from determined_ds.checkpoints.rank_state import read_state
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.memory.units import format_bytes
from determined_ds.pipe.partition import NAME as PARTITION
from determined_ds.rundir.heartbeat import HEART
from determined_ds.rundir.limits import disk_full
from determined_ds.rundir.run_dir import RunDir
from determined_ds.train.local_core import AtomicStorage

CODE = "code"
MAX_FILE_BYTES = 2**20  # of a context directory: a larger file is data


# ------------------------------------------------------------------------------------------- which one


def determineds_folder() -> Path:
    """Where Determined's trainers write checkpoints off-cluster.

    Source: ``_dummy_init`` in determined 0.38.1's ``core/_context.py``.
    """
    return Path(appdirs.user_data_dir("determined"))


def find_checkpoint(context: Any, given: str | os.PathLike[str]) -> str:
    """What to load: a uuid in this run's storage, or the folder of another checkpoint.

    Args:
        context: Its core context stores the checkpoints of this run.
        given: A uuid, of this run or in :func:`determineds_folder`, or a path.

    Raises:
        ConfigError: there is none, with where it was searched for.
    """
    name, storage = os.fspath(given), getattr(context._core.checkpoint, "_storage_manager", None)
    if not isinstance(storage, AtomicStorage):
        return name
    places = [storage.folder / name, determineds_folder() / name] if os.sep not in name else []
    places.append(Path(name))
    if found := next((place.absolute() for place in places if place.is_dir()), None):
        return found.name if found.parent == storage.folder.absolute() else str(found)
    message = (
        f"there is no such checkpoint in {', '.join(dict.fromkeys(str(place.parent) for place in places))}"
    )
    fix = "give its uuid, or the path of its folder"
    raise ConfigError(
        Problem(key="latest_checkpoint", value=name, message=message, fix=fix, code="no-checkpoint")
    )


def stored_partition(context: Any, run_dir: RunDir, trial_id: int | None) -> str | None:
    """The text of ``partition.json`` of the checkpoint that training continues from, before the model is built.

    None where there is none. Fetches no other file; for one rank.

    Args:
        context: Its core context stores the checkpoints; ``resumed_from`` names one, or is None.
        run_dir: Holds the partition of a run that begins again without a checkpoint.
        trial_id: On a cluster; the partition of another trial, on whatever machine that ran, is not taken.
    """
    with contextlib.suppress(OSError, CheckpointNotFound, CheckpointError, ConfigError):  # loading it says so
        if context.resumed_from is None:
            return run_dir.partition.read_text()
        uuid, mode = find_checkpoint(context, context.resumed_from), core.DownloadMode.NoSharedDownload
        wanted = (PARTITION, STATE)
        with context._core.checkpoint.restore_path(uuid, mode, selector=lambda name: name in wanted) as path:
            found = (Path(path) / PARTITION).read_text()
            if trial_id in (None, read_state(Path(path)).trial_id):
                return found
    return None


def lack_of_room(folder: Path, distributed: Any, least: Callable[[], int]) -> str:
    """Why a checkpoint does not fit on the disk, or ""; a collective.

    Its expected size is that of the last checkpoint; without one, the bytes that each rank writes at ``least``.
    """
    last = checkpoints_in(folder)[:1] if distributed.rank == 0 else []
    files = (file for each in last for file in each.path.rglob("*") if file.is_file())
    needed = distributed.broadcast(sum(512 * file.stat().st_blocks for file in files))  # in whole blocks
    needed, refusal = needed or sum(distributed.allgather(least())), ""
    if distributed.rank == 0 and needed > shutil.disk_usage(folder).free:
        refusal = disk_full(folder, folder.parent, f", a checkpoint takes about {format_bytes(needed)}")
    return str(distributed.broadcast(refusal.removeprefix("error: ")))


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
    """Copy the code of a context directory into ``code/`` of a checkpoint, as in those of Determined's own trials.

    So a checkpoint in the model registry can be loaded without the checkout that wrote it.

    Source: ``write_user_code`` in determined 0.38.1's ``util.py``, which copies all of it, whatever the size.
    """
    for file in context.rglob("*"):
        name = file.relative_to(context)
        if file.is_file() and file.stat().st_size <= MAX_FILE_BYTES and "__pycache__" not in name.parts:
            target = checkpoint / CODE / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
