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


def started(folder: Path, max_length: int) -> subprocess.Popen[str]:
    """What SLURM does when the turn of a job of two tasks has come, with the same script at each turn."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, script in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"JOB_ID": str(os.getpid()), "JOB_NAME": "test", "JOB_NODELIST": "node[1-2]"}
    job |= {"NTASKS": "2", "NNODES": "2", "CPUS_PER_TASK": "1"}
    own = {"PATH": path, "TASKS": folder / "tasks", "ASKED": folder / "asked", "RUN_DIR": folder / "run"}
    own |= {"CONFIG": "experiment.yaml", "GLOO_SOCKET_IFNAME": "lo"}  # both machines are this one
    own |= {f"SLURM_{name}": value for name, value in job.items()}
    return subprocess.Popen(
        ["bash", ROOT / "launch/slurm.sbatch", "--set", f"{LENGTH}={max_length}", "--accelerator", "cpu"],
        cwd=OWN_MODEL,
        env={**os.environ, **{name: str(value) for name, value in own.items()}},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.programs
@pytest.mark.long("a job twice; a shorter one stays, and test_stopping has signals")
def test_a_job_that_is_signalled_checkpoints_is_requeued_and_goes_on_to_its_end(tmp_path: Path) -> None:
    run_dir, first = tmp_path / "run", started(tmp_path, max_length=1_000_000)
    metrics = run_dir / "metrics.jsonl"
    until(lambda: (metrics.exists() and metrics.read_text()) or first.poll() is not None)
    for pid in (tmp_path / "tasks").read_text().split():  # as --signal=USR1@300: neither the script nor srun
        os.kill(int(pid), signal.SIGUSR1)
    said, _ = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0, said
    assert "nothing in the run directory to resume; starting from step 0" in said
    assert "launcher   srun: 2 ranks on 2 machines" in said
    assert result(run_dir)["status"] == "stopped"
    trained = result(run_dir)["steps_completed"]

    again = started(tmp_path, max_length=trained + 3)
    said, _ = again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 0, said
    assert f"resume     batch {trained}, checkpoint" in said
    assert steps(run_dir) == list(range(1, trained + 4))
    assert result(run_dir)["status"] == "completed"
    assert (tmp_path / "asked").read_text().splitlines() == [f"requeue {os.getpid()}"]


@pytest.mark.programs
def test_what_cannot_run_is_said_once_and_ends_every_task_with_2(tmp_path: Path) -> None:
    refused = started(tmp_path, max_length=0)
    said, _ = refused.communicate(timeout=TIMEOUT_S)
    assert refused.returncode == 2
    assert said.count("error: ") == 1
    assert not {tmp_path / "run", tmp_path / "asked"} & {*tmp_path.iterdir()}
