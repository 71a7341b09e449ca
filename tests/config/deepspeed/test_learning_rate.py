"""The rate that is stated is the rate that is trained with, whichever of its places states it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.deciding import AUTO, Json, optimizer, scheduler
from tests.harness.ranks import Ranks
from tests.package import decide

FILLED, STATED, OTHER = 0.25, 0.5, 0.75  # of the hyperparameter, of the JSON, of the other place in the JSON
WARM_UP = 3
HP = f"global_batch_size: 2\nlearning_rate: {FILLED}\nfit: {{max_length: {{batches: 100}}}}\n"


def config(kind: str | None, lr: Any = None, **params: Any) -> Json:
    ds = optimizer("SGD", **({} if lr is None else {"lr": lr}))
    if kind and kind.startswith("Warmup"):
        params = {"warmup_num_steps": WARM_UP, "warmup_type": "linear", **params}
    return {**ds, **scheduler(kind, **params)} if kind else ds


def highest_rates(configs: list[Json]) -> list[float]:
    """In a rank: the highest rate at which an engine of each takes the first steps."""
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found = []
    for ds_config in configs:
        model = torch.nn.Linear(2, 1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        rates = []
        for _ in range(WARM_UP + 3):
            engine.backward(engine(torch.ones(2, 2)).sum())
            rates.append(engine.optimizer.param_groups[0]["lr"])
            engine.step()
        found.append(float(max(rates)))
    return found


HYPERPARAMETER, OWN = ("hyperparameters.learning_rate", FILLED), ("optimizer.params.lr", OTHER)
RANGE_TEST = {"lr_range_test_step_rate": 0}
OF_ITS_OWN = {**RANGE_TEST, "lr_range_test_min_lr": STATED}
# What the JSON states, the rate that is trained with, and what is stated and not trained with.
CASES: list[tuple[Json, float, list[tuple[str, Any]]]] = [
    (config(None, STATED), STATED, [HYPERPARAMETER]),
    (config("WarmupLR", STATED, warmup_max_lr=AUTO), STATED, [HYPERPARAMETER]),
    (config("WarmupLR", AUTO, warmup_max_lr=STATED), STATED, [HYPERPARAMETER]),
    (config("WarmupLR", OTHER, warmup_max_lr=STATED), STATED, [HYPERPARAMETER, OWN]),
    (config("WarmupLR", AUTO, warmup_max_lr=AUTO), FILLED, []),
    (config("LRRangeTest", **RANGE_TEST), FILLED, []),
    (config("LRRangeTest", OTHER, **OF_ITS_OWN), STATED, [HYPERPARAMETER, OWN]),
]


def test_an_engine_trains_with_the_stated_rate(one_rank: Ranks) -> None:
    decided = [decide(HP, ds, slots=1) for ds, *_ in CASES]
    [rates] = one_rank.run(highest_rates, [each.ds_config for each in decided])
    for (ds, rate, unused), resolved, found in zip(CASES, decided, rates, strict=True):
        assert found == pytest.approx(rate, rel=0.02), ds
        assert [(warning.key, warning.value) for warning in resolved.warnings] == unused, ds
