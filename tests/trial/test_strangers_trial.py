"""The trial of docs/larger-trial.md, as its reader has it: the same losses under every ZeRO stage, and an exact resume.

Encoder and decoder, batches as dicts, two losses, OneCycleLR, AUC over all predictions, lengths that differ, streams.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.command import det_ds
from tests.test_readme import context_of

STEPS = 8
# fp32 on two ranks; sums in another order differ by about 1e-6.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return context_of(tmp_path_factory.mktemp("reader"))


def run(context: Path, name: str, zero_stage: int, *options: str) -> list[dict[str, Any]]:
    """What a run on two ranks reported."""
    sets = {
        "zero_stage": zero_stage,
        "fit.max_length.batches": STEPS,
        "fit.validation_period.batches": 3,
        "fit.checkpoint_period.batches": 3,
        "fit.reporting_period.batches": 1,
    }
    words = [word for key, value in sets.items() for word in ("--set", f"hyperparameters.{key}={value}")]
    done = det_ds(
        "run", "experiments/translation.yaml", ".", "--run-dir", name, *words, *options, cwd=context
    )
    assert done.returncode == 0, done.stderr
    return records(context / name)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def numbers(found: list[dict[str, Any]]) -> list[float]:
    """Losses, rates and AUC in order."""
    names = ("loss", "translation", "label", "lr", "validation_loss", "validation_auc")
    return [each["metrics"][name] for each in found for name in names if name in each["metrics"]]


@pytest.fixture(scope="module")
def without_zero(context: Path) -> list[dict[str, Any]]:
    return run(context, "zero0", 0)


def test_it_reports_both_losses_the_schedule_and_an_auc(without_zero: list[dict[str, Any]]) -> None:
    training = [each["metrics"] for each in without_zero if each["group"] == "training"]
    assert len(training) == STEPS
    for metrics in training:
        assert metrics["loss"] == pytest.approx(metrics["translation"] + 0.5 * metrics["label"])
    rates = [metrics["lr"] for metrics in training]
    assert max(rates) > rates[0]
    assert rates[-2] < 0.01 * max(rates), "down to nothing at the end"
    last = without_zero[-1]["metrics"]
    assert 0.5 < last["validation_auc"] <= 1
    assert training[-1]["loss"] < training[0]["loss"]


@pytest.mark.parametrize(
    "zero_stage",
    [3, *(pytest.param(stage, marks=pytest.mark.long("ZeRO 3 is the furthest from 0")) for stage in (1, 2))],
)
def test_its_losses_are_the_same_under_every_stage(
    zero_stage: int, context: Path, without_zero: list[dict[str, Any]]
) -> None:
    found = run(context, f"zero{zero_stage}", zero_stage)
    assert numbers(found) == pytest.approx(numbers(without_zero), rel=TOLERANCE, abs=1e-7)


@pytest.mark.long("exact resumes of streams, schedules and metrics have short tests")
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_it_resumes_exactly(zero_stage: int, context: Path) -> None:
    """From its first checkpoint, as if it had been killed after that."""
    whole = run(context, f"whole{zero_stage}", zero_stage)
    stopped = context / f"stopped{zero_stage}"
    run(context, stopped.name, zero_stage)
    newest = sorted((stopped / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    for checkpoint in newest[1:]:
        shutil.rmtree(checkpoint)
    resumed = run(context, stopped.name, zero_stage, "--resume")
    assert numbers(resumed) == numbers(whole)


def test_its_predictions_are_without_padding(context: Path, without_zero: list[dict[str, Any]]) -> None:
    file = context / "translated.jsonl"
    done = det_ds(
        *("run", "experiments/translation.yaml", ".", "--run-dir", "zero0", "--slots", "1"),
        *("--predict", str(file)),
        cwd=context,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 101
    assert {len(row["words"]) for row in rows} == set(range(5, 13))
