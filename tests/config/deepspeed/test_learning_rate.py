"""The rate that is stated is the rate that is trained with, whichever of its places states it."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds import ResolvedConfig
from tests.harness.ranks import Ranks
from tests.package import decide, refusal

FILLED, STATED, OTHER = 0.25, 0.5, 0.75  # of the hyperparameter, of the JSON, of the other place in the JSON
WARM_UP = 3
HP = f"global_batch_size: 2\nlearning_rate: {FILLED}\nfit: {{max_length: {{batches: 100}}}}\n"


def with_schedule(kind: str | None, lr: Any = None, **params: Any) -> dict[str, Any]:
    ds: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {} if lr is None else {"lr": lr}}}
    if kind:
        warm_up = {"warmup_num_steps": WARM_UP, "warmup_type": "linear"} if kind.startswith("Warmup") else {}
        ds["scheduler"] = {"type": kind, "params": {**warm_up, **params}}
    return ds


def highest_rate(ds_config: dict[str, Any]) -> float:
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


def said(resolved: ResolvedConfig) -> list[tuple[str, Any]]:
    assert all(warning.message.startswith("is not used: ") for warning in resolved.warnings)
    return [(warning.key, warning.value) for warning in resolved.warnings]


HYPERPARAMETER, OWN = ("hyperparameters.learning_rate", FILLED), ("optimizer.params.lr", OTHER)
AUTO = "auto"
# fmt: off
CASES: dict[str, tuple[dict[str, Any], float, list[tuple[str, Any]]]] = {
    "no schedule": (with_schedule(None, STATED), STATED, [HYPERPARAMETER]),
    "of the optimizer, the peak open":
        (with_schedule("WarmupLR", STATED, warmup_max_lr=AUTO), STATED, [HYPERPARAMETER]),
    "of the optimizer, by a cosine": (with_schedule("WarmupCosineLR", STATED), STATED, [HYPERPARAMETER]),
    "of the schedule": (with_schedule("WarmupLR", AUTO, warmup_max_lr=STATED), STATED, [HYPERPARAMETER]),
    "of the schedule, no rate of the optimizer":
        (with_schedule("WarmupDecayLR", warmup_max_lr=STATED), STATED, [HYPERPARAMETER]),
    "of both": (with_schedule("WarmupLR", OTHER, warmup_max_lr=STATED), STATED, [HYPERPARAMETER, OWN]),
    "of neither": (with_schedule("WarmupLR", AUTO, warmup_max_lr=AUTO), FILLED, []),
    "of neither, by a cosine": (with_schedule("WarmupCosineLR"), FILLED, []),
    "a test of a range begins with it": (with_schedule("LRRangeTest", lr_range_test_step_rate=0), FILLED, []),
    "a test of a range of its own":
        (with_schedule("LRRangeTest", OTHER, lr_range_test_min_lr=STATED, lr_range_test_step_rate=0), STATED,
         [HYPERPARAMETER, OWN]),
}
# fmt: on


@pytest.mark.parametrize(("ds", "rate", "unused"), CASES.values(), ids=CASES.keys())
def test_an_engine_trains_with_the_stated_rate(
    one_rank: Ranks, ds: dict[str, Any], rate: float, unused: list[tuple[str, Any]]
) -> None:
    """And what is stated and not trained with is named."""
    resolved = decide(HP, ds, slots=1)
    assert one_rank.run(highest_rate, resolved.ds_config) == [pytest.approx(rate, rel=0.02)]
    assert said(resolved) == unused


def test_a_rate_laid_over_the_json_is_trained_with(one_rank: Ranks) -> None:
    over = f"overwrite_deepspeed_args: {{optimizer: {{params: {{lr: {STATED}}}}}}}"
    resolved = decide(
        HP + over, with_schedule("WarmupLR", AUTO, warmup_max_lr=AUTO, warmup_min_lr=AUTO), slots=1
    )
    assert one_rank.run(highest_rate, resolved.ds_config) == [STATED]
    assert (
        resolved.origins["scheduler.params.warmup_max_lr"]
        == "optimizer.params.lr, overwrite_deepspeed_args, hp.yaml:4"
    )
    assert resolved.ds_config["scheduler"]["params"]["warmup_min_lr"] == pytest.approx(STATED / WARM_UP)


def test_a_decay_without_any_rate_is_refused() -> None:
    """DeepSpeed would go up to 0.001, whatever the rate of the trial's own optimizer is."""
    ds = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}}}
    problem = refusal(lambda: decide("global_batch_size: 2", ds))
    assert (problem.key, problem.code) == ("scheduler.params.warmup_max_lr", "auto-undetermined")
