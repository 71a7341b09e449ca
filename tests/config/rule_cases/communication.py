"""What ranks send each other, and in what: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from tests.config.rule_cases.points import AUTOCAST, BF16, ZERO, Cases, Setup, zero
from tests.making import CPU

CASES: Cases = {
    ("zeropp-hpz-stage", (ZERO, "zero_hpz_partition_size")): (
        Setup(ds=zero(2, zero_hpz_partition_size=2)),
        Setup(ds=zero(2, zero_hpz_partition_size=1)),
    ),
    ("zeropp-hpz-size", (ZERO, "zero_hpz_partition_size")): (
        Setup(ds=zero(3, zero_hpz_partition_size=3), slots=4),
        Setup(ds=zero(3, zero_hpz_partition_size=8), slots=4),  # more than there are: all of them
    ),
    **{
        (f"zeropp-quantized-{what}", (ZERO, key)): (broken, Setup(ds=zero(3, **{key: True})))
        for key in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
        for what, broken in (
            ("stage", Setup(ds=zero(2, **{key: True}))),
            ("cuda", Setup(ds=zero(3, **{key: True}), accelerator=CPU)),
        )
    },
    ("zeropp-gradients-machines", (ZERO, "zero_quantized_gradients")): (
        Setup(ds={**BF16, **zero(3, zero_quantized_gradients=True)}, machines=2),
        Setup(
            ds={**BF16, "communication_data_type": "fp16", **zero(3, zero_quantized_gradients=True)},
            machines=2,
        ),
    ),
    ("allreduce-sum", ("gradient_allreduce_op",)): (
        Setup(ds={"gradient_allreduce_op": "SUM", **zero(3)}),
        Setup(ds={"gradient_allreduce_op": "SUM", **zero(2)}),
    ),
    **{
        ("gradients-scaled-before", (key,)): (
            Setup(ds={key: value, **zero(2)}),
            Setup(ds={key: value, **zero(2, reduce_scatter=False)}),
        )
        for key, value in (("prescale_gradients", True), ("gradient_predivide_factor", 2.0))
    },
    ("allgather-bucket-odd", (ZERO, "allgather_bucket_size")): (
        Setup(ds=zero(1, allgather_bucket_size=500_000_001)),
        Setup(ds=zero(3, allgather_bucket_size=500_000_001)),
    ),
    ("allgather-bucket-unheeded", (ZERO, "allgather_bucket_size")): (
        Setup(ds=zero(2, allgather_bucket_size=200_000_000)),
        Setup(ds=zero(2, allgather_bucket_size=500_000_000)),
    ),
    ("autocast-communication", ("communication_data_type",)): (
        Setup(ds={**AUTOCAST, "communication_data_type": "fp16", **zero(1)}),
        Setup(ds={**AUTOCAST, "communication_data_type": "fp16", **zero(0)}),
    ),
    ("sequence-communication", ("communication_data_type",)): (
        Setup(ds={"communication_data_type": "bf16"}, sequence=2),
        Setup(
            ds={"communication_data_type": "bf16", "seq_parallel_communication_data_type": "bf16"}, sequence=2
        ),
    ),
    ("pipeline-overlap", (ZERO, "overlap_comm")): (
        Setup(ds=zero(1, overlap_comm=True), pipe=2),
        Setup(ds=zero(1, overlap_comm=True)),
    ),
    ("zeropp-autocast", (ZERO, "zero_quantized_weights")): (
        Setup(ds={**AUTOCAST, **zero(3, zero_quantized_weights=True)}),
        Setup(ds={**BF16, **zero(3, zero_quantized_weights=True)}),
    ),
    ("zeropp-gradients-scatter", (ZERO, "reduce_scatter")): (
        Setup(ds=zero(3, zero_quantized_gradients=True, reduce_scatter=False)),
        Setup(ds=zero(3, zero_quantized_gradients=True)),
    ),
}
