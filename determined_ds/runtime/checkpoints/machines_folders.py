"""Whether the machines of a run see one folder of a checkpoint, or each its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def is_shared(file: Path, distributed: Any) -> bool:
    """Whether all machines see the same file; a collective, unless there is one machine.

    Two files that were written apart have no time of change in common, to the nanosecond, and so no inode.

    Args:
        file: Of the checkpoint, which all machines are to look for.
        distributed: The ranks.
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


def keep_apart(folder: Path, distributed: Any) -> None:
    """Have no two machines hold folders of the same identity; a collective.

    Determined takes two folders of the same device and inode for one, and uploads the first alone. Machines that were
    set up alike may well number them alike.

    Args:
        folder: This machine's own, of the same name on all; what is in it stays.
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
    """Put all that is in a folder into another inode, under the same name."""
    other = folder.with_name(
        f"{folder.name}.renewed"
    )  # made while the first is there: it cannot get its inode
    other.mkdir()
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
