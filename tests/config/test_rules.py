"""The compatibility table: each rule by configurations that break it, and a neighbour that does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.deciding import told
from tests.config.rule_cases import CASES, MUON, adam, of, sums, zero
from tests.package import Rule, decide, rules

OPTIONS = {
    "precision": ["bf16", "bf16", "fp32"],
    "sums": ["fp32", "bf16"],
    "stage": [0, 1, 1, 2],
    "offload": [False, True],
    "norm": [False, True],
    "pipe": [1, 2],
}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule.code}:{rule.key}")
def test_a_rule_is_broken_and_kept_by_the_neighbour_which_deepspeed_reads(
    rule: Rule, deepspeed_config: Callable[..., Any]
) -> None:
    *broken, neighbour = CASES[rule.code, rule.key]
    for case in broken:
        problems, warnings = told(**case)
        (found,) = [each for each in (warnings if rule.warning else problems) if each.code == rule.code]
        assert (found.key, bool(problems)) == (rule.key, not rule.warning)
        assert found.fix
        assert not re.search(r"[{}]", found.message)
        assert "secret" not in f"{found.value}"
    problems, warnings = told(**neighbour)
    assert problems == []
    assert (rule.code, rule.key) not in [(each.code, each.key) for each in warnings]
    resolved = decide(**neighbour)
    deepspeed_config(resolved.ds_config, resolved.topology.data_parallel_world_size)


# ---------------------------------------------------------------------------------------- what DeepSpeed says of them


def codes(case: dict[str, Any]) -> set[str]:
    return {problem.code for problem in told(**case)[0]}


def test_the_optimizers_of_zero_are_deepspeeds_own() -> None:
    import torch
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for name, kind in vars(torch.optim).items():
        if (
            isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Muon"
        ):  # DeepSpeed's own
            refused = "zero-untested-optimizer" in codes(of({**zero(1), **adam(name)}))
            assert refused == (kind not in ZERO_SUPPORTED_OPTIMIZERS), name


def deepspeed_takes(strategy: dict[str, Any]) -> str | None:
    """What DeepSpeed's engine wraps AdamW in; an error where it raises."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import utils

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    engine = SimpleNamespace(
        get_data_types=lambda: (dtypes[strategy["precision"]], dtypes[strategy["sums"]]),
        zero_optimization=lambda: strategy["stage"] > 0,
        zero_optimization_stage=lambda: strategy["stage"],
        zero_cpu_offload=lambda: strategy["offload"],
        zero_compute_grad_norm=lambda: strategy["norm"],
        pipeline_parallelism=strategy["pipe"] > 1,
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with mock.patch.object(utils.dist, "get_rank", return_value=1):  # which logs nothing
        taken: str | None = DeepSpeedEngine._do_optimizer_sanity_check(engine, optimizer)
    return taken


@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}))
def test_what_deepspeeds_engine_raises_on_is_refused_and_muon_where_it_takes_bf16_optimizer(
    strategy: dict[str, Any],
) -> None:
    """Without clipping, which needs the norm. BF16_Optimizer takes no Muon in a pipeline."""
    settings = {} if strategy["norm"] else {"compute_grad_norm": False}
    settings |= {"offload_optimizer": {"device": "cpu"}} if strategy["offload"] else {}
    ds = {**zero(strategy["stage"], **settings), **sums(strategy["sums"]), "gradient_clipping": 0}
    ds |= {"bf16": {"enabled": strategy["precision"] == "bf16"}}
    found = codes(of(ds, pipe=strategy["pipe"], slots=4))
    try:
        taken = deepspeed_takes(strategy)
    except (ValueError, NotImplementedError):
        assert found & {"compute-grad-norm-bf16", "grad-accum-mix"}
        return
    if strategy["pipe"] == 2 and not found:
        with_muon = codes(of({**ds, **MUON}, pipe=2, slots=4))
        assert ("muon-bf16-pipeline" in with_muon) == (taken == "bf16")
