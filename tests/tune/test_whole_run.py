"""A whole training from Python, by a strategy: the training that ``det-ds run`` does, and its numbers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import determined_ds
from determined_ds.errors import ConfigError, TrainingError
from tests.harness.command import ROOT, det_ds

EPOCHS, SAMPLES = 3, 64
LENGTH = ["hyperparameters.fit.max_length=null", f"hyperparameters.fit.max_length={{epochs: {EPOCHS}}}"]


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A copy of ``tests/cli/own_model``."""
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(ROOT / "tests" / "cli" / "own_model", tmp_path / "own", ignore=ignored))


def trained(folder: Path, **more: Any) -> determined_ds.TrainingResult:
    stated = {"slots": 1, "overrides": LENGTH, "run_dir": folder / "trained", "accelerator": "cpu"}
    return determined_ds.run_training_experiment(folder / "experiment.yaml", folder, **{**stated, **more})


@pytest.mark.long("two whole trainings; cli/test_run has the numbers of a run")
def test_it_is_the_training_that_det_ds_run_does(
    own_model: Path, metrics_of: Callable[[Path, str], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ZeRO 0, where the experiment has ZeRO 1: losses by epoch and the last validation, to the bit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = trained(own_model, method="zero0")
    run_dir = own_model / "run"
    words = [
        *LENGTH,
        "hyperparameters.fit.reporting_period=null",
        "hyperparameters.fit.reporting_period={epochs: 1}",
        "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage=0",
    ]
    done = det_ds(
        *("run", own_model / "experiment.yaml", own_model, "--slots", "1", "--run-dir", run_dir),
        *(word for override in words for word in ("--set", override)),
    )
    assert done.returncode == 0, done.stderr
    training, validation = (metrics_of(run_dir, group) for group in ("training", "validation"))
    assert result.losses_per_epoch == tuple(report["loss"] for report in training)
    assert len(result.losses_per_epoch) == EPOCHS
    assert len(set(result.losses_per_epoch)) == EPOCHS
    assert result.final_metrics["validation_loss"] == validation[-1]["validation_loss"]

    assert result.method == "zero0"
    assert result.run_dir == own_model / "trained"
    assert len(result.seconds_per_epoch) == EPOCHS
    assert min(result.seconds_per_epoch) > 0
    assert result.samples_per_second == pytest.approx(EPOCHS * SAMPLES / sum(result.seconds_per_epoch))
    assert result.tokens_per_second is None
    assert result.peak_memory_bytes > 2**26
    assert asdict(result)["method"] == "zero0"

    assert (result.final_loss, result.train_losses) == (result.losses_per_epoch[-1], result.losses_per_epoch)
    assert result.val_losses == tuple(each["validation_loss"] for each in validation)
    assert (result.final_val_loss, result.final_accuracy) == (validation[-1]["validation_loss"], None)
    assert result.peak_memory_gb == result.peak_memory_bytes / 1e9
    assert (result.total_time, result.throughput) == (
        sum(result.seconds_per_epoch),
        result.samples_per_second,
    )
    drawn = determined_ds.create_performance_visualizations(
        [result, result.to_dict()], own_model / "pictures"
    )
    assert [path.name for path in drawn] == ["throughput.png", "memory.png", "loss.png"]


@pytest.mark.long("a run that fails; cli/test_run has failures")
def test_a_training_that_fails_says_why(own_model: Path) -> None:
    trial = own_model / "trial.py"
    trial.write_text(trial.read_text().replace("torch.nn.Linear(4, 1)", "torch.nn.Linear(3, 1)"))
    with pytest.raises(TrainingError) as caught:
        trained(own_model)
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in str(caught.value)
    assert str(own_model / "trained") in str(caught.value)


@pytest.mark.long("one more run; protocol/test_metrics_file reads what is not finite")
def test_losses_are_numbers_also_where_they_are_not_finite(own_model: Path) -> None:
    """``metrics.jsonl`` has them as a text."""
    trial = own_model / "trial.py"
    body = trial.read_text()
    trial.write_text(
        body.replace(
            "        return torch.nn.functional", "        return float('nan') * torch.nn.functional"
        )
    )
    assert trial.read_text() != body
    going_on = "hyperparameters.fit.stop_on_nan=false"
    result = trained(
        own_model,
        method="zero0",
        overrides=[*LENGTH[:1], "hyperparameters.fit.max_length={epochs: 1}", going_on],
    )
    assert [type(loss) for loss in result.losses_per_epoch] == [float]
    assert math.isnan(result.losses_per_epoch[0])
    assert math.isnan(result.final_metrics["validation_loss"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"method": "zer0"}, "did you mean zero0?"),
        ({"method": "pipeline", "slots": 2}, "has no stages"),
        ({"method": "zeropp"}, "there is no CUDA device"),
        ({"overrides": ["nonsense"]}, "is not KEY=VALUE"),
        ({"slots": 3}, "is not a multiple of"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(
    more: dict[str, Any], says: str, own_model: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        trained(own_model, **more)
    assert says in str(caught.value)
    assert not (own_model / "trained").exists()


def test_numbers_of_a_comparison_that_make_no_sense_are_all_reported(own_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        determined_ds.compare(
            own_model / "experiment.yaml", own_model, strategies=["zero0"], steps=0, repeat=0, slots=[2, -1]
        )
    assert [problem.key for problem in caught.value.problems] == ["steps", "repeat", "slots -1"]
