"""An optimizer of a trial's own that ZeRO refuses is refused with what to write, and not by an assertion."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from determined_ds.trial.engine import check_optimizer
from tests.making import refusal

ZERO: dict[str, Any] = {"zero_optimization": {"stage": 1}}
OFFLOADED: dict[str, Any] = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}


class MyAdamW(torch.optim.AdamW):
    """Of another type, which is what DeepSpeed goes by."""


def made(kind: Any) -> Any:
    return kind(torch.nn.Linear(2, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "ds_config", "fix"),
    [
        (torch.optim.SGD, ZERO, "zero_allow_untested_optimizer"),
        (MyAdamW, ZERO, "zero_allow_untested_optimizer"),
        (torch.optim.AdamW, OFFLOADED, "zero_force_ds_cpu_optimizer"),
    ],
)
def test_refused(kind: Any, ds_config: dict[str, Any], fix: str) -> None:
    problem = refusal(lambda: check_optimizer(made(kind), ds_config))
    assert (problem.key, problem.code) == ("build_optimizer", "zero-untested-optimizer")
    assert kind.__name__ in problem.value
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("kind", "ds_config"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.AdamW, ZERO),
        (torch.optim.SGD, {**ZERO, "zero_allow_untested_optimizer": True}),
        (torch.optim.AdamW, {**OFFLOADED, "zero_force_ds_cpu_optimizer": False}),
    ],
)
def test_taken(kind: Any, ds_config: dict[str, Any]) -> None:
    check_optimizer(made(kind), ds_config)
