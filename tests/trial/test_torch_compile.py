"""``torch_compile: true`` compiles the model, whatever trains it, and trains the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.package import records
from tests.trial.regression import train, trial_class

STEPS = 4


def hyperparameters(torch_compile: bool, stages: int = 1, schedule: str = "1f1b") -> dict[str, Any]:
    return {
        "pipe_parallel_size": stages,
        "pipe_schedule": schedule,
        "learning_rate": 0.02,
        "torch_compile": torch_compile,
        "deepspeed_config": {
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": int(stages == 1)},
        },
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2 * stages},
    }


def graphs(run_dir: Path, cache_dir: Path, engine: str, hparams: dict[str, Any]) -> int:
    """In a rank: the graphs that torch compiled on the way."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir)
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    kind = "pipeline" if hparams["pipe_parallel_size"] > 1 else ""
    # Its layers are torch's own, which it passes over unless they are called from code that is not its own.
    train(run_dir, trial_class(kind), hparams, steps=STEPS, engine=engine)
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.long("torch's compiler takes half a minute")
@pytest.mark.parametrize(
    ("engine", "stages", "schedule"),
    [
        ("deepspeed", 1, "1f1b"),
        ("ddp", 1, "1f1b"),
        ("deepspeed", 2, "1f1b"),
        ("deepspeed", 2, "dualpipev"),
    ],
    ids=["ZeRO 1", "ddp", "pipeline", "dualpipev"],
)
def test_compiled_it_trains_the_same(
    two_ranks: Ranks, tmp_path: Path, engine: str, stages: int, schedule: str
) -> None:
    losses = {}
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        # A cache of its own: nothing is found in it that hides a fault.
        hparams = hyperparameters(compiled, stages, schedule)
        found = two_ranks.run(graphs, folder, tmp_path / "compiled", engine, hparams)
        assert all((count > 0) == compiled for count in found)
        losses[compiled] = [metrics["loss"] for _, metrics in records(folder, "training")]
    assert len(losses[True]) == STEPS
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert losses[True][-1] != losses[True][0]
