"""``--hostfile``: refused before a machine is asked, or started by DeepSpeed's own launcher and a stand-in of pdsh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import ConfigError
from determined_ds.launch.external.hostfile import read_hostfile
from tests.cli.conftest import OWN_MODEL

TIMEOUT_S = 300.0  # a guard against hangs
# pdsh joins its words, puts the number of the machine in, and has a shell of each machine run what comes out.
PDSH = """#!/bin/bash
while getopts 'Sf:w:' option; do [[ $option == w ]] && IFS=, read -ra hosts <<< "$OPTARG"; done
shift $((OPTIND - 1))
pids=()
for number in "${!hosts[@]}"; do
    sh -c "$(sed "s/%n/$number/g" <<< "$*")" &
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$(( $? > worst ? $? : worst )); done
exit $worst
"""
SSH = """#!/bin/bash
echo 127.0.0.1
"""


def test_what_deepspeeds_launcher_would_refuse_is_refused_with_every_line(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# two good ones\n\nnode1 slots=8\nnode2   slots=4 max_slots=8\n")
    assert read_hostfile(hosts) == {"node1": 8, "node2": 4}
    hosts.write_text("node1\nnode2 slots=8\nnode2 slots=8\nnode3 slots=0\nnode4 slots = 2\n")
    with pytest.raises(ConfigError) as refused:
        read_hostfile(hosts)
    assert [str(problem.origin) for problem in refused.value.problems] == [
        f"{hosts}:{n}" for n in (1, 3, 4, 5)
    ]
    hosts.write_text("# node1 slots=8\n")
    with pytest.raises(ConfigError, match="names no machine"):
        read_hostfile(hosts)


def test_slots_that_are_not_the_experiments_are_refused_with_both(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=8\nnode2 slots=8\n")
    words = ["run", str(OWN_MODEL / "experiment.yaml"), str(OWN_MODEL), "--hostfile", str(hosts)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "resources.slots_per_trial = 2" in done.stderr
    assert "has 16 slots on 2 machines" in done.stderr
    assert "add --slots 16" in done.stderr


@pytest.mark.long("DeepSpeed's runner; launch/test_deepspeed starts it too")
def test_deepspeeds_launcher_starts_the_ranks_with_every_argument_as_it_was_given(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, script in {"pdsh": PDSH, "ssh": SSH}.items():
        (binaries / name).write_text(script)
        (binaries / name).chmod(0o755)
    model = shutil.copytree(OWN_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__"))
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=1\nnode2 slots=1\n")
    description = """it's "one" $HOME `id` (of\ntwo); %h 100%\\"""
    sets = {
        "description": json.dumps(description),
        "hyperparameters.fit.max_length.batches": "2",
        "environment.environment_variables": '["GLOO_SOCKET_IFNAME=lo"]',  # both machines are this one
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    words += ["--hostfile", str(hosts), "--run-dir", "a run", "--accelerator", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "determined_ds.cli", "run", "experiment.yaml", ".", *words],
        cwd=model,
        env={**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "launcher   deepspeed: 2 ranks on 2 machines" in done.stdout
    ran = yaml.safe_load((model / "a run" / "experiment.yaml").read_text())
    assert ran["description"] == description
    result = json.loads((model / "a run" / "result.json").read_text())
    assert (result["status"], result["steps_completed"]) == ("completed", 2)


def test_a_rank_of_deepspeeds_launcher_is_given_its_local_rank_too() -> None:
    done = CliRunner().invoke(main, ["run", "--local_rank=1", "no such file.yaml"])
    assert "no such file" in done.stderr
    assert "local" not in done.stderr
