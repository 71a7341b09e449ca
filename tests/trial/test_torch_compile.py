"""``torch_compile: true`` compiles the model, whatever trains it, and trains the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.ranks import Ranks
from tests.package import records
from tests.trial.regression import train, trial_class

STEPS = 4


def graphs(run_dir: Path, engine: str, schedule: str, compiles: bool) -> int:
    """In a rank: the graphs that torch compiled on the way, with a cache of its own that hides no fault."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(run_dir / "compiled")
    from torch._dynamo.utils import counters

    counters.clear()
    stages = 2 if schedule else 1
    hparams = {
        "pipe_parallel_size": stages,
        "pipe_schedule": schedule or "1f1b",
        "torch_compile": compiles,
        "deepspeed_config": {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
            "zero_optimization": {"stage": 2 - stages},
            "gradient_accumulation_steps": 2 * stages,
        },
    }
    train(run_dir, trial_class("pipeline" if schedule else ""), hparams, steps=STEPS, engine=engine)
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.long("torch's compiler takes half a minute")
@pytest.mark.parametrize(("engine", "schedule"), [("deepspeed", ""), ("ddp", ""), ("deepspeed", "dualpipev")])
def test_compiled_it_trains_the_same(two_ranks: Ranks, tmp_path: Path, engine: str, schedule: str) -> None:
    losses = {}
    for compiles in (False, True):
        found = two_ranks.run(graphs, tmp_path / str(compiles), engine, schedule, compiles)
        assert all((count > 0) == compiles for count in found)
        losses[compiles] = [metrics["loss"] for _, metrics in records(tmp_path / str(compiles), "training")]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert len(set(losses[True])) == STEPS
