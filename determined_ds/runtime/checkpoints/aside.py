"""Whether checkpoints are written while training continues: is it worth it, and is there memory for the copies?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.units import MIB, format_bytes
from determined_ds.runtime.checkpoints.all_engines import Engines, overrides

KEY = "hyperparameters.fit.asynchronous_checkpoints"
# Where nothing is stated, a rank that writes less does so at once: it takes about as long as to agree that it was
# written.
SMALL_BYTES = 16 * MIB

COPIES = 2  # one that is being written, and one that is made meanwhile
CGROUP = Path("/sys/fs/cgroup")


def is_aside(
    asynchronous: bool | None, trial: Any, engines: Engines, distributed: Any, note: Callable[[str], None]
) -> bool:
    """Whether checkpoints are written while training continues, decided before it; a collective.

    Args:
        asynchronous: As stated; None: where a rank writes much, the trial has no ``save`` of its own, which may read
            what is written, and memory suffices.
        trial: The trial.
        engines: Its engines.
        distributed: The ranks.
        note: Shows a line to the user.

    Raises:
        ConfigError: it is stated, and a machine has not the memory.
    """
    if asynchronous is False or (asynchronous is None and overrides(trial, "save")):
        return False
    if all(engines.own_layouts):
        if asynchronous:
            reason = engines.own_layouts[0]
            note(f"note        checkpoints are written while training waits: {reason}")
        return False
    own = RankCopies(distributed.cross_rank, engines.copy_bytes(), available_bytes())
    ranks = [RankCopies(*rank) for rank in distributed.allgather(tuple(own))]
    if asynchronous is None and max(rank.copy_bytes for rank in ranks) < SMALL_BYTES:
        return False
    lack = lack_of_memory(ranks)
    if lack and asynchronous:
        fix = "leave it out, and checkpoints are written while training waits; or use fewer slots a machine"
        raise ConfigError(Problem(key=KEY, value=True, message=lack, fix=fix, code="host-memory"))
    if lack:
        note(f"note        checkpoints are written while training waits: {lack}")
    return not lack


class RankCopies(NamedTuple):
    """What a rank needs and sees.

    Args:
        machine: The number of its machine.
        copy_bytes: Of one copy.
        available_bytes: Of its machine's memory.
    """

    machine: int
    copy_bytes: int
    available_bytes: int


def lack_of_memory(ranks: Sequence[RankCopies]) -> str:
    """What is missing on the machine that lacks most; "" where the copies fit on all of them."""
    lacks = []
    for machine in sorted({rank.machine for rank in ranks}):
        own = [rank for rank in ranks if rank.machine == machine]
        needed = COPIES * sum(rank.copy_bytes for rank in own)
        available = min(rank.available_bytes for rank in own)
        words = (
            f"two copies of what {len(own)} rank{'s' * (len(own) != 1)} write{'s' * (len(own) == 1)} take "
            f"{format_bytes(needed)} of host memory, and {format_bytes(available)} are available"
        )
        lacks.append((needed - available, words))
    missing, words = max(lacks)
    return words if missing > 0 else ""


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that this machine, or this container, has left; what the system caches of files counts as left."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        numbers = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return min(available, limit - used + int(numbers["file"]))
    except (OSError, ValueError, KeyError):  # no limit, or cgroups of version 1
        return available
