"""Whether there is room for a checkpoint, before it is begun."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from determined_ds.errors import CheckpointError
from determined_ds.memory.units import format_bytes
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.exhausted import disk_full
from determined_ds.runtime.checkpoints.state_bytes import walk


def check_room(context: Any, folder: Path) -> None:
    """Refuse to begin a checkpoint that cannot fit; a collective.

    The last checkpoint there says how large the next one is; the first is as large as its engines' states at least.

    Args:
        context: The trial's.
        folder: Of the checkpoints, on a disk of this machine.

    Raises:
        CheckpointError: on all ranks; what is needed, and what is free.
    """
    distributed = context.distributed
    last = checkpoints_in(folder) if distributed.rank == 0 else []
    if distributed.broadcast(bool(last)):
        needed = bytes_of(last[0].path) if last else 0
    else:
        needed = _states_bytes(context)
    free = shutil.disk_usage(folder).free
    refusal = ""
    if needed > free and distributed.rank == 0:
        message = disk_full(folder, folder.parent, f", a checkpoint takes about {format_bytes(needed)}")
        refusal = message.removeprefix("error: ")
    refusal = distributed.broadcast(refusal)
    if refusal:
        raise CheckpointError(refusal)


def bytes_of(folder: Path) -> int:
    """Bytes that the files of a folder take on their disk, which gives them out in blocks."""
    return sum(512 * file.stat().st_blocks for file in folder.rglob("*") if file.is_file())


def _states_bytes(context: Any) -> int:
    """Bytes of parameters and optimizer states that a checkpoint holds, replicas once; a collective."""
    resolved = context.resolved
    replicas, stage = resolved.topology.data_parallel_world_size, resolved.zero_stage
    found = [walk(model) for model in context.models]
    mine = (sum(each["parameters"] for each in found), sum(each["optimizer_states"] for each in found))
    everyone = context.distributed.allgather(mine)
    parameters, states = (sum(column) for column in zip(*everyone, strict=True))
    return int(parameters / (1 if stage == 3 else replicas) + states / (1 if stage else replicas))
