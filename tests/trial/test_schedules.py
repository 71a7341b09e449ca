"""``build_scheduler``: torch's schedules drive every kind of engine, a step each, and resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.harness.ranks import Ranks
from tests.package import checkpoints
from tests.trial.regression import train, trial_class

STEPS = 8
ADAM = {"type": "AdamW", "params": {"lr": 0.1}}
SHORT, LONG = ("zero1", "pipeline"), ("zero0", "zero3", "offload", "ddp", "engines")
STAND = pytest.mark.long("zero1 and pipeline are short")


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)


def run(run_dir: Path, kind: str, steps: int, resume: str | None = None) -> tuple[list[float], str]:
    """Train in this rank. Returns the rates of each step, and the newest checkpoint."""
    rates: list[float] = []

    class Scheduled:
        engine: Any

        def build_scheduler(self, optimizer: Any) -> Any:
            return one_cycle(optimizer)

        def train_batch(self, *given: Any) -> Any:
            if self.engine.is_gradient_accumulation_boundary() or kind in ("pipeline", "engines"):
                rates.append(self.engine.get_lr()[0])
            return super().train_batch(*given)  # type: ignore[misc]

    zero: dict[str, Any] = {"stage": int(kind[-1]) if kind.startswith("zero") else 0}
    if kind == "offload":
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    ds_config = {"zero_optimization": zero, "optimizer": ADAM, "gradient_accumulation_steps": 2}
    hparams = {"pipe_parallel_size": 2 if kind == "pipeline" else 1, "deepspeed_config": ds_config}
    how = {"engine": "ddp" if kind == "ddp" else "deepspeed", "latest_checkpoint": resume}
    trial = train(run_dir, trial_class(kind, Scheduled), hparams, steps=steps, **how)
    assert all(engine.lr_scheduler.last_epoch == steps for engine in trial.context.models)
    return rates, checkpoints(run_dir)[0].name


@pytest.mark.parametrize("kind", [*SHORT, *(pytest.param(kind, marks=STAND) for kind in LONG)])
def test_each_step_has_torchs_rate_and_a_resumed_run_goes_on(
    kind: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    """As torch's schedule in a loop of its own: a step each, with accumulation, stopped and resumed."""
    own, expected = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1), []
    schedule = one_cycle(own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of the optimizer
        for _ in range(STEPS):
            expected.append(own.param_groups[0]["lr"])
            schedule.step()
    first, uuid = two_ranks.run(run, tmp_path, kind, 3)[0]
    then, _ = two_ranks.run(run, tmp_path, kind, STEPS, uuid)[0]
    assert first + then == pytest.approx(expected)
