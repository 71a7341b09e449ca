"""A script with a session that is measured or profiled by ``det-ds run`` trains as ever, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.command import det_ds
from tests.package import profile_of, records
from tests.recorded_steps import assert_adds_up

SCRIPTS = Path(__file__).parent / "scripts"
WARMUP, STEPS = 3, 4
MEASURED = ("--measure", str(STEPS), "--warmup", str(WARMUP))
EVERY_BATCH = ("--set", "hyperparameters.fit.reporting_period.batches=1")
PROFILED = ("--set", "hyperparameters.fit.profile={wait: 2, warmup: 1, active: 4}")


def run(script: str, run_dir: Path, *options: str) -> Any:
    return det_ds("run", SCRIPTS / f"{script}.yaml", SCRIPTS, "--run-dir", run_dir, *options)


def losses(run_dir: Path, *options: str) -> list[float]:
    """Of each batch of an ordinary run."""
    done = run("cifar10", run_dir, *EVERY_BATCH, *options)
    assert done.returncode == 0, done.stderr
    return [metrics["loss"] for _, metrics in records(run_dir, "training")]


def test_its_losses_are_those_of_an_ordinary_run(tmp_path: Path) -> None:
    """Over the end of a pass, after which the script validates by itself; ranks, batch and strategy are its own."""
    done = run("cifar10", tmp_path / "measured", *MEASURED)
    assert done.returncode == 0, done.stderr
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "profiled", *PROFILED) == whole
    measured = json.loads((tmp_path / "measured" / "measured.json").read_text())
    assert len(whole) > WARMUP + STEPS
    [repetition] = measured["repetitions"]
    assert repetition["losses"] == whole[: WARMUP + STEPS]
    assert (measured["slots"], measured["zero_stage"], measured["precision"]) == (2, 1, "fp32")
    assert (measured["micro_batch_size"], measured["accumulation"], measured["replicas"]) == (4, 2, 2)
    assert [step for step, _ in records(tmp_path / "measured", "measured")] == list(
        range(1, WARMUP + STEPS + 1)
    )
    assert list((tmp_path / "measured").glob("checkpoints/*")) == []

    profile = profile_of(tmp_path / "profiled")
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 1]
    assert_adds_up(profile)
    for rank in profile["ranks"]:
        assert [step["batch"] for step in rank["steps"]] == [4, 5, 6, 7]


def test_a_script_that_trains_less_than_is_measured_is_refused(tmp_path: Path) -> None:
    done = run("cifar10", tmp_path / "run", "--measure", "20")
    assert done.returncode == 2, done.stderr
    assert "the script trains only 10 of 25 steps" in done.stderr
    assert not (tmp_path / "run" / "measured.json").exists()


@pytest.mark.long("test_its_losses_are_those_of_an_ordinary_run without a pipeline")
def test_a_pipelines_bubble_is_measured_too(tmp_path: Path) -> None:
    done = run("alexnet", tmp_path / "run", *MEASURED)
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "run" / "measured.json").read_text())
    [repetition] = measured["repetitions"]
    assert 0 < repetition["bubble_ideal"] < 1
    assert repetition["bubble"] > 0
