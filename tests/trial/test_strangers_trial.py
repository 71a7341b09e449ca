"""A larger trial of an author's own (``translation.py``) trains alike under every ZeRO stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.harness.command import det_ds
from tests.harness.documented import context_of

STEPS = 8
PERIODS = {"max_length": STEPS, "reporting_period": 1, "validation_period": 3, "checkpoint_period": 3}
EXPERIMENT = {
    "name": "translation",
    "entrypoint": "python3 -m determined_ds.train model_defs.mine.translation:TranslationTrial",
    "resources": {"slots_per_trial": 2},
    "hyperparameters": {
        "global_batch_size": 16,
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2, "scheduler": None, "optimizer": None},
        "learning_rate": 0.01,
        "label_weight": 0.5,
        "width": 32,
        "fit": {name: {"batches": count} for name, count in PERIODS.items()},
    },
    "searcher": {"name": "single", "metric": "validation_auc", "smaller_is_better": False},
}
NUMBERS = ("loss", "translation", "label", "lr", "validation_loss", "validation_auc")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = context_of(tmp_path)
    shutil.copy(Path(__file__).with_name("translation.py"), folder / "model_defs/mine")
    (folder / "experiments/translation.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    return folder


def run(context: Path, name: str, zero_stage: int) -> list[dict[str, float]]:
    """What a run on two ranks reported, in order."""
    words = ("experiments/translation.yaml", ".", "--set", f"hyperparameters.zero_stage={zero_stage}")
    done = det_ds("run", *words, "--run-dir", name, cwd=context)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (context / name / "metrics.jsonl").read_text().splitlines())
    return [{key: each["metrics"][key] for key in NUMBERS if key in each["metrics"]} for each in lines]


def test_its_losses_schedule_and_auc_are_the_same_under_every_stage(context: Path) -> None:
    """fp32 on two ranks: sums in another order differ by about 1e-6. ZeRO 3 is the furthest from 0."""
    without, under_zero3 = (run(context, f"zero{stage}", stage) for stage in (0, 3))
    for own, expected in zip(under_zero3, without, strict=True):
        assert own == pytest.approx(expected, rel=1e-5, abs=1e-7)
    training = [each for each in without if "loss" in each]
    assert len(training) == STEPS
    for metrics in training:
        assert metrics["loss"] == pytest.approx(metrics["translation"] + 0.5 * metrics["label"])
    rates = [metrics["lr"] for metrics in training]
    assert max(rates) > rates[0]
    assert rates[-2] < 0.01 * max(rates), "down to nothing at the end"
    assert 0.5 < without[-1]["validation_auc"] <= 1
    assert training[-1]["loss"] < training[0]["loss"]
