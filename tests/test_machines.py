"""Machines of tests are as apart as machines are."""

from __future__ import annotations

import os
import sys

from tests.machines import Machine

LOOK = """
import socket, pathlib, sys
own, other, shared = sys.argv[1:]
print(socket.gethostname(), socket.gethostbyname(own), socket.gethostbyname(other))
print(*sorted(path.name for path in pathlib.Path("/tmp").iterdir()), *pathlib.Path("/dev/shm").iterdir())
pathlib.Path("/tmp", own).touch()
pathlib.Path(shared, own).touch()
"""
CONNECT = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
"""
LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    server.accept()
"""


def test_each_has_its_name_its_addresses_and_its_folders(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    for own, other in ((first, second), (second, first)):
        for _ in range(2):
            done = own.run([sys.executable, "-c", LOOK, own.name, other.name, own.shared])
            assert done.returncode == 0, done.stdout
        named, files = done.stdout.splitlines()
        assert named == f"{own.name} 127.0.1.1 {other.address}"
        assert own.name in files
        assert other.name not in files
    assert {path.name for path in first.shared.iterdir()} == {"machine0", "machine1"}
    assert os.uname().nodename not in (first.name, second.name)


def test_they_meet_until_the_cable_is_cut_or_one_of_them_dies(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    server = first.start([sys.executable, "-c", LISTEN, first.address])
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    assert second.run([sys.executable, "-c", CONNECT, first.address, port, "60"]).returncode == 0
    first.cut()
    assert second.run([sys.executable, "-c", CONNECT, first.address, port, "0.2"]).returncode != 0
    assert server.poll() is None
    first.die()
    assert server.wait(60) != 0
