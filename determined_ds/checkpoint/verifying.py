"""Every file of a checkpoint against its manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from determined_ds.protocol.checkpoint_files import (
    MANIFEST,
    Checkpoint,
    checkpoints_in,
    damages_of,
    files_of,
    is_sealed,
)
from determined_ds.protocol.named_checkpoint import is_checkpoint
from determined_ds.protocol.run_dir import RunDir

INTACT, DAMAGED, UNVERIFIED = "intact", "damaged", "unverified"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found of a checkpoint.

    Args:
        checkpoint: It.
        state: ``intact``, ``damaged``, or ``unverified`` where there is no manifest to go by.
        damages: What is wrong, each beginning with the file's name; or why it is unverified.
        num_files: Files of the manifest, or of the folder.
        num_bytes: Their size on the disk.
    """

    checkpoint: Checkpoint
    state: str
    damages: tuple[str, ...]
    num_files: int
    num_bytes: int


def verify(checkpoint: Checkpoint, *, read: Callable[[int], None] = lambda count: None) -> Verified:
    """Read all of a checkpoint and compare it with its manifest.

    Args:
        checkpoint: To read.
        read: Called with the number of bytes that were read since the last call.
    """
    path = checkpoint.path
    damages = list(damages_of(path, read=read))
    state = DAMAGED if damages else INTACT
    if not damages and not is_sealed(path):
        state, damages = UNVERIFIED, [f"there is no {MANIFEST} to compare its files with"]
    return Verified(
        checkpoint=checkpoint,
        state=state,
        damages=tuple(damages),
        num_files=len(files_of(path)),
        num_bytes=bytes_in(path),
    )


def all_at(path: Path) -> list[Checkpoint]:
    """The checkpoints of a run directory, the newest first; none where it is a checkpoint itself."""
    return [] if is_checkpoint(path) else checkpoints_in(RunDir(path).checkpoints)


def bytes_in(path: Path) -> int:
    """The size of a folder's files; a run may be deleting it."""
    found = 0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size if file.is_file() else 0
    return found
