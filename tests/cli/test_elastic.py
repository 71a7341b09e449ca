"""Runs that continue on other ranks: by ``--slots`` and another strategy, and without a rank that is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import det_ds
from tests.ranks import ROOT, free_port

LENGTH = "hyperparameters.fit.max_length.batches"
CHECKPOINTS = "hyperparameters.fit.checkpoint_period.batches"
REPORTS = "hyperparameters.fit.reporting_period.batches"
STAGE = "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage"
PLACE = "        inputs_B4, targets_B1 = batch\n"
# Rank 1 dies whenever it comes to the fourth batch: another start does not help.
DIES = """
        import os, signal
        if self.context._current_batch_idx == 3 and model.training and self.context.distributed.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def run(context: Path, run_dir: Path, *options: str, sets: Any = ()) -> Any:
    words = [word for override in sets for word in ("--set", override)]
    return det_ds("run", context / "experiment.yaml", context, "--run-dir", run_dir, *options, *words)


def losses(run_dir: Path) -> dict[int, float]:
    """The training loss of each step; one that is reported twice fails."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [
        (each["steps_completed"], each["metrics"]["loss"]) for each in records if each["group"] == "training"
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def whole(context: Path, folder: Path, *sets: str) -> dict[int, float]:
    """The losses of a run that nothing interrupts."""
    done = run(context, folder / "whole", sets=sets)
    assert done.returncode == 0, done.stderr
    return losses(folder / "whole")


@pytest.mark.parametrize(
    ("checkpoints", "reports"),
    [
        (2, 6),
        pytest.param(2, 1, marks=pytest.mark.long("one report over all batches stands for it")),
        pytest.param(
            10, 1, marks=pytest.mark.long("launch/test_elastic has what is lost without a checkpoint")
        ),
    ],
)
def test_a_rank_that_always_dies_is_left_out(
    own_model: Path, tmp_path: Path, checkpoints: int, reports: int
) -> None:
    """It dies in the fourth batch: after a checkpoint, before the first one, before what it trained is reported."""
    sets = [
        f"{CHECKPOINTS}={checkpoints}",
        f"{REPORTS}={reports}",
        "hyperparameters.fit.checkpoint_policy=none",
    ]
    expected = whole(own_model, tmp_path, *sets)
    trial = own_model / "trial.py"
    trial.write_text(trial.read_text().replace(PLACE, DIES + PLACE))
    done = run(own_model, tmp_path / "run", "--elastic", "1:2", sets=sets)
    assert done.returncode == 0, done.stderr
    origin = "checkpoint" if checkpoints == 2 else "step 0"
    assert f"restart 1 of 1 from {origin}" in done.stderr
    assert f"rank 1 is lost: it ended the run again, with no new checkpoint; from {origin}" in done.stderr
    assert "killed by SIGKILL" in done.stderr
    assert "  elastic    slots 2 -> 1" in done.stdout
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["slots"], result["steps_completed"]) == ("completed", 1, 6)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-6)


def test_without_elastic_it_fails(own_model: Path, tmp_path: Path) -> None:
    trial = own_model / "trial.py"
    trial.write_text(trial.read_text().replace(PLACE, DIES + PLACE))
    done = run(own_model, tmp_path / "run", "--elastic", "2:2")
    assert done.returncode == 1
    assert "is lost" not in done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["slots"] == 2


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([("2", "3"), ("4", "2"), ("2", "1")], id="2-2-4-2"),
        pytest.param(
            [("1", "1"), ("2", "3"), ("1", "0")],
            id="2-1-2-1",
            marks=pytest.mark.long("2-2-4-2 changes both, too"),
        ),
    ],
)
def test_slots_and_stage_change_at_every_resume(
    own_model: Path, tmp_path: Path, legs: list[tuple[str, str]]
) -> None:
    """Two batches on two ranks under ZeRO 1, then legs of so many slots under another stage."""
    first = run(own_model, tmp_path / "run", sets=[f"{LENGTH}=2"])
    assert first.returncode == 0, first.stderr
    slots, stage = "2", "1"
    for number, (now_slots, now_stage) in enumerate(legs):
        length = (3, 4, 6)[number]
        done = run(
            *(own_model, tmp_path / "run", "--resume", "--slots", now_slots),
            sets=[f"{LENGTH}={length}", f"{STAGE}={now_stage}"],
        )
        assert done.returncode == 0, done.stderr
        if now_slots != slots:
            assert f"slots {slots} -> {now_slots}" in done.stdout
            assert f"elastic     {slots} rank" in done.stdout
        if now_stage != stage:
            assert f"zero_stage {stage} -> {now_stage}: " in done.stdout
        slots, stage = now_slots, now_stage
    assert losses(tmp_path / "run") == pytest.approx(whole(own_model, tmp_path), rel=1e-6)
    assert json.loads((tmp_path / "run/result.json").read_text())["slots"] == int(slots)


def test_an_optimizer_of_another_kind_begins_anew(own_model: Path, tmp_path: Path) -> None:
    """Refused without the option; with it, the weights and the batch count stay."""
    assert run(own_model, tmp_path / "run", sets=[f"{LENGTH}=4"]).returncode == 0
    json_file = own_model / "ds.json"
    json_file.write_text(json_file.read_text().replace("AdamW", "Adagrad"))
    refused = run(own_model, tmp_path / "run", "--resume")
    assert refused.returncode == 2
    assert "deepspeed optimizer.type" in refused.stderr
    assert "--reset-optimizer" in refused.stderr
    done = run(own_model, tmp_path / "run", "--resume", "--reset-optimizer")
    assert done.returncode == 0, done.stderr
    assert "  optimizer  its state begins anew" in done.stdout
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.programs
@pytest.mark.long("torchrun waits for the machine that is gone; on one rank fewer the others here continue")
def test_under_torchrun_the_machine_that_is_left_continues(own_model: Path, tmp_path: Path) -> None:
    """Two of its agents with a rank each, of which one is killed with its rank in the fourth batch."""
    expected = whole(own_model, tmp_path)
    trial = own_model / "trial.py"
    trial.write_text(trial.read_text().replace(PLACE, DIES.replace("os.getpid()", "os.getppid()") + PLACE))
    words = ["torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3"]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    words += ["--rdzv_conf", "last_call_timeout=5", "--local_addr", "127.0.0.1", "-m", "determined_ds.cli"]
    words += ["run", str(own_model / "experiment.yaml"), str(own_model), "--accelerator", "cpu"]
    command = [sys.executable, "-m", *words, "--run-dir", str(tmp_path / "run"), "--resume"]
    agents = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [agent.communicate(timeout=200)[0] for agent in agents]
    assert sorted(agent.returncode for agent in agents) == [-9, 0], said
    assert any("slots 2 -> 1" in each for each in said)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-6)
    assert json.loads((tmp_path / "run/result.json").read_text())["slots"] == 1
