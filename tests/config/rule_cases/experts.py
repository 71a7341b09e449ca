"""What ranks that share experts cannot do: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from typing import Any

from tests.config.rule_cases.points import BF16, ZERO, Cases, Setup, zero

ON: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
DEGREE = ("expert_parallel", "autoep_size")

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
        Setup(ds={**zero(2, contiguous_gradients=False), **ON}),
        Setup(ds={**zero(1, contiguous_gradients=False), **ON}),
    ),
    ("expert-kernels", ("expert_parallel", "enabled")): (
        Setup(ds=ON, hyperparameters={"torch_compile": True}),
        Setup(ds=ON),
    ),
}
