"""A run that looks after itself: out of memory, and a loss that spikes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.command import DET_DS, ROOT
from tests.interrupted.compared import differences, losses_of
from tests.package import records
from tests.recovery.runs import NUM_BATCHES, ON_SPIKE, faulty, poison_of, result, run, words

LONG = pytest.mark.long("one more strategy of what ranks do alike")
SHORT = ("session", "interleaved")


def strategies(*names: str) -> Any:
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in SHORT else LONG) for name in names]
    )


@strategies("zero1", "zero3", "pipeline", "interleaved")
def test_out_of_memory_changes_nothing_but_the_size_of_micro_batches(name: str, tmp_path: Path) -> None:
    """Micro-batches of four, then two, do not fit at batch 10: the run goes on from a checkpoint with those of one."""
    config = faulty(name, plain=True)
    del config["hyperparameters"]["deepspeed_config"]["val"]["gradient_accumulation_steps"]
    config["hyperparameters"]["micro_batch_size"] = 4
    whole, found = tmp_path / "whole", tmp_path / "found"
    assert run(config, whole).returncode == 0
    done = run(config, found, oom=10, fits=1)
    assert done.returncode == 0, done.stderr
    assert losses_of(found) == pytest.approx(losses_of(whole), rel=1e-4)
    first, second = result(found)["recoveries"]
    assert "micro-batch 4 x" in first["done"]
    assert "micro-batch 2 x" in second["done"]
    lost = {first["steps_lost"], second["steps_lost"]}
    assert lost <= {1, 5}  # the checkpoint of batch 8 may not be whole
    assert "micro-batches of 4 do not fit" in done.stderr
    assert "recovered   out of memory" in done.stdout
    assert 0 < result(found)["goodput"] < 1


@pytest.mark.parametrize(
    ("fit", "sizes", "said"),
    [
        ({}, {"micro_batch_size": 1}, "micro-batches are of one sample already"),
        ({"on_out_of_memory": "stop"}, {}, "fit.on_out_of_memory: stop"),
    ],
)
def test_what_cannot_shrink_says_which_strategy_would_fit(
    fit: dict[str, Any], sizes: dict[str, int], said: str, tmp_path: Path
) -> None:
    config = faulty(plain=True, **fit)
    del config["hyperparameters"]["deepspeed_config"]["val"]["gradient_accumulation_steps"]
    config["hyperparameters"].update(sizes)
    done = run(config, tmp_path / "run", oom=2, fits=0)
    assert done.returncode == 1
    assert said in done.stderr
    assert "  fix: ZeRO " in done.stderr
    assert result(tmp_path / "run")["cause"] == "out of memory"
    assert not result(tmp_path / "run")["recoveries"]


@LONG
def test_a_rank_that_the_kernel_kills_for_want_of_host_memory_is_named(tmp_path: Path) -> None:
    """In a memory cgroup of its own, with a limit."""
    group = Path(f"/sys/fs/cgroup/memory/determined_ds-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("3000000000")
    except OSError as error:
        pytest.skip(f"no memory cgroup of version 1 can be made here: {error}")
    try:
        config = {**faulty("zero1", plain=True), "max_restarts": 0}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        words = [
            DET_DS,
            "run",
            tmp_path / "run.yaml",
            ROOT,
            "--run-dir",
            tmp_path / "run",
            "--accelerator",
            "cpu",
        ]
        done = subprocess.run(
            ["bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "bash", *map(str, words)],
            env={**os.environ, "FAULTS": '{"hog": 3}', "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert "the kernel killed it for want of host memory" in done.stderr
        assert result(tmp_path / "run")["cause"] == "out of host memory"
    finally:
        group.rmdir()


@strategies("zero1", "zero0", "zero2", "zero3", "pipeline", "zb-h1", "session")
def test_a_spike_is_taken_back_as_if_its_batches_had_never_been_there(name: str, tmp_path: Path) -> None:
    """Bit for bit: weights, optimizer, generators and metrics are those of a run that was told to leave them out."""
    poison = poison_of(16, faulty(name), tmp_path)
    found, told, page = tmp_path / "found", tmp_path / "told", tmp_path / "page.html"
    done = run(faulty(name, on_spike=ON_SPIKE), found, poison=poison)
    assert done.returncode == 0, done.stderr
    [spike] = result(found)["recoveries"]
    assert "at batch 16" in spike["why"]
    assert "without batches 15 to 17 of the data" in spike["done"]
    assert run(faulty(name, skip_batches=[15, 17], on_spike=ON_SPIKE), told, poison=poison).returncode == 0
    assert not result(told)["recoveries"]
    assert differences(words(told), words(found)) == []
    assert losses_of(found) == losses_of(told)
    [(at, left_out)] = records(found, "skipped")
    assert (at, left_out["skipped_first"], left_out["skipped_last"]) == (14, 15, 17)
    assert poison in left_out["skipped_samples"]
    subprocess.run([DET_DS, "report", found, "--output", page], check=True)
    assert "without 15 to 17" in page.read_text()


def test_after_so_many_spikes_it_ends_with_what_it_saw(tmp_path: Path) -> None:
    config = faulty(on_spike={**ON_SPIKE, "at_most": 0})
    poison = poison_of(16, faulty(), tmp_path)
    done = run(config, tmp_path / "run", poison=poison)
    assert done.returncode == 1
    assert "at batch 16: 0 spikes were taken back already (fit.on_spike.at_most)" in done.stderr


@pytest.mark.parametrize(
    ("trial", "fit", "said"),
    [
        ("Faulty", {"on_spike": {"window": NUM_BATCHES}}, "is longer than the training"),
        ("Faulty", {"skip_batches": [200, 210]}, "200 to 210 are never reached"),
        ("Faulty", {"skip_batches": [9, 3]}, "the first not after the last"),
        ("OwnLoad", {"on_spike": ON_SPIKE}, "OwnLoad has a load of its own"),
        ("Stateless", {"on_spike": ON_SPIKE}, "Stream has no state_dict"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_training(
    trial: str, fit: dict[str, Any], said: str, tmp_path: Path
) -> None:
    done = run(faulty(trial=trial, **fit), tmp_path / "run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "training" not in done.stdout


def test_batches_that_were_trained_on_cannot_be_left_out_afterwards(tmp_path: Path) -> None:
    assert run(faulty(), tmp_path / "run").returncode == 0
    options = ["--resume", "--set", "hyperparameters.fit.max_length.batches=30"]
    left_out = ["--set", "hyperparameters.fit.skip_batches=[5, 6]"]
    done = run(faulty(), tmp_path / "run", *options, *left_out)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "5 to 6: the checkpoint was trained on the first 24 batches of the data" in done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "completed"
