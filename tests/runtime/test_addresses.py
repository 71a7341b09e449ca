"""Ranks on two machines, and on one machine beside those of another trial, meet without being told how."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.runtime import addresses
from determined_ds.runtime.distributed import join_process_group
from tests.ranks import ROOT, Ranks, free_port

CPU = Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False)
ADDRESSES = ("10.77.0.1", "10.77.0.2")


# ------------------------------------------------------------------------------------------ between machines

# A machine: a network, a host name and an /etc/hosts of its own. It lives as long as this process.
MACHINE = """
set -eu
mount --bind "$1" /etc/hosts
hostname "$2"
ip link set lo up
echo ready
read -r go
ip address add "$3/24" dev eth0
ip link set eth0 up
exec "$4" -c "$5"
"""
RANK = """
import torch
from determined_ds.config.accelerator import Accelerator
from determined_ds.runtime.distributed import join_process_group

ranks = join_process_group(Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False))
total = torch.tensor([ranks.rank + 1.0])
torch.distributed.all_reduce(total)
print("sum", total.item(), "ranks", ranks.allgather(ranks.rank), "machines", ranks.cross_size, flush=True)
ranks.allgather(None)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two of them, joined by a cable, each of which takes its own host name for 127.0.0.1; a rank starts on each."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip and unshare")
    port = str(free_port())
    started = []
    for rank, address in enumerate(ADDRESSES):
        hosts = tmp_path / f"hosts{rank}"
        hosts.write_text(f"127.0.0.1 localhost machine{rank}\n")
        script = [str(hosts), f"machine{rank}", address, sys.executable, RANK]
        started.append(
            subprocess.Popen(
                ["unshare", "--net", "--mount", "--uts", "bash", "-c", MACHINE, "machine", *script],
                cwd=ROOT,
                env={
                    **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": "2",
                    "LOCAL_WORLD_SIZE": "1",
                    "GROUP_RANK": str(rank),
                    "GROUP_WORLD_SIZE": "2",
                    "MASTER_ADDR": ADDRESSES[0],
                    "MASTER_PORT": port,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for machine in started:
            assert machine.stdout is not None
            if (said := machine.stdout.readline()) != "ready\n":
                pytest.skip(f"no network namespace can be had: {said}{machine.stdout.read()}")
        first, second = (str(machine.pid) for machine in started)
        cable = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second]
        subprocess.run(["nsenter", f"--net=/proc/{first}/ns/net", *cable], check=True)
        yield started
    finally:
        for machine in started:
            machine.kill()
            machine.wait()


def test_gloo_meets_on_the_interface_that_reaches_the_chief(machines: list[subprocess.Popen[str]]) -> None:
    for machine in machines:
        assert machine.stdin is not None
        machine.stdin.write("go\n")
        machine.stdin.flush()
    for machine in machines:
        said, _ = machine.communicate(timeout=120)
        assert "sum 3.0 ranks [0, 1] machines 2" in said
        assert machine.returncode == 0, said


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
