"""The trial of the documentation that takes all micro-batches of a step at once trains as the one that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import det_ds
from tests.test_readme import context_of


def test_by_hand_is_as_by_the_loop(tmp_path: Path) -> None:
    folder = context_of(tmp_path)
    losses = {}
    for name, trial in (("loop", "trial:MyTrial"), ("hand", "by_hand:MyTrialByHand")):
        sets = (
            f"entrypoint=python3 -m determined_ds.train model_defs.mine.{trial}",
            "hyperparameters.overwrite_deepspeed_args.gradient_accumulation_steps=4",
            "hyperparameters.fit.max_length.batches=4",
            "hyperparameters.fit.reporting_period.batches=1",
        )
        words = [word for each in sets for word in ("--set", each)]
        done = det_ds("run", "experiments/mine.yaml", ".", "--run-dir", name, *words, cwd=folder)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["metrics"]["loss"] for line in lines if line["group"] == "training"]
    assert len(losses["loop"]) == 4
    assert losses["hand"] == pytest.approx(losses["loop"], rel=1e-5)
