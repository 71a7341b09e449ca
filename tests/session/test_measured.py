"""``det-ds run --measure`` of a script with a session: it trains as ever, and its steps are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.errors import EXIT_CONFIG
from determined_ds.protocol.metrics_file import read_records
from determined_ds.protocol.run_dir import STEP_GROUP, RunDir
from determined_ds.report.results import Row, read_row
from tests.command import ROOT, det_ds
from tests.session.test_exact_resume import written

SCRIPTS = Path(__file__).parent / "scripts"
WARMUP, STEPS = 3, 4
MEASURED = ("--measure", str(STEPS), "--warmup", str(WARMUP))
EVERY_BATCH = ("--set", "hyperparameters.fit.reporting_period.batches=1")


def measured(config: Path, context_dir: Path, run_dir: Path, *options: str) -> Row:
    done = det_ds("run", config, context_dir, "--run-dir", run_dir, *MEASURED, *options)
    assert done.returncode == 0, done.stderr
    return read_row(RunDir(run_dir).measured)


def losses(config: Path, context_dir: Path, run_dir: Path, *options: str) -> list[float]:
    """Of each batch of an ordinary run."""
    done = det_ds("run", config, context_dir, "--run-dir", run_dir, *EVERY_BATCH, *options)
    assert done.returncode == 0, done.stderr
    return [each["metrics"]["loss"] for each in read_records(RunDir(run_dir).metrics, "training")]


def test_its_losses_are_those_of_an_ordinary_run_to_the_bit(tmp_path: Path) -> None:
    """Over the end of a pass, after which the script validates by itself; ranks, batch and strategy are its own."""
    row = measured(SCRIPTS / "cifar10.yaml", SCRIPTS, tmp_path / "measured")
    whole = losses(SCRIPTS / "cifar10.yaml", SCRIPTS, tmp_path / "whole")
    assert len(whole) > WARMUP + STEPS
    assert list(row.losses) == whole[: WARMUP + STEPS]
    assert row.is_measured
    assert (row.name, row.engine, row.slots, row.zero_stage, row.precision) == (
        "ZeRO 1",
        "deepspeed",
        2,
        1,
        "fp32",
    )
    assert (row.micro_batch_size, row.accumulation, row.replicas, row.samples_per_step) == (4, 2, 2, 16)
    [repetition] = row.repetitions
    assert (len(repetition.step_seconds), repetition.warmup) == (STEPS, WARMUP)
    assert len(repetition.peak_memory_bytes_by_rank) == 2
    assert min(repetition.model_state_bytes_by_rank) > 0
    steps = read_records(RunDir(tmp_path / "measured").metrics, STEP_GROUP)
    assert [each["steps_completed"] for each in steps] == list(range(1, WARMUP + STEPS + 1))
    assert list((tmp_path / "measured").glob("checkpoints/*")) == []


def test_a_script_that_trains_less_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = det_ds("run", SCRIPTS / "cifar10.yaml", SCRIPTS, "--run-dir", run_dir, "--measure", "20")
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "the script trains only 10 of 25 steps" in done.stderr
    assert not RunDir(run_dir).measured.exists()


@pytest.mark.long("test_its_losses_are_those_of_an_ordinary_run_to_the_bit in one form of a script")
@pytest.mark.parametrize("form", ["range", "epochs", "steps"])
def test_in_every_form_of_a_script(form: str, tmp_path: Path) -> None:
    """With dropout, an augmentation, draws between passes; what it writes after its training is not written."""
    config = written(tmp_path, form)
    row = measured(config, ROOT, tmp_path / "measured")
    assert not list((tmp_path / "measured").glob("words*"))
    assert list(row.losses) == losses(config, ROOT, tmp_path / "whole")[: WARMUP + STEPS]


@pytest.mark.long("test_its_losses_are_those_of_an_ordinary_run_to_the_bit without a pipeline")
def test_a_pipelines_bubble_is_measured_too(tmp_path: Path) -> None:
    row = measured(SCRIPTS / "alexnet.yaml", SCRIPTS, tmp_path / "measured")
    assert row.is_measured
    assert row.is_pipeline
    assert row.bubble is not None
    assert row.bubble_ideal is not None
