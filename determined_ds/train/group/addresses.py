"""Where the ranks on a cluster meet: at the allocation's port, on an interface that reaches the other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

import psutil

# The port of DeepSpeed's launcher without --master_port.
# Source: ``TORCH_DISTRIBUTED_DEFAULT_PORT`` in deepspeed 0.19.8's ``deepspeed/constants.py``.
DEEPSPEEDS_PORT = "29500"


def take_addresses() -> None:
    """Have this rank meet the others at the allocation's own port, by an interface that reaches them.

    Source: ``getPorts`` in determined 0.38.1's ``master/internal/task/allocation.go``; ``_create_c10d_store`` in torch
    2.13's ``torch/distributed/rendezvous.py``; ``main`` in determined's ``launch/deepspeed.py``.
    """
    # Two trials on one machine with host networking would both bind DeepSpeed's default. ``C10D_PORT`` is unique in a
    # cluster. A port that was set explicitly stays, and that of torchrun, whose ranks are clients of its store.
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if "C10D_PORT" in os.environ and not is_there and os.environ.get("MASTER_PORT") == DEEPSPEEDS_PORT:
        os.environ["MASTER_PORT"] = os.environ["C10D_PORT"]
    # By default gloo takes the interface of the host name's address, in many images 127.0.0.1 on every machine. The
    # cluster's ``dtrain_network_interface`` comes first, where this machine has it, else the one that reaches the
    # chief. NCCL finds its interface itself, but is given that of the cluster too, under any launcher.
    interface: str | None = os.environ.get("DET_INTER_NODE_NETWORK_INTERFACE", "")
    if interface and not os.environ.get("NCCL_SOCKET_IFNAME"):
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    if interface not in psutil.net_if_addrs():
        interface = interface_to(os.environ.get("MASTER_ADDR", ""))
    if interface and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interface_to(host: str) -> str | None:
    """The interface whose address reaches a host, on that host too; None where only this machine is reached."""
    with contextlib.suppress(OSError):  # an unknown host, or no route
        for family, kind, _, _, to in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(to)  # UDP: nothing is sent
                source = probe.getsockname()[0].partition("%")[0]
                for name, addresses in psutil.net_if_addrs().items():
                    own = (each.address.partition("%")[0] for each in addresses)
                    if source in own and not ipaddress.ip_address(source).is_loopback:
                        return str(name)
    return None
