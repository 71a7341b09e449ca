"""``launch/slurm.sbatch``, with stand-ins for ``srun`` and ``scontrol`` that do as SLURM does: real ranks train."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.own_runs import LENGTH, OWN_MODEL, result, steps
from tests.harness.ranks import ROOT
from tests.rundir.runs import until

TIMEOUT_S = 300.0  # a guard against hangs
SRUN = """#!/bin/bash
# Two machines of one task each. Ends with the largest exit code, as srun does.
while [[ $1 == -* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=0
pids=()
for task in 0 1; do
    SLURM_PROCID=$task SLURM_NODEID=$task "$@" &
    pids+=($!)
done
echo "${pids[@]}" > "$TASKS"
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$(( $? > worst ? $? : worst )); done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [[ "$1 $2" == "show hostnames" ]]; then
    [[ "$3" == 'node[1-2]' ]] && printf '127.0.0.1\\n127.0.0.1\\n'
else
    echo "$@" >> "$ASKED"
fi
"""


class Slurm:
    """A job of two tasks, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.tasks, self.asked = folder / "run", folder / "tasks", folder / "asked"
        self.asked.touch()
        (folder / "bin").mkdir()
        for name, script in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (folder / "bin" / name).write_text(script)
            (folder / "bin" / name).chmod(0o755)
        path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        job = {"JOB_ID": str(os.getpid()), "JOB_NAME": "test", "JOB_NODELIST": "node[1-2]"}
        job |= {"NTASKS": "2", "NNODES": "2", "CPUS_PER_TASK": "1"}
        own = {"PATH": path, "TASKS": self.tasks, "ASKED": self.asked, "RUN_DIR": self.run_dir}
        own |= {"CONFIG": "experiment.yaml", "GLOO_SOCKET_IFNAME": "lo"}  # both machines are this one
        own |= {f"SLURM_{name}": value for name, value in job.items()}
        self._environment = {**os.environ, **{name: str(value) for name, value in own.items()}}

    def start(self, max_length: int) -> subprocess.Popen[str]:
        """What SLURM does when the job's turn has come, with the same script at each turn."""
        return subprocess.Popen(
            ["bash", ROOT / "launch/slurm.sbatch", "--set", f"{LENGTH}={max_length}", "--accelerator", "cpu"],
            cwd=OWN_MODEL,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.programs
@pytest.mark.long("a job twice; a shorter one stays, and test_stopping has signals")
def test_a_job_that_is_signalled_checkpoints_is_requeued_and_goes_on_to_its_end(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    first, metrics = slurm.start(max_length=1_000_000), slurm.run_dir / "metrics.jsonl"
    until(lambda: (metrics.exists() and metrics.read_text()) or first.poll() is not None)
    for pid in slurm.tasks.read_text().split():  # as --signal=USR1@300: neither the script nor srun
        os.kill(int(pid), signal.SIGUSR1)
    said, _ = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0, said
    assert "nothing in the run directory to resume; starting from step 0" in said
    assert "launcher   srun: 2 ranks on 2 machines" in said
    assert result(slurm.run_dir)["status"] == "stopped"
    trained = result(slurm.run_dir)["steps_completed"]

    again = slurm.start(max_length=trained + 3)
    said, _ = again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 0, said
    assert f"resume     batch {trained}, checkpoint" in said
    assert steps(slurm.run_dir) == list(range(1, trained + 4))
    assert result(slurm.run_dir)["status"] == "completed"
    assert slurm.asked.read_text().splitlines() == [f"requeue {os.getpid()}"]


@pytest.mark.programs
def test_what_cannot_run_is_said_once_and_ends_every_task_with_2(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    refused = slurm.start(max_length=0)
    said, _ = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 2
    assert said.count("error: ") == 1
    assert not slurm.run_dir.exists()
    assert slurm.asked.read_text() == ""
