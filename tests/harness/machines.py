"""Machines on this one: network namespaces with a cable each, joined by a switch in the first.

Each has its own network, loopback included, its own processes, host name, ``/etc/hosts``, ``/tmp``, ``/run`` and
``/dev/shm``; all other folders, and the ``shared`` one, are those of this machine. Its host name resolves to 127.0.1.1
on itself, as on Debian, and to its address on the others. Nothing outside reaches them, and they reach nothing outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.command import ROOT, TIMEOUT_S

NETWORK = "10.77.0"
# The first process of a machine: all others end with it, and it ends with the tests.
MACHINE = """
set -eu
own=$1 name=$2
shift 2
for seen in "$@"; do
    mkdir -p "$own$seen"
    mount --rbind "$seen" "$own$seen"
done
mount -t tmpfs none /dev/shm
mount --bind "$own/hosts" /etc/hosts
mount --bind "$own/hostname" /etc/hostname
mount --bind "$own/resolv.conf" /etc/resolv.conf
mount --rbind "$own/run" /run
mount --rbind "$own/tmp" /tmp
hostname "$name"
ip link set lo up
echo ready
read -r _ || true
"""
NAMESPACES = ("--net", "--mount", "--uts", "--pid")
NEEDED = ("unshare", "nsenter", "ip", "mount", "hostname")
# Folders that a machine or a container has for itself; and those that the Python which runs this needs.
HIDDEN = ("/run/", "/tmp/")
PYTHON = {os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), sys.prefix}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of them; ``shared`` is the folder that all see, ``init`` the id of its first process, ``eth0`` its cable."""

    name: str
    address: str
    shared: Path
    init: int

    def start(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on it; its output goes to a file, or to a pipe."""
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        environment |= {"OMP_NUM_THREADS": "1", "HOSTNAME": self.name, **(env or {})}
        with contextlib.ExitStack() as stack:
            stdout = subprocess.PIPE if output is None else stack.enter_context(output.open("w"))
            return subprocess.Popen(
                ["nsenter", f"--target={self.init}", *NAMESPACES, f"--wd={cwd}", "--", *map(str, command)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )

    def run(self, command: Sequence[str | Path], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on it to its end; ``stdout`` has its stderr, too."""
        process = self.start(command, **how)
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, said)

    def cut(self) -> None:
        """Pull the cable out: what either side sends from now on is lost, and neither is told."""
        assert self.run(["ip", "link", "set", "eth0", "down"]).returncode == 0

    def end(self) -> None:
        """All that runs on it ends at once, as when its power is gone."""
        os.kill(self.init, signal.SIGKILL)


def why_no_machines() -> str | None:
    """Why no machine can be had here, in a sentence; None where one can."""
    missing = [name for name in NEEDED if not shutil.which(name)]
    if missing or not sys.platform.startswith("linux"):
        return f"machines of network namespaces need {', '.join(missing) or 'Linux'}"
    if os.geteuid() != 0:
        return "machines of network namespaces need root"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    return f"no network namespace can be had: {probe.stderr.strip()}" if probe.returncode else None


@contextlib.contextmanager
def joined_machines(folder: Path, count: int = 2) -> Iterator[tuple[Machine, ...]]:
    """Start machines, and end them with all that runs on them; the empty folder is for what is theirs."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(_machine(folder, number, count)) for number in range(count)]
        steps = ["link add eth0 type bridge"]
        for number, machine in enumerate(found[1:], 1):
            steps.append(f"link add to{number} type veth peer name eth0 netns {machine.init}")
            steps += [f"link set to{number} master eth0", f"link set to{number} up"]
        for words in steps:  # seen from here, where the process ids of all are known
            in_first = ["nsenter", f"--net=/proc/{found[0].init}/ns/net", "ip", *words.split()]
            subprocess.run(in_first, check=True)
        for machine in found:
            for words in (f"address add {machine.address}/24 dev eth0", "link set eth0 up"):
                done = machine.run(["ip", *words.split()])
                assert done.returncode == 0, done.stdout
        yield tuple(found)


@contextlib.contextmanager
def _machine(folder: Path, number: int, count: int) -> Iterator[Machine]:
    name, shared = f"machine{number}", folder / "shared"
    own = folder / name
    for made in (shared, own / "tmp", own / "run" / "lock", own / "run" / "sshd"):
        made.mkdir(parents=True, exist_ok=True)
    (own / "tmp").chmod(0o1777)
    (own / "hostname").write_text(f"{name}\n")
    (own / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody answers there, and at once
    others = "".join(f"{NETWORK}.{each + 1} machine{each}\n" for each in range(count) if each != number)
    (own / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
    seen = {str(shared), str(ROOT), *PYTHON}
    words = [str(own), name, *sorted(path for path in seen if path.startswith(HIDDEN))]
    namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.Popen(
        ["unshare", *namespaces, "bash", "-c", MACHINE, "machine", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said == "ready\n", said + process.stdout.read()
        init = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        yield Machine(name=name, address=f"{NETWORK}.{number + 1}", shared=shared, init=init)
    finally:
        process.kill()
        process.communicate()
