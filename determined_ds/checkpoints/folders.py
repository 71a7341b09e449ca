"""Folders of checkpoints: room on the disk, and whether the machines of a run see one folder or one each."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.files import checkpoints_in, files_of, fingerprint, write_manifest
from determined_ds.errors import CheckpointError
from determined_ds.memory.units import format_bytes
from determined_ds.rundir.heartbeat import HEART
from determined_ds.rundir.limits import disk_full
from determined_ds.train.state_bytes import walk


def check_room(context: Any, folder: Path) -> None:
    """Refuse to begin a checkpoint that does not fit on the disk; a collective.

    Its expected size is that of the last checkpoint; without one, that of the engines' states, the least it can be.

    Args:
        context: The trial's.
        folder: Of the checkpoints, on a disk of this machine.

    Raises:
        CheckpointError: on all ranks; names what is needed.
    """
    distributed, resolved = context.distributed, context.resolved
    last = checkpoints_in(folder) if distributed.rank == 0 else []
    needed = 0
    if distributed.broadcast(bool(last)):
        # In whole blocks, as on the disk.
        files = (file for file in last[0].path.rglob("*") if file.is_file()) if last else ()
        needed = sum(512 * file.stat().st_blocks for file in files)
    else:  # what replicas hold alike is written once
        replicas, stage = resolved.topology.data_parallel_world_size, resolved.zero_stage
        own = [walk(model) for model in context.models]
        kinds = [sum(each[kind] for each in own) for kind in ("parameters", "optimizer_states")]
        parameters, states = (sum(column) for column in zip(*distributed.allgather(kinds), strict=True))
        needed = int(parameters / (1 if stage == 3 else replicas) + states / (1 if stage else replicas))
    refusal = ""
    if distributed.rank == 0 and needed > shutil.disk_usage(folder).free:
        message = disk_full(folder, folder.parent, f", a checkpoint takes about {format_bytes(needed)}")
        refusal = message.removeprefix("error: ")
    if refusal := distributed.broadcast(refusal):
        raise CheckpointError(refusal)


# ------------------------------------------------------------------------------------------- machines


def is_shared(file: Path, distributed: Any) -> bool:
    """Whether all machines see the same file of a checkpoint; a collective, unless there is one machine.

    Two files that were written separately differ in inode or time of change, to the nanosecond.
    """
    if distributed.cross_size == 1:
        return True
    marks = distributed.allgather(_mark(file))
    return None not in marks and len(set(marks)) == 1


def share_of(distributed: Any, *, shared: bool) -> tuple[int, int]:
    """This rank's number, and how many there are, among those that divide the reading of a folder."""
    if shared:
        return distributed.rank, distributed.size
    return distributed.local_rank, distributed.local_size


def seal_folder(path: Path, metadata: Mapping[str, Any], known: Mapping[str, Any], distributed: Any) -> None:
    """Write the manifest, once all ranks have written; those that see the same folder share the reading; a collective.

    Args:
        path: The checkpoint's folder.
        metadata: What ``metadata.json`` holds.
        known: Fingerprints of files that this rank wrote, which need not be read.
        distributed: The ranks.
    """
    fingerprints = {name: mark for marks in distributed.allgather(known) for name, mark in marks.items()}
    shared = is_shared(path / "det_state_dict_rank0.pth", distributed)
    index, count = share_of(distributed, shared=shared)
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
        keep_apart(path, distributed)


def keep_apart(folder: Path, distributed: Any) -> None:
    """Have no two machines hold folders of the same device and inode; a collective.

    Determined takes such folders for one, and uploads only the first. Machines that were set up alike may number them
    alike.

    Args:
        folder: This machine's own, of the same name on all; its contents stay.
        distributed: The ranks.

    Source: ``_store_path_sharded`` in determined 0.38.1's ``core/_checkpoint.py``.
    """
    while True:
        first: dict[Any, int] = {}  # identity -> the machine that keeps it
        for machine, identity in sorted(distributed.allgather((distributed.cross_rank, _identity(folder)))):
            first.setdefault(identity, machine)
        clashes = first[_identity(folder)] != distributed.cross_rank
        if not any(distributed.allgather(clashes)):
            return
        if clashes and distributed.local_rank == 0:
            _renew(folder)
        distributed.allgather(None)


def _renew(folder: Path) -> None:
    """Move everything in a folder to another inode, under the same name."""
    other = folder.with_name(f"{folder.name}.renewed")
    other.mkdir()  # while the first is there, so it cannot get its inode
    for entry in folder.iterdir():
        entry.rename(other / entry.name)
    folder.rmdir()
    other.rename(folder)


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _mark(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
