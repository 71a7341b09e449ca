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
    hp = {
        "global_batch_size": 24,
        "pipe_parallel_size": setup.pipe,
        "model_parallel_size": setup.model,
        "sequence_parallel_size": setup.sequence,
        **setup.hyperparameters,
    }
    how = {"slots": setup.slots, "accelerator": setup.accelerator, "machines": setup.machines}
    return {"hp": hp, "ds": setup.ds, **how}


def told(setup: Setup) -> tuple[list[Problem], list[Problem]]:
    """Problems and warnings."""
    return deciding.told(**arguments(setup))


def of_rule(problems: list[Problem], rule: Rule) -> list[Problem]:
    return [found for found in problems if (found.code, found.key) == (rule.code, rule.key)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}:{rule.key}")
class TestEachRule:
    def test_is_broken(self, rule: Rule) -> None:
        broken, _ = CASES[f"{rule.code}:{rule.key}"]
        problems, warnings = told(broken)
        (found,) = of_rule(warnings if rule.warning else problems, rule)
        assert found.message
        assert found.fix
        assert not re.search(r"[{}]", found.message)
        assert bool(problems) != rule.warning

    def test_is_kept_by_the_neighbour_which_deepspeed_reads(
        self, rule: Rule, deepspeed_config: Callable[..., Any]
    ) -> None:
        _, neighbour = CASES[f"{rule.code}:{rule.key}"]
        problems, warnings = told(neighbour)
        assert problems == []
        assert of_rule(warnings, rule) == []
        resolved = decide(**arguments(neighbour))
        deepspeed_config(resolved.ds_config, resolved.topology.data_parallel_world_size)


def test_every_case_is_of_a_rule() -> None:
    assert set(CASES) == {f"{rule.code}:{rule.key}" for rule in RULES}


# ---------------------------------------------------------------------------------------- what DeepSpeed says of them


def test_the_optimizers_of_zero_are_deepspeeds_own() -> None:
    import torch
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or name == "Muon":
            continue  # DeepSpeed takes Muon for its own
        problems, _ = told(Setup(ds={**zero(1), "optimizer": {"type": name, "params": {"lr": 0.1}}}))
        refused = "zero-untested-optimizer" in {problem.code for problem in problems}
        assert refused == (kind not in ZERO_SUPPORTED_OPTIMIZERS), name


# -------------------------------------------------------------------------------- which optimizer DeepSpeed takes


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


STRATEGIES = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(["bf16", "bf16", "fp32"]),
        "sums": st.sampled_from(["fp32", "bf16"]),
        "stage": st.sampled_from([0, 1, 1, 2]),
        "offload": st.booleans(),
        "norm": st.booleans(),
        "pipe": st.sampled_from([1, 2]),
    }
)


def of_strategy(strategy: Any) -> Setup:
    """It, without clipping, which needs the norm of the gradient."""
    stage, settings = strategy["stage"], {} if strategy["norm"] else {"compute_grad_norm": False}
    settings |= {"offload_optimizer": {"device": "cpu"}} if strategy["offload"] else {}
    ds = {**zero(stage, **settings), "data_types": {"grad_accum_dtype": strategy["sums"]}}
    ds |= {"bf16": {"enabled": strategy["precision"] == "bf16"}, "gradient_clipping": 0}
    return Setup(ds=ds, pipe=strategy["pipe"], slots=4)


@given(STRATEGIES)
def test_what_deepspeeds_engine_raises_on_is_refused(strategy: Any) -> None:
    problems, _ = told(of_strategy(strategy))
    try:
        deepspeed_takes(strategy)
    except (ValueError, NotImplementedError):
        assert {problem.code for problem in problems} & {"compute-grad-norm-bf16", "grad-accum-mix"}


@given(STRATEGIES)
def test_muon_is_refused_by_the_optimizer_that_deepspeed_takes(strategy: Any) -> None:
    """BF16_Optimizer takes no Muon in a pipeline."""
    setup = of_strategy({**strategy, "norm": True, "pipe": 2})
    if not told(setup)[0]:
        codes = {problem.code for problem in told(replace(setup, ds={**setup.ds, **MUON}))[0]}
        taken = deepspeed_takes({**strategy, "norm": True, "pipe": 2})
        assert ("muon-bf16-pipeline" in codes) == (taken == "bf16")
