"""Where the ranks on a cluster meet: at the allocation's port, on an interface that reaches the other machines."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

# The port of DeepSpeed's launcher without --master_port.
# Source: ``TORCH_DISTRIBUTED_DEFAULT_PORT`` in deepspeed 0.19.8's ``deepspeed/constants.py``.
DEEPSPEEDS_PORT = "29500"


def take_own_port() -> None:
    """Meet at the port that the master gave this allocation, instead of DeepSpeed's default, which all runs share.

    Two trials on one machine with host networking would both bind the default. ``C10D_PORT`` is unique in a cluster
    and the same on every machine of an allocation. A port that was set explicitly stays, and so does that of torchrun,
    whose ranks are clients of an existing store.

    Source: ``getPorts`` in determined 0.38.1's ``master/internal/task/allocation.go``; ``_create_c10d_store`` in
    torch 2.13's ``torch/distributed/rendezvous.py``.
    """
    own = os.environ.get("C10D_PORT")
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if own and not is_there and os.environ.get("MASTER_PORT") == DEEPSPEEDS_PORT:
        os.environ["MASTER_PORT"] = own


def take_interfaces() -> None:
    """Have gloo use the interface that reaches the chief, unless ``GLOO_SOCKET_IFNAME`` names one.

    By default gloo takes the interface of the host name's address, which in many images is 127.0.0.1 on every machine.
    The cluster's ``dtrain_network_interface`` comes first, where this machine has it. NCCL finds its interface itself,
    but is given that of the cluster too, under any launcher.

    Source: ``main`` in determined 0.38.1's ``launch/deepspeed.py``, which hands it to NCCL; that of
    ``launch/torch_distributed.py`` does not.
    """
    of_cluster = os.environ.get("DET_INTER_NODE_NETWORK_INTERFACE", "")
    if of_cluster and not os.environ.get("NCCL_SOCKET_IFNAME"):
        os.environ["NCCL_SOCKET_IFNAME"] = of_cluster
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    is_one = of_cluster in (name for _, name in socket.if_nameindex())
    interface = of_cluster if is_one else interface_to(os.environ.get("MASTER_ADDR", ""))
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interface_to(host: str) -> str | None:
    """The interface whose address reaches a host; None where only this machine is reached.

    A machine reaches its own address from that address, so this works on the chief, too.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []
    except OSError:
        return None
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # UDP: nothing is sent
                source = probe.getsockname()[0].partition("%")[0]
        except OSError:  # no route
            continue
        if ipaddress.ip_address(source).is_loopback:
            continue
        for name, addresses in psutil.net_if_addrs().items():
            if any(own.address.partition("%")[0] == source for own in addresses):
                return str(name)
    return None
