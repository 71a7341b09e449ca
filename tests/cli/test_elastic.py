"""Runs that continue on other ranks: by ``--slots`` and another strategy, and on the machine that torchrun has left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.cli.own_runs import LENGTH, LOSS, edit, losses, run, steps
from tests.harness.ranks import ROOT, free_port
from tests.package import checkpoints, reseal

# The agent of rank 1 is killed, and its rank dies with it, whenever that comes to the fourth batch: another start
# does not help. The agent is the parent of the process that a rank is survived by.
DIES = """
        import os, pathlib, signal
        if self.context._current_batch_idx == 3 and model.training and self.context.distributed.rank == 1:
            status = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGKILL)
"""


def test_an_optimizer_of_another_kind_begins_anew(copied: Path) -> None:
    """Refused without the option; with it, the weights and the batch count stay."""
    context, there = copied / "own_model", copied / "run"
    edit(context / "ds.json", "AdamW", "Adagrad")
    refused = run(context, there, "--resume", sets=[f"{LENGTH}=8"])
    assert refused.returncode == 2
    assert "deepspeed.optimizer.type" in refused.stderr
    assert "--reset-optimizer" in refused.stderr
    done = run(context, there, "--resume", "--reset-optimizer", sets=[f"{LENGTH}=8"])
    assert done.returncode == 0, done.stderr
    assert "  optimizer  its state begins anew" in done.stdout
    assert steps(there) == list(range(1, 9))


def test_a_checkpoint_without_an_index_is_not_resumed_on_other_slots(copied: Path) -> None:
    """As older versions wrote them."""
    for path in checkpoints(copied / "run"):
        (path / "model0" / "index.json").unlink()
        reseal(path)
    refused = run(copied / "own_model", copied / "run", "--resume", "--slots", "4", sets=[f"{LENGTH}=8"])
    assert refused.returncode == 2
    assert "resources.slots_per_trial = 4 (--slots)" in refused.stderr
    assert "was 2 when checkpoint" in refused.stderr
    assert "go back to 2, or start anew" in refused.stderr
    assert steps(copied / "run") == list(range(1, 7))


@pytest.mark.programs
@pytest.mark.long(
    "torchrun waits for the machine that is gone; by --slots other ranks continue in the tests above"
)
def test_under_torchrun_the_machine_that_is_left_continues(
    own_model: Path, trained: Path, tmp_path: Path
) -> None:
    """Two of its agents with a rank each, of which one is killed with its rank in the fourth batch."""
    edit(own_model / "trial.py", LOSS, DIES + LOSS)
    words = ["torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3"]
    # Outlives either of them.
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{store.port}"]
    words += ["--rdzv_conf", "last_call_timeout=5,is_host=0,keep_alive_interval=1"]
    words += [
        "--local_addr",
        "127.0.0.1",
        "-m",
        "determined_ds.cli",
        "run",
        str(own_model / "experiment.yaml"),
        str(own_model),
        "--accelerator",
        "cpu",
    ]
    command = [sys.executable, "-m", *words, "--run-dir", str(tmp_path / "run"), "--resume"]
    agents = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [agent.communicate(timeout=200)[0] for agent in agents]
    assert sorted(agent.returncode for agent in agents) == [-9, 0], said
    assert any("resources.slots_per_trial: 2 -> 1" in each for each in said)
    assert losses(tmp_path / "run") == pytest.approx(losses(trained / "run"), rel=1e-6)
    assert json.loads((tmp_path / "run/result.json").read_text())["slots"] == 1
