"""Ranks on two machines, and on one machine beside those of another trial, meet without being told how."""

from __future__ import annotations

import os
import sys

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.runtime.group import addresses
from determined_ds.runtime.group.distributed import join_process_group
from tests.command import TIMEOUT_S
from tests.machines import Machine
from tests.ranks import Ranks, free_port

CPU = Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False)


# ------------------------------------------------------------------------------------------ between machines

RANK = """
import torch
from determined_ds.config.accelerator import Accelerator
from determined_ds.runtime.group.distributed import join_process_group

ranks = join_process_group(Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False))
total = torch.tensor([ranks.rank + 1.0])
torch.distributed.all_reduce(total)
print("sum", total.item(), "ranks", ranks.allgather(ranks.rank), "machines", ranks.cross_size, flush=True)
ranks.allgather(None)
"""


def test_gloo_meets_on_the_interface_that_reaches_the_chief(machines: tuple[Machine, Machine]) -> None:
    """Each machine takes its own host name for an address of itself."""
    port = str(free_port())
    started = [
        machine.start([sys.executable, "-c", RANK], env=environment_of_rank(rank, machines[0], port))
        for rank, machine in enumerate(machines)
    ]
    for process in started:
        said, _ = process.communicate(timeout=TIMEOUT_S)
        assert "sum 3.0 ranks [0, 1] machines 2" in said
        assert process.returncode == 0, said


def environment_of_rank(rank: int, chief: Machine, port: str) -> dict[str, str]:
    """As torchrun's, of a rank alone on its machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": chief.address,
        "MASTER_PORT": port,
    }


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, None),
        ({"MASTER_ADDR": "localhost"}, None),
        ({"MASTER_ADDR": "no such host"}, None),
        ({}, None),
        ({"GLOO_SOCKET_IFNAME": "mine", "DET_INTER_NODE_NETWORK_INTERFACE": "lo"}, "mine"),
        ({"DET_INTER_NODE_NETWORK_INTERFACE": "lo"}, "lo"),
        ({"DET_INTER_NODE_NETWORK_INTERFACE": "^docker0,lo"}, None),
    ],
)
def test_what_somebody_named_is_taken_and_on_one_machine_nothing(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], taken: str | None
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DET_INTER_NODE_NETWORK_INTERFACE", "MASTER_ADDR")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    addresses.take_interfaces()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == taken
    assert os.environ.get("NCCL_SOCKET_IFNAME") == given.get("DET_INTER_NODE_NETWORK_INTERFACE")


# ---------------------------------------------------------------------------------------- beside another trial


def joined_at(port_of_the_allocation: str, environment: dict[str, str]) -> tuple[list[int], str]:
    os.environ.update(environment, C10D_PORT=port_of_the_allocation)
    ranks = join_process_group(CPU)
    return ranks.allgather(ranks.rank), os.environ["MASTER_PORT"]


def test_ranks_of_deepspeeds_launcher_meet_at_the_port_of_their_allocation(two_ranks: Ranks) -> None:
    port = str(free_port())
    launched = {"MASTER_PORT": "29500", "USE_DEEPSPEED": "1"}
    assert two_ranks.run(joined_at, port, launched) == [([0, 1], port)] * 2


@pytest.mark.parametrize(
    ("environment", "port"),
    [
        ({"MASTER_PORT": "29500"}, "29500"),  # not on a cluster
        ({"MASTER_PORT": "29500", "C10D_PORT": "29407"}, "29407"),
        ({"MASTER_PORT": "31000", "C10D_PORT": "29407"}, "31000"),  # somebody's --master_port
        ({"MASTER_PORT": "29500", "C10D_PORT": "29407", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "29500"),
    ],
)
def test_a_port_that_somebody_chose_stays(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], port: str
) -> None:
    for name in ("C10D_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    addresses.take_own_port()
    assert os.environ["MASTER_PORT"] == port
