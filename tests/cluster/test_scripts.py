"""Scripts sent as they are: with a session, and under transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cluster.client import Cluster, metrics_of
from tests.cluster.scenarios import (
    HF_TRAINER,
    LENGTH,
    LONG_ENOUGH,
    ONE_THREAD,
    REAL,
    context_of,
)
from tests.harness.command import ROOT

pytestmark = pytest.mark.programs
SCRIPTS = ROOT / "tests/session/scripts"
EVERY_STEP = (
    ONE_THREAD,
    "hyperparameters.fit.reporting_period.batches=1",
    "reproducibility.experiment_seed=7",
)
NUM_EPOCHS = 40 if REAL else 2  # of five steps each


@pytest.mark.long("test_follow pauses a trial, and tests/interrupted stops sessions")
def test_a_session_ends_as_if_it_never_was_paused(
    cluster: Cluster, run_here: Callable[..., Path], tmp_path: Path
) -> None:
    context = context_of(tmp_path / "context", SCRIPTS / "cifar10_ported.py", SCRIPTS / "cifar10.yaml")
    config = yaml.safe_load((context / "cifar10.yaml").read_text())
    config["entrypoint"] += f" --epochs {NUM_EPOCHS}"
    (context / "cifar10.yaml").write_text(yaml.safe_dump(config))
    number = cluster.create(context / "cifar10.yaml", *EVERY_STEP, context=context, paused=True)
    assert 2 <= cluster.stop(number, at=2) < 5 * NUM_EPOCHS
    cluster.activate(number)
    [trial] = cluster.wait(number)
    assert (trial.restarts, cluster.num_starts(trial)) == (0, 2)
    assert cluster.experiment(number)["progress"] == 1.0
    here = metrics_of(run_here(context / "cifar10.yaml", *EVERY_STEP, context=context))
    assert cluster.metrics(trial) == here
    assert trial.best["accuracy"] == max(metrics["accuracy"] for _, metrics in here["validation"])


@pytest.mark.long(
    "a whole training; transformers/test_resume stops and resumes one, a session is paused above"
)
def test_a_script_of_transformers_trainer_ends_as_if_it_never_was_paused(
    cluster: Cluster, run_here: Callable[..., Path]
) -> None:
    number = cluster.create(HF_TRAINER, *LONG_ENOUGH, paused=True)
    assert 2 <= cluster.stop(number, at=2) < LENGTH
    cluster.activate(number)
    here = metrics_of(run_here(HF_TRAINER, *LONG_ENOUGH))
    [trial] = cluster.wait(number)
    assert trial.restarts == 0
    assert [steps for steps, _ in here["validation"]] == [LENGTH // 2, LENGTH]
    assert cluster.metrics(trial)["validation"] == here["validation"]
    assert trial.best["eval_loss"] == min(metrics["eval_loss"] for _, metrics in here["validation"])
