"""The interfaces that NCCL and gloo will take."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

import psutil

from determined_ds.doctor.finding import MISSING, OK, WARNING, Finding
from determined_ds.doctor.machine import Machine
from determined_ds.runtime.group.addresses import interface_to

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# Nobody's address, of a block for documentation (RFC 5737): a route to it is the one to anywhere.
ANYWHERE = "192.0.2.1"


def look_at_network(machine: Machine) -> Iterator[Finding]:
    """The interface to the other machines, and whether the variables name some that there are."""
    up = sorted(name for name, stats in psutil.net_if_stats().items() if stats.isup)
    master = urllib.parse.urlsplit(machine.variable("DET_MASTER")).hostname or ""
    peer = machine.variable("MASTER_ADDR") or master or ANYWHERE
    route = interface_to(peer)
    to = "other machines" if peer == ANYWHERE else peer
    if route is None:
        others = [name for name in up if name != "lo"]
        yield Finding(
            name="network",
            state=OK if peer not in (ANYWHERE, master) else WARNING,
            found=f"no route to {to}; interfaces: {', '.join(others) or 'none but the loopback'}",
            needed="for several machines, an interface that reaches the others; one machine needs none",
            fix=""
            if peer not in (ANYWHERE, master)
            else "for several machines: host networking, or a network of them",
        )
    else:
        yield Finding(name="network", state=OK, found=f"{route} reaches {to}; interfaces: {', '.join(up)}")
    if GLOO in machine.environment:
        yield _named(GLOO, machine.variable(GLOO), [machine.variable(GLOO)], up)
    if NCCL in machine.environment:
        yield _named(NCCL, machine.variable(NCCL), _of_nccl(machine.variable(NCCL), up), up)


def _of_nccl(said: str, up: list[str]) -> list[str]:
    """The interfaces that are meant: prefixes, the very names after ``=``, all but those after ``^``.

    Source: NCCL's documentation of the variable.
    """
    names = said.lstrip("^=").split(",")
    exact = "=" in said[:2]
    chosen = [name for name in up if any(name == each if exact else name.startswith(each) for each in names)]
    return [name for name in up if name not in chosen] if said.startswith("^") else chosen


def _named(variable: str, said: str, names: list[str], up: list[str]) -> Finding:
    there = [name for name in names if name in up]
    if there:
        return Finding(name=variable, state=OK, found=f"{said}: {', '.join(there)}")
    fix = f"unset {variable}, or name one of {', '.join(up)}"
    return Finding(
        name=variable, state=MISSING, found=said, needed="an interface that is here and up", fix=fix
    )
