"""What ranks that share experts cannot do: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from typing import Any

from tests.config.rule_cases.points import BF16, ZERO, Cases, Setup, zero
from tests.making import CPU

ON: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
DEGREE = ("expert_parallel", "autoep_size")
NON_MOE = ("compile", "autoep_non_moe")
AROUND = {"autoep_non_moe": True}


def with_option(option: str, value: object) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": 2, option: value}}


CASES: Cases = {
    ("expert-degree", ("hyperparameters", "expert_parallel_size")): (
        Setup(ds=ON, hyperparameters={"expert_parallel_size": 1}),
        Setup(ds=ON, hyperparameters={"expert_parallel_size": 2}),
    ),
    ("expert-replicas", DEGREE): (Setup(ds=ON, slots=3), Setup(ds=ON, slots=4)),
    ("expert-pipeline", DEGREE): (Setup(ds=ON, pipe=2, slots=4), Setup(ds=ON, slots=4)),
    ("expert-model", DEGREE): (Setup(ds=ON, model=2, slots=4), Setup(ds=ON, slots=4)),
    ("expert-sequence", DEGREE): (Setup(ds=ON, sequence=2, slots=4), Setup(ds=ON, slots=4)),
    ("expert-precision", (ZERO, "stage")): (
        Setup(ds={**zero(0), **BF16, **ON}),
        Setup(ds={**zero(1), **BF16, **ON}),
    ),
    ("expert-zeropp", (ZERO, "zero_hpz_partition_size")): (
        Setup(ds={**zero(3, zero_hpz_partition_size=2), **ON}),
        Setup(ds={**zero(3), **ON}),
    ),
    ("expert-reduce-scatter", (ZERO, "reduce_scatter")): (
        Setup(ds={**zero(1, reduce_scatter=False), **ON}),
        Setup(ds={**zero(3, reduce_scatter=False), **ON}),
    ),
    ("expert-contiguous", (ZERO, "contiguous_gradients")): (
        Setup(ds={**zero(1, contiguous_gradients=False), **ON}),
        Setup(ds={**zero(3, contiguous_gradients=False), **ON}),
    ),
    ("expert-compiler", NON_MOE): (
        Setup(ds=ON, hyperparameters={"torch_compile": True}),
        Setup(ds={**ON, "compile": AROUND}, hyperparameters={"torch_compile": True}),
    ),
    ("expert-compiler-zero", NON_MOE): (
        Setup(ds={**zero(3), **ON, "compile": AROUND}, hyperparameters={"torch_compile": True}),
        Setup(ds={**zero(2), **ON, "compile": AROUND}, hyperparameters={"torch_compile": True}),
    ),
    ("expert-deepcompile", ("compile", "deepcompile")): (
        Setup(ds={**zero(1), **ON, "compile": {"deepcompile": True}}),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
    ),
    **{
        (f"expert-{option.replace('_', '-')}", ("expert_parallel", option)): (
            Setup(ds=with_option(option, value), accelerator=CPU),
            Setup(ds=with_option(option, value)),
        )
        for option, value in (
            ("comm_backend", "deepep"),
            ("async_split_plan", True),
            ("combine_impl", "fused_weighted_sum"),
        )
    },
    ("expert-tensor-parallel", ("expert_parallel", "expert_tensor_parallel_size")): (
        Setup(ds=with_option("expert_tensor_parallel_size", 2)),
        Setup(ds=with_option("expert_tensor_parallel_size", 1)),
    ),
}
