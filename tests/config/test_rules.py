"""The compatibility table: each rule by a configuration that breaks it, and a neighbour that does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import Problem
from tests.config import deciding
from tests.config.rule_cases import CASES, MUON, Setup, zero
from tests.package import Rule, decide, rules

RULES = rules()


def arguments(setup: Setup) -> dict[str, Any]:
    """Those of ``decide``."""
    sizes = {"pipe": setup.pipe, "model": setup.model, "sequence": setup.sequence}
    hp = {
        "global_batch_size": 24,
        **{f"{name}_parallel_size": size for name, size in sizes.items()},
        **setup.hp,
    }
    how = {"slots": setup.slots, "accelerator": setup.accelerator, "machines": setup.machines}
    return {"hp": hp, "ds": setup.ds, **how}


def told(setup: Setup) -> tuple[list[Problem], list[Problem]]:
    """Problems and warnings."""
    return deciding.told(**arguments(setup))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}:{rule.key}")
def test_a_rule_is_broken_and_kept_by_the_neighbour_which_deepspeed_reads(
    rule: Rule, deepspeed_config: Callable[..., Any]
) -> None:
    *broken, neighbour = CASES[rule.code][rule.key]
    for setup in broken:
        problems, warnings = told(setup)
        (found,) = [each for each in (warnings if rule.warning else problems) if each.code == rule.code]
        assert (found.key, bool(problems)) == (rule.key, not rule.warning)
        assert found.fix
        assert not re.search(r"[{}]", found.message)
        assert "secret" not in f"{found.value}"
    problems, warnings = told(neighbour)
    assert problems == []
    assert (rule.code, rule.key) not in [(each.code, each.key) for each in warnings]
    resolved = decide(**arguments(neighbour))
    deepspeed_config(resolved.ds_config, resolved.topology.data_parallel_world_size)


def test_every_case_is_of_a_rule() -> None:
    assert {(code, key) for code, cases in CASES.items() for key in cases} == {(r.code, r.key) for r in RULES}


# ---------------------------------------------------------------------------------------- what DeepSpeed says of them


def test_the_optimizers_of_zero_are_deepspeeds_own() -> None:
    import torch
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or name == "Muon":
            continue  # DeepSpeed takes Muon for its own
        problems, _ = told(Setup({**zero(1), "optimizer": {"type": name, "params": {"lr": 0.1}}}))
        refused = "zero-untested-optimizer" in {problem.code for problem in problems}
        assert refused == (kind not in ZERO_SUPPORTED_OPTIMIZERS), name


def deepspeed_takes(strategy: Any) -> str | None:
    """What DeepSpeed's engine wraps AdamW in; an error where it raises."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import utils

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    engine = SimpleNamespace(
        get_data_types=lambda: (dtypes[strategy["precision"]], dtypes[strategy["sums"]]),
        zero_optimization=lambda: strategy["stage"] > 0,
        zero_optimization_stage=lambda: strategy["stage"],
        zero_cpu_offload=lambda: strategy["offload"],
        zero_compute_grad_norm=lambda: strategy["norm"],
        pipeline_parallelism=strategy["pipe"] > 1,
    )
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with mock.patch.object(utils.dist, "get_rank", return_value=1):  # which logs nothing
        taken: str | None = DeepSpeedEngine._do_optimizer_sanity_check(engine, adam)
    return taken


OPTIONS = {
    "precision": ["bf16", "bf16", "fp32"],
    "sums": ["fp32", "bf16"],
    "stage": [0, 1, 1, 2],
    "offload": [False, True],
    "norm": [False, True],
    "pipe": [1, 2],
}
STRATEGIES = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()})


def of_strategy(strategy: Any) -> Setup:
    """It, without clipping, which needs the norm of the gradient."""
    settings = {} if strategy["norm"] else {"compute_grad_norm": False}
    settings |= {"offload_optimizer": {"device": "cpu"}} if strategy["offload"] else {}
    ds = {**zero(strategy["stage"], **settings), "data_types": {"grad_accum_dtype": strategy["sums"]}}
    ds |= {"bf16": {"enabled": strategy["precision"] == "bf16"}, "gradient_clipping": 0}
    return Setup(ds, pipe=strategy["pipe"], slots=4)


@given(STRATEGIES)
def test_what_deepspeeds_engine_raises_on_is_refused(strategy: Any) -> None:
    try:
        deepspeed_takes(strategy)
    except (ValueError, NotImplementedError):
        codes = {problem.code for problem in told(of_strategy(strategy))[0]}
        assert codes & {"compute-grad-norm-bf16", "grad-accum-mix"}


@given(STRATEGIES)
def test_muon_is_refused_by_the_optimizer_that_deepspeed_takes(strategy: Any) -> None:
    """BF16_Optimizer takes no Muon in a pipeline."""
    setup = of_strategy({**strategy, "norm": True, "pipe": 2})
    if not told(setup)[0]:
        codes = {problem.code for problem in told(replace(setup, ds={**setup.ds, **MUON}))[0]}
        taken = deepspeed_takes({**strategy, "norm": True, "pipe": 2})
        assert ("muon-bf16-pipeline" in codes) == (taken == "bf16")
