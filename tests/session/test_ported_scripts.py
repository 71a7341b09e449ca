"""Scripts in the manner of DeepSpeed's public examples, ported: fewer than ten lines differ from what they were.

As runs of ``det-ds run`` they are resumed, tested, measured and profiled.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.harness.command import det_ds
from tests.harness.ranks import Ranks
from tests.interrupted.compared import differences, last_words
from tests.package import profile_of, records
from tests.session.ports import SCRIPTS, as_it_was

# Script -> its function that trains, and arguments under which both train the same: without dropout.
PORTS: dict[str, tuple[str, list[str]]] = {
    "cifar10": ("main", []),
    "alexnet": ("train_pipe", ["--dropout", "0"]),
}


# --------------------------------------------------------------------------------------- the same losses


def ported_losses(name: str, run_dir: str) -> tuple[list[float], int]:
    """In a rank: the losses of the ported script, and the seed of its data."""
    import determined_ds

    os.chdir(SCRIPTS)
    function, words = PORTS[name]
    script = runpy.run_path(str(SCRIPTS / f"{name}_ported.py"))
    with determined_ds.session(f"{name}.yaml", run_dir=run_dir, accelerator="cpu") as s:
        losses = script[function](script["get_arguments"](words), s)
        return losses, s.context.get_trial_seed()


def plain_losses(name: str, path: str, seed: int) -> list[float]:
    """In a rank: the losses of the plain script, its data in the order of a session with that seed."""
    import deepspeed

    deepspeed.init_distributed(verbose=False)
    deepspeed.DeepSpeedEngine.deepspeed_io = lambda engine, dataset, **_: Ordered(engine, dataset, seed)
    function, words = PORTS[name]
    script = runpy.run_path(path)
    return script[function](script["get_arguments"](words))  # type: ignore[no-any-return]


class Ordered:
    """What an engine's own loader is for a script, in the order of a session."""

    def __init__(self, engine: Any, dataset: Any, seed: int) -> None:
        from determined.pytorch import DataLoader

        from tests.package import training_data

        replicas, size = engine.dp_world_size, engine.train_micro_batch_size_per_gpu()
        accumulation = engine.gradient_accumulation_steps()
        loader = DataLoader(dataset, size, shuffle=True, drop_last=True)
        replica = engine.global_rank if replicas > 1 else 0
        self._data = training_data(loader, (replicas, accumulation, size), replica=replica, seed=seed)
        self._per_pass = (self._data.batches_per_epoch or 0) * accumulation

    def __iter__(self) -> Any:
        for _ in range(self._per_pass):
            yield next(self._data.batches)


@pytest.mark.parametrize("name", PORTS)
def test_both_train_to_the_same_losses(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    """Where the order of the data is the same, and no dropout is drawn, whose generators a session seeds anew."""
    ported = two_ranks.run(ported_losses, name, str(tmp_path / "run"))
    plain = two_ranks.run(plain_losses, name, str(as_it_was(name, tmp_path)), ported[0][1])
    assert [losses for losses, _ in ported] == plain
    assert plain[0][-1] < plain[0][0]


# --------------------------------------------------------------------------------------- as runs


def run(name: str, run_dir: Path, *options: str) -> str:
    """``det-ds run`` to its end. Returns what it prints."""
    done = det_ds("run", SCRIPTS / f"{name}.yaml", SCRIPTS, "--run-dir", run_dir, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PORTS)
def test_the_port_is_run_and_resumed(name: str, tmp_path: Path) -> None:
    """To the end, and in two parts: the metrics and the last checkpoint are the same to the bit."""
    run(name, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", symlinks=True)
    for metadata in (tmp_path / "parts" / "checkpoints").glob("*/metadata.json"):
        if json.loads(metadata.read_text())["steps_completed"] > 4:  # as if the run had been killed before it
            shutil.rmtree(metadata.parent)
    assert "resumed at batch" in run(name, tmp_path / "parts", "--resume")
    assert differences(last_words(tmp_path / "whole"), last_words(tmp_path / "parts")) == []


def test_a_stated_length_ends_a_pass_and_a_longer_one_continues_it(tmp_path: Path) -> None:
    """7 batches end in the second pass of 5, after which the script validates; with 9 its rest comes first."""
    run("cifar10", tmp_path, "--set", "hyperparameters.fit.max_length.batches=7")
    run("cifar10", tmp_path, "--resume", "--set", "hyperparameters.fit.max_length.batches=9")
    assert [steps for steps, _ in records(tmp_path, "validation")] == [5, 7, 9]


def test_one_batch_is_tested(tmp_path: Path) -> None:
    assert "test passed" in run("cifar10", tmp_path, "--test")
    assert [steps for steps, _ in records(tmp_path, "validation")] == [1]


def test_measured_or_profiled_it_trains_as_ever(tmp_path: Path) -> None:
    """Over the end of a pass, after which the script validates by itself; ranks, batch and strategy are its own."""
    every_batch = ("--set", "hyperparameters.fit.reporting_period.batches=1")
    profiled = ("--set", "hyperparameters.fit.profile={wait: 2, warmup: 1, active: 4}")
    run("cifar10", tmp_path / "measured", "--measure", "4", "--warmup", "3")
    run("cifar10", tmp_path / "whole", *every_batch)
    run("cifar10", tmp_path / "profiled", *every_batch, *profiled)
    whole, also = (
        [metrics["loss"] for _, metrics in records(tmp_path / name, "training")]
        for name in ("whole", "profiled")
    )
    assert whole == also
    measured = json.loads((tmp_path / "measured" / "measured.json").read_text())
    assert measured["repetitions"][0]["losses"] == whole[:7] != whole
    assert (measured["slots"], measured["zero_stage"], measured["precision"]) == (2, 1, "fp32")
    assert (measured["micro_batch_size"], measured["accumulation"], measured["replicas"]) == (4, 2, 2)
    assert list((tmp_path / "measured").glob("checkpoints/*")) == []
    profile = profile_of(tmp_path / "profiled")
    # The parts of a step against the clock of the loop: a rank may be put off between the two.
    steps = [step for rank in profile["ranks"] for step in rank["steps"]]
    ratios = [sum(step["seconds"].values()) / step["clock_s"] for step in steps]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)
    for rank, seen in enumerate(profile["ranks"]):
        assert (seen["rank"], [step["batch"] for step in seen["steps"]]) == (rank, [4, 5, 6, 7])
