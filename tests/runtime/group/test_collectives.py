"""Objects between ranks arrive as they were sent; what no rank has sent is not unpickled."""

from __future__ import annotations

import pickle
from typing import Any

from tests.ranks import Ranks

SENT = [{"rank": 0, "text": "a" * 1000}, ["rank", 1]]


class Trap:
    """Writes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def exchanged() -> tuple[list[Any], Any]:
    import torch.distributed as dist

    from determined_ds.runtime.group.collectives import allgather_objects, broadcast_object

    dist.init_process_group("gloo")
    own = SENT[dist.get_rank()]
    found = allgather_objects(own), broadcast_object(own)
    dist.barrier()  # rank 0 ends with the store that the other asks
    return found


def test_all_ranks_have_what_each_has_sent(two_ranks: Ranks) -> None:
    assert two_ranks.run(exchanged) == [(SENT, SENT[0])] * 2


def opened(sealed: bytes) -> str:
    import torch
    import torch.distributed as dist

    from determined_ds.errors import TrainingError
    from determined_ds.runtime.group.collectives import _opened

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    try:
        return repr(_opened(torch.frombuffer(bytearray(sealed), dtype=torch.uint8)))
    except TrainingError as error:
        return str(error)


def test_what_no_rank_has_sent_is_not_unpickled(one_rank: Ranks, tmp_path: Any) -> None:
    trap = tmp_path / "sprung"
    for sealed in (b"x", b"x" * 32 + pickle.dumps(Trap(str(trap)))):
        assert one_rank.run(opened, sealed) == [
            "an object came over the network that no rank of this run has sent; it was not read"
        ]
    assert not trap.exists()
