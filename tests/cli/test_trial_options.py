"""What the pages tell an author to write in a trial is taken by every command, not by ``run`` alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.own_runs import invoke
from tests.harness.command import det_ds

# docs/your-model.md
OWN = """

class Own(TinyTrial):
    validation_metrics = {"validation_largest": "max"}

    def build_optimizer(self, model):
        return torch.optim.AdamW(self.build_parameters(model), lr=0.01)

    def build_parameters(self, model):
        return [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]

    def build_scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])

    def evaluate(self, model, batch):
        return {"validation_loss": self.loss(model, batch), "validation_largest": self.loss(model, batch)}
"""
SETS = ["--set", "entrypoint=python3 -m determined_ds.train trial:Own"]
SETS += ["--set", "hyperparameters.overwrite_deepspeed_args.optimizer=null"]


def test_what_decides_and_what_starts_runs_takes_it(own_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (own_model / "trial.py").open("a") as file:
        file.write(OWN)
    monkeypatch.chdir(own_model.parent)
    for option in ("--strict", "--explain", "--memory"):
        done = invoke("check", Path(own_model.name), option, *SETS)
        assert done.exit_code == 0, done.output
    words = ["--slots", "1", "--strategies", "zero1", "--steps", "1", "--warmup", "0", "--repeat", "1", *SETS]
    where = (own_model / "experiment.yaml", own_model, "--run-dir", own_model.parent / "run")
    compared = det_ds("compare", *where, *words)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "failed" not in compared.stdout + compared.stderr
