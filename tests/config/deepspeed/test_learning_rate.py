"""The rate that is stated is the rate that is trained with, whichever of its places states it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.package import decide, refusal

Json = dict[str, Any]
FILLED, STATED, OTHER = 0.25, 0.5, 0.75  # of the hyperparameter, of the JSON, of the other place in the JSON
WARM_UP, AUTO = 3, "auto"
HP = f"global_batch_size: 2\nlearning_rate: {FILLED}\nfit: {{max_length: {{batches: 100}}}}\n"


def with_schedule(kind: str | None, lr: Any = None, **params: Any) -> Json:
    ds: Json = {"optimizer": {"type": "SGD", "params": {} if lr is None else {"lr": lr}}}
    if kind:
        warm_up = {"warmup_num_steps": WARM_UP, "warmup_type": "linear"} if kind.startswith("Warmup") else {}
        ds["scheduler"] = {"type": kind, "params": {**warm_up, **params}}
    return ds


def highest_rate(ds_config: Json) -> float:
    """The highest rate at which an engine takes the first steps; runs in a rank."""
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = torch.nn.Linear(2, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    rates = []
    for _ in range(WARM_UP + 3):
        engine.backward(engine(torch.ones(2, 2)).sum())
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.step()
    return float(max(rates))


HYPERPARAMETER, OWN = ("hyperparameters.learning_rate", FILLED), ("optimizer.params.lr", OTHER)
RANGE_TEST = {"lr_range_test_step_rate": 0}
# What the JSON states, the rate that is trained with, and what is stated and not trained with.
CASES: dict[str, tuple[Json, float, list[tuple[str, Any]]]] = {
    "no schedule": (with_schedule(None, STATED), STATED, [HYPERPARAMETER]),
    "of the optimizer": (with_schedule("WarmupLR", STATED, warmup_max_lr=AUTO), STATED, [HYPERPARAMETER]),
    "of the optimizer, by a cosine": (with_schedule("WarmupCosineLR", STATED), STATED, [HYPERPARAMETER]),
    "of the schedule": (with_schedule("WarmupLR", AUTO, warmup_max_lr=STATED), STATED, [HYPERPARAMETER]),
    "of the schedule alone": (with_schedule("WarmupDecayLR", warmup_max_lr=STATED), STATED, [HYPERPARAMETER]),
    "of both": (with_schedule("WarmupLR", OTHER, warmup_max_lr=STATED), STATED, [HYPERPARAMETER, OWN]),
    "of neither": (with_schedule("WarmupLR", AUTO, warmup_max_lr=AUTO), FILLED, []),
    "of neither, by a cosine": (with_schedule("WarmupCosineLR"), FILLED, []),
    "a test of a range": (with_schedule("LRRangeTest", **RANGE_TEST), FILLED, []),
    "a test of a range of its own": (
        with_schedule("LRRangeTest", OTHER, lr_range_test_min_lr=STATED, **RANGE_TEST),
        STATED,
        [HYPERPARAMETER, OWN],
    ),
}


@pytest.mark.parametrize(("ds", "rate", "unused"), CASES.values(), ids=CASES.keys())
def test_an_engine_trains_with_the_stated_rate(
    one_rank: Ranks, ds: Json, rate: float, unused: list[tuple[str, Any]]
) -> None:
    resolved = decide(HP, ds, slots=1)
    assert one_rank.run(highest_rate, resolved.ds_config) == [pytest.approx(rate, rel=0.02)]
    assert [(warning.key, warning.value) for warning in resolved.warnings] == unused
    assert all(warning.message.startswith("is not used: ") for warning in resolved.warnings)


def test_a_rate_laid_over_the_json_fills_the_schedule() -> None:
    over = f"overwrite_deepspeed_args: {{optimizer: {{params: {{lr: {STATED}}}}}}}"
    resolved = decide(HP + over, with_schedule("WarmupLR", AUTO, warmup_max_lr=AUTO, warmup_min_lr=AUTO))
    params = resolved.ds_config["scheduler"]["params"]
    assert params["warmup_max_lr"] == STATED
    assert params["warmup_min_lr"] == pytest.approx(STATED / WARM_UP)
    origin = resolved.origins["scheduler.params.warmup_max_lr"]
    assert origin == "optimizer.params.lr, overwrite_deepspeed_args, hp.yaml:4"


def test_a_decay_without_any_rate_is_refused() -> None:
    """DeepSpeed would go up to 0.001, whatever the rate of the trial's own optimizer is."""
    ds = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}}}
    problem = refusal(lambda: decide("global_batch_size: 2", ds))
    assert (problem.key, problem.code) == ("scheduler.params.warmup_max_lr", "auto-undetermined")
