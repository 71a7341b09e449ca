"""What ranks that share a layer cannot do: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from typing import Any

from tests.config.rule_cases.points import ZERO, Cases, Setup, zero


def cut(**settings: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": 2, **settings}}


CASES: Cases = {
    ("model-parallel-degree", ("tensor_parallel", "autotp_size")): (
        Setup(ds=cut(), model=1),
        Setup(ds=cut(), model=2),
    ),
    ("tensor-tp-size", ("tensor_parallel", "tp", "tp_size")): (
        Setup(ds=cut(tp={"tp_size": 4}), model=2),
        Setup(ds=cut(tp={"tp_size": 2}), model=2),
    ),
    ("tensor-pipeline", ("tensor_parallel", "autotp_size")): (
        Setup(ds=cut(), model=2, pipe=2, slots=4),
        Setup(ds=cut(), model=2, slots=4),
    ),
    ("tensor-zeropp", (ZERO, "zero_hpz_partition_size")): (
        Setup(ds={**zero(3, zero_hpz_partition_size=2), **cut()}, model=2, slots=4),
        Setup(ds={**zero(3), **cut()}, model=2, slots=4),
    ),
    ("tensor-head", ("tensor_parallel", "vocab_parallel_lm_head")): (
        Setup(ds=cut(vocab_parallel_lm_head=True), model=2),
        Setup(ds=cut(), model=2),
    ),
}
