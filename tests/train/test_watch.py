"""How ranks meet, wait for one another, and end. One that hangs is named: ``tests/launch/test_ranks.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from determined_ds.errors import ConfigError
from tests.harness.command import TIMEOUT_S
from tests.harness.ranks import Ranks, free_port
from tests.train.small import hyperparameters

HANG_TIMEOUT = "DETERMINED_DS_HANG_TIMEOUT"


def met(environment: dict[str, str]) -> dict[str, Any]:
    """In a rank: how it met the others, or what is refused."""
    import torch

    from determined_ds import open_context

    os.environ.update(environment)
    try:
        with open_context(hparams=hyperparameters(), accelerator="cpu") as context:
            group = torch.distributed.group.WORLD
            return {
                "ranks": context.distributed.allgather(context.distributed.rank),
                "port": os.environ["MASTER_PORT"],
                "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
                "hours": group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 3600,
            }
    except ConfigError as error:
        return {"refused": str(error)}


def test_every_rank_is_as_patient_as_an_upload_may_be_long(two_ranks: Ranks) -> None:
    """Ranks wait for one another for days, whatever ends a hang; a limit that is no time is an error."""
    for found in two_ranks.run(met, {HANG_TIMEOUT: "10"}):
        assert (found["ranks"], found["hours"], found["interface"]) == ([0, 1], 7 * 24, None)
    for found in two_ranks.run(met, {HANG_TIMEOUT: "soon"}):
        assert f"{HANG_TIMEOUT} = " in found["refused"]


@pytest.mark.parametrize(
    ("given", "moves", "interface"),
    [
        ({"MASTER_PORT": "29500", "USE_DEEPSPEED": "1"}, True, None),
        ({"DET_INTER_NODE_NETWORK_INTERFACE": "lo"}, False, "lo"),  # and somebody's --master_port stays
    ],
)
def test_ranks_meet_at_the_port_of_their_allocation_on_the_interface_that_somebody_named(
    given: dict[str, str], moves: bool, interface: str | None, two_ranks: Ranks
) -> None:
    """Ranks of DeepSpeed's launcher on one machine with another trial's would all take the same port."""
    port = str(free_port())
    for found in two_ranks.run(met, {**given, "C10D_PORT": port}):
        assert (found["ranks"], found["interface"]) == ([0, 1], interface)
        assert (found["port"] == port) is moves


ENDING = """
import sys
from determined_ds import open_context
from tests.package import show_signs_all_the_time

show_signs_all_the_time()
hparams = {"global_batch_size": 2, "deepspeed_config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}}
with open_context(hparams=hparams, run_dir=sys.argv[1], accelerator="cpu") as context:
    context.distributed.allgather(None)
    sys.exit(0)
"""


def test_a_script_that_ends_while_its_rank_shows_a_sign_of_life_is_not_aborted(tmp_path: Path) -> None:
    """Python ends a thread that returns from a call of torch's store then, and C++ aborts the process."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, tmp_path],
            env={**os.environ, **address, "LOCAL_WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
