"""Under DeepSpeed's runner every variable and argument reaches every rank as it is, and none of them any log."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from determined_ds.launch.deepspeed import keep
from tests.command import ROOT, TIMEOUT_S
from tests.launch.test_trial_process import until
from tests.machines import Machine
from tests.ranks import free_port

BIN = Path(sys.executable).parent
ODD = {
    "ODD_QUOTES": """it's "quoted" and \\ and \\" and ''""",
    "ODD_DOLLARS": "$HOME $$ ${PATH} $(id) `id` !!",
    "ODD_PARENTHESES": "a description (of 50 %n %h %u), [x] {y} <z> | ; & # * ?",
    "ODD_LINES": "one\\ntwo\n  three = 3\n\n",
    "ODD_SPACES": "  leading, trailing\t ",
    "ODD_LETTERS": "naïve Größe 日本 🙂",
    "NCCL_SOCKET_IFNAME": "^docker0,lo",
    "MLFLOW_TRACKING_URI": "http://me:pa$$word@host/(x)",
    "PYTHONWARNINGS": 'ignore:"$(x)"',
    "ODD_EMPTY": "",
}
SECRET = "secret-token-5f1b"
# It ends when all ranks have come as far: Determined's launcher gives the others 5 seconds from there.
SCRIPT = """import json, os, sys, time
path = f"{sys.argv[1]}/{os.environ['RANK']}.json"
with open(path + ".part", "w") as file:
    json.dump([dict(os.environ), sys.argv[2:]], file)
os.rename(path + ".part", path)
while not all(os.path.exists(f"{sys.argv[1]}/{rank}.json") for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.05)
"""
ARGUMENTS = ["a b", "$HOME", '"', "'", "(x)", "%n", "50%", "", "`id`", "\\", "naïve"]


def what_ranks_got(folder: Path, size: int) -> list[dict[str, str]]:
    """The environment of each; all have the arguments as they were."""
    got = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    assert [arguments for _, arguments in got] == [ARGUMENTS] * size
    for environment, _ in got:
        assert {name: environment.get(name) for name in ODD} == ODD
        assert environment["DET_SESSION_TOKEN"] == SECRET
        assert environment["USE_DEEPSPEED"] == "1"
    return [environment for environment, _ in got]


# ------------------------------------------------------------------------------- the runner, without machines

# What pdsh does with a command: each host has it with its own number, and a shell there reads it.
PDSH = """#!{python}
import subprocess, sys
words = sys.argv[1:]
hosts = words[words.index("-w") + 1].split(",")
command = " ".join(words[words.index("-w") + 2 :])
assert all(name not in command for name in ("ODD_", "MLFLOW")), command
ended = []
for number, host in enumerate(hosts):
    here = command.replace("%n", str(number)).replace("%h", host).replace("%u", "nobody")
    ended.append(subprocess.Popen(["env", "-i", "/bin/bash", "-c", here]))
sys.exit(max(process.wait() for process in ended))
"""


@pytest.mark.programs
def test_through_deepspeeds_runner_and_a_shell(tmp_path: Path) -> None:
    """Everywhere: in place of pdsh stands a script that hands the command to one shell for each host."""
    (tmp_path / "bin").mkdir()
    pdsh = tmp_path / "bin" / "pdsh"
    pdsh.write_text(PDSH.format(python=sys.executable))
    pdsh.chmod(0o755)
    (tmp_path / "hostfile").write_text("first slots=1\nsecond slots=1\n")
    kept = tmp_path / "kept.json"
    path = f"{pdsh.parent}:{BIN}:/usr/bin:/bin"
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "DET_SESSION_TOKEN": SECRET, **ODD}
    keep(kept, environment, [sys.executable, "-c", SCRIPT, str(tmp_path), *ARGUMENTS])
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert not {"MLFLOW_TRACKING_URI", "NCCL_SOCKET_IFNAME", "PYTHONWARNINGS"} & set(environment)
    done = subprocess.run(
        [
            *(BIN / "deepspeed", "-H", tmp_path / "hostfile", "--master_addr", "127.0.0.1", "--no_ssh_check"),
            *("--no_python", "--no_local_rank", "--"),
            *(sys.executable, "-m", "determined_ds.launch.deepspeed", "--rank", kept),
        ],
        cwd=tmp_path,
        env={**environment, "DS_ACCELERATOR": "cpu", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = what_ranks_got(tmp_path, 2)
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["CROSS_RANK"]) for rank in ranks] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
    ]
    assert "cmd = pdsh" in done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "pa$$word" not in done.stdout + done.stderr


# ------------------------------------------------------------------------------- Determined's launcher, two machines

