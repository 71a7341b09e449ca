"""Ranks of a script meet, whatever contexts of its own rank 0 makes beside."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from tests.ranks import Ranks


def meet(folder: Path) -> list[int]:
    """In a rank: meet the other, where the first one reports to a master by a context of its own."""
    import importlib

    from determined import core

    from determined_ds.protocol.handed_on import STORE
    from determined_ds.runtime.scripts.meeting import meet_by_files

    rank = int(os.environ["RANK"])
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    mock.patch.dict(handlers).start()
    with mock.patch.dict(os.environ, {STORE: str(folder / "store")}):
        meet_by_files()
    one_machine = {"cross_rank": 0, "cross_size": 1}
    try:
        if rank == 0:
            core.DistributedContext(rank=0, size=1, local_rank=0, local_size=1, **one_machine)
        both = core.DistributedContext(rank=rank, size=2, local_rank=rank, local_size=2, **one_machine)
        found: list[int] = both.allgather(rank)
        both.close()
        return found
    finally:
        mock.patch.stopall()


def test_a_context_of_rank_0_alone_does_not_count(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(meet, tmp_path) == [[0, 1], [0, 1]]
