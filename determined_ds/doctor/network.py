"""The interfaces that NCCL and gloo will take."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

import psutil

from determined_ds.doctor.diagnosis import MISSING, OK, WARNING, Diagnosis, diagnosis
from determined_ds.doctor.surroundings import Host
from determined_ds.train.group.addresses import interface_to

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# An unused address, of a block for documentation (RFC 5737): a route to it is the default route.
ANYWHERE = "192.0.2.1"


def check_network(host: Host) -> Iterator[Diagnosis]:
    """The interface to the other machines, and whether the variables name existing ones."""
    up = sorted(name for name, stats in psutil.net_if_stats().items() if stats.isup)
    master = urllib.parse.urlsplit(host.variable("DET_MASTER")).hostname or ""
    peer = host.variable("MASTER_ADDR") or master or ANYWHERE
    route = interface_to(peer)
    if route is None:
        to = "other machines" if peer == ANYWHERE else peer
        others = ", ".join(name for name in up if name != "lo") or "none but the loopback"
        needed = "for several machines, an interface that reaches the others; one machine needs none"
        fix = "for several machines: host networking, or a network of them"
        state = WARNING if peer in (ANYWHERE, master) else OK
        yield diagnosis("network", state, f"no route to {to}; interfaces: {others}", needed, fix)
    else:
        to = "other machines" if peer == ANYWHERE else peer
        yield Diagnosis("network", OK, f"{route} reaches {to}; interfaces: {', '.join(up)}")
    if GLOO in host.environment:
        yield _named(GLOO, host.variable(GLOO), [host.variable(GLOO)], up)
    if NCCL in host.environment:
        yield _named(NCCL, host.variable(NCCL), _of_nccl(host.variable(NCCL), up), up)


def _of_nccl(value: str, up: list[str]) -> list[str]:
    """The interfaces that are meant: prefixes, exact names after ``=``, all but those after ``^``.

    Source: NCCL's documentation of the variable.
    """
    names = value.lstrip("^=").split(",")
    exact = "=" in value[:2]
    chosen = [name for name in up if any(name == each if exact else name.startswith(each) for each in names)]
    return [name for name in up if name not in chosen] if value.startswith("^") else chosen


def _named(variable: str, value: str, names: list[str], up: list[str]) -> Diagnosis:
    there = [name for name in names if name in up]
    if there:
        return Diagnosis(variable, OK, f"{value}: {', '.join(there)}")
    fix = f"unset {variable}, or name one of {', '.join(up)}"
    return Diagnosis(variable, MISSING, value, "an interface of this machine that is up", fix)