MASTER = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Master(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
server = HTTPServer(("ADDRESS", 0), Master)
print(server.server_port, flush=True)
server.serve_forever()
"""
SLOTS = [1, 2]


@pytest.mark.long("pdsh and sshd between two machines; the test above has DeepSpeed's runner and a shell")
def test_through_determineds_launcher_pdsh_and_sshd(machines: tuple[Machine, Machine]) -> None:
    """Ranks are laid out machine by machine, and each has the environment of its own machine's container."""
    missing = [name for name in ("pdsh", "ssh", "ssh-keygen") if not shutil.which(name)]
    if missing or not Path("/usr/sbin/sshd").exists():
        pytest.skip(
            f"needs Debian's pdsh, openssh-client and openssh-server: there is no {missing or 'sshd'}"
        )
    shared = machines[0].shared
    master = machines[0].start([sys.executable, "-c", MASTER.replace("ADDRESS", machines[0].address)])
    assert master.stdout is not None
    url = f"http://{machines[0].address}:{master.stdout.readline().strip()}"
    entrypoint = [
        "-m",
        "determined_ds.launch.deepspeed",
        sys.executable,
        "-c",
        SCRIPT,
        str(shared),
        *ARGUMENTS,
    ]
    ssh_port = str(free_port())
    containers = []
    for number, machine in enumerate(machines):
        prepare(machine, number, machines, url)
        environment = {
            **ODD,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "DS_ACCELERATOR": "cpu",
            "DTRAIN_SSH_PORT": ssh_port,
            "DET_RESOURCES_ID": f"container-{number}",
            "DET_AGENT_ID": f"agent-{number}",
            "DET_SESSION_TOKEN": SECRET,
            "DET_USER": "me",
            "DET_MASTER": url,
        }
        command = [sys.executable, *entrypoint]
        output = shared / f"log{number}.txt"
        containers.append(machine.start(command, cwd=shared, env=environment, output=output))

    def all_are_there() -> bool:
        """Determined ends the launcher 5 seconds after the first machine's ranks: its exit code says nothing."""
        there = len(list(shared.glob("*.json"))) == 3
        assert there or None in [container.poll() for container in containers], logs()
        return there

    def logs() -> str:
        return "".join((shared / f"log{number}.txt").read_text() for number in (0, 1))

    until(all_are_there)
    ranks = what_ranks_got(shared, 3)
    names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "WORLD_SIZE", "DET_AGENT_ID")
    assert [tuple(rank[name] for name in names) for rank in ranks] == [
        ("0", "0", "1", "0", "2", "3", "agent-0"),
        ("1", "1", "2", "1", "2", "3", "agent-1"),  # DeepSpeed's local rank is the rank modulo the slots
        ("2", "0", "2", "1", "2", "3", "agent-1"),
    ]
    assert "cmd = pdsh" in logs()
    assert SECRET not in logs()
    assert "pa$$word" not in logs()


def prepare(machine: Machine, number: int, machines: tuple[Machine, Machine], url: str) -> None:
    """What Determined's agent and prep_container leave in a container: keys, sshd's configuration, and who is who."""
    run = machine.shared.parent / machine.name / "run" / "determined"
    (run / "ssh").mkdir(parents=True)
    (run / "info").mkdir()
    key = machine.shared / "key"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    for name, content in {
        "id": key.read_text(),
        "authorized_keys": key.with_suffix(".pub").read_text(),
        "sshd_config": "HostKey /run/determined/ssh/id\nAuthorizedKeysFile /run/determined/ssh/authorized_keys\n"
        "StrictModes no\nPidFile none\nPermitRootLogin yes\n",
        "ssh_config": "Host *\n  IdentityFile /run/determined/ssh/id\n  UserKnownHostsFile /dev/null\n",
    }.items():
        (run / "ssh" / name).write_text(content)
        (run / "ssh" / name).chmod(0o600)
    done = machine.run(["mount", "--bind", "/run/determined/ssh/ssh_config", "/etc/ssh/ssh_config"])
    assert done.returncode == 0, done.stdout
    (run / "ssh" / "ssh_config").chmod(0o644)
    info: dict[str, dict[str, Any]] = {
        "rendezvous": {
            "container_addrs": [each.address for each in machines],
            "container_slot_counts": SLOTS,
            "container_rank": number,
        },
        "trial": {
            "trial_id": 1,
            "experiment_id": 1,
            "trial_seed": 1,
            "trial_run_id": 1,
            "steps_completed": 0,
            "hparams": {},
            "config": {},
            "debug": False,
            "inter_node_network_interface": None,
        },
        "resources": {"gpu_uuids": []},
        "cluster": {
            "master_url": url,
            "cluster_id": "c",
            "agent_id": f"agent-{number}",
            "task_id": "t",
            "slot_ids": list(range(SLOTS[number])),
            "allocation_id": "a",
            "session_token": SECRET,
            "task_type": "TRIAL",
            "master_cert_name": None,
            "master_cert_file": None,
            "latest_checkpoint": None,
        },
    }
    for name, content in info.items():
        (run / "info" / f"{name}.json").write_text(json.dumps(content))
