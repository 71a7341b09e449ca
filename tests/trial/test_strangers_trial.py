"""A larger trial of an author's own (``translation.py``) trains alike under every ZeRO stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.command import det_ds
from tests.harness.documented import context_of

STEPS = 8
# fp32 on two ranks; sums in another order differ by about 1e-6.
TOLERANCE = 1e-5
EXPERIMENT = {
    "name": "translation",
    "entrypoint": "python3 -m determined_ds.train model_defs.mine.translation:TranslationTrial",
    "resources": {"slots_per_trial": 2},
    "hyperparameters": {
        "global_batch_size": 16,
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "overwrite_deepspeed_args": {
            "gradient_accumulation_steps": 2,
            "scheduler": None,
            "optimizer": None,
        },
        "learning_rate": 0.01,
        "label_weight": 0.5,
        "width": 32,
        "fit": {"max_length": {"batches": 40}, "validation_period": {"batches": 20}},
    },
    "searcher": {"name": "single", "metric": "validation_auc", "smaller_is_better": False},
}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = context_of(tmp_path_factory.mktemp("reader"))
    shutil.copy(Path(__file__).with_name("translation.py"), folder / "model_defs/mine")
    (folder / "experiments/translation.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    return folder


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
    return [json.loads(line) for line in (context / name / "metrics.jsonl").read_text().splitlines()]


def numbers(found: list[dict[str, Any]]) -> list[float]:
    """Losses, rates and AUC in order."""
    names = ("loss", "translation", "label", "lr", "validation_loss", "validation_auc")
    return [each["metrics"][name] for each in found for name in names if name in each["metrics"]]


@pytest.mark.parametrize(
    "stages",
    [(0, 3), pytest.param((0, 1, 2), marks=pytest.mark.long("ZeRO 3 is the furthest from 0"))],
)
def test_its_losses_schedule_and_auc_are_the_same_under_every_stage(
    stages: tuple[int, ...], context: Path
) -> None:
    without, *others = [run(context, f"zero{stage}-of-{len(stages)}", stage) for stage in stages]
    for found in others:
        assert numbers(found) == pytest.approx(numbers(without), rel=TOLERANCE, abs=1e-7)
    training = [each["metrics"] for each in without if each["group"] == "training"]
    assert len(training) == STEPS
    for metrics in training:
        assert metrics["loss"] == pytest.approx(metrics["translation"] + 0.5 * metrics["label"])
    rates = [metrics["lr"] for metrics in training]
    assert max(rates) > rates[0]
    assert rates[-2] < 0.01 * max(rates), "down to nothing at the end"
    assert 0.5 < without[-1]["metrics"]["validation_auc"] <= 1
    assert training[-1]["loss"] < training[0]["loss"]
