"""The memory model against real DeepSpeed engines on two ranks, at two sizes.

What an engine holds is counted twice: by a walk through its tensors, storage by storage, and by the C library that
the memory came from, which knows nothing of tensors. At the end of the last backward pass all model states are there
and hardly anything else: the batch is eight tokens, the buckets are small.
"""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.config.strategy import Strategy
from determined_ds.memory import Memory, ModelShape, memory_per_rank
from determined_ds.memory.estimate import backward_buffer_bytes
from tests.memory.engines import KINDS, measure, model_parameters
from tests.ranks import Ranks

SIZES = {"2M": (256, 4), "7M": (384, 6)}
WITHIN = 0.10
CASES = [
    *(("fp32", None, stage) for stage in (0, 1, 2, 3)),
    *(("bf16", None, stage) for stage in (0, 1, 2, 3)),
    *(("bf16", "fp32", stage) for stage in (1, 2, 3)),
]


def bucket_of(size: str) -> int:
    """Elements of a bucket that holds the largest parameter, and not much more."""
    hidden, _ = SIZES[size]
    return 4 * hidden**2


def ds_config(strategy: Strategy) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": strategy.zero_stage,
        "reduce_bucket_size": strategy.reduce_bucket_size,
        "stage3_param_persistence_threshold": 0,
    }
    if strategy.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if strategy.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": strategy.accumulation,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": strategy.precision == "bf16"},
        "data_types": {"grad_accum_dtype": strategy.grad_accum_dtype},
    }


def estimated(size: str, strategy: Strategy) -> tuple[ModelShape, Memory]:
    hidden, layers = SIZES[size]
    shape = ModelShape(
        num_parameters=model_parameters(hidden, layers), largest_layer_parameters=4 * hidden * (hidden + 1)
    )
    return shape, memory_per_rank(shape, strategy)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("precision", "grad_accum_dtype", "stage"), CASES)
def test_model_states_are_within_ten_percent(
    size: str, precision: str, grad_accum_dtype: str | None, stage: int, two_ranks: Ranks
) -> None:
    strategy = Strategy(
        zero_stage=stage,
        precision=precision,
        grad_accum_dtype=grad_accum_dtype,
        replicas=2,
        reduce_bucket_size=bucket_of(size),
    )
    shape, memory = estimated(size, strategy)
    for moments in two_ranks.run(measure, *SIZES[size], ds_config(strategy)):
        held = moments["backward ends"]
        walked = {f"{kind}_bytes": held[kind] for kind in KINDS}
        assert sum(walked.values()) == pytest.approx(memory.model_states_bytes, rel=WITHIN)
        for kind in ("parameters_bytes", "optimizer_states_bytes"):
            assert walked[kind] == pytest.approx(getattr(memory, kind), rel=0.01)
        # By the C library: states, buckets, and what of ZeRO 3's gathered parameters is not yet let go.
        bucket = min(backward_buffer_bytes(shape, strategy), 2 * strategy.element_bytes * bucket_of(size))
        states = held["allocated"] - bucket
        assert states == pytest.approx(memory.model_states_bytes, rel=WITHIN)


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("bf16", 1), ("bf16", 3)])
def test_model_states_of_ranks_that_share_layers_are_within_ten_percent(
    precision: str, stage: int, two_ranks: Ranks
) -> None:
    """Tensor parallel: blocks and head are cut in two, the embedding is whole on both."""
    hidden, layers = SIZES["7M"]
    strategy = Strategy(
        zero_stage=stage,
        precision=precision,
        model_parallel_size=2,
        reduce_bucket_size=bucket_of("7M"),
    )
    specs = [
        {"patterns": [".*up.weight"], "partition_type": "column"},
        {"patterns": [f"{layers + 1}.weight"], "partition_type": "column", "gather_output": True},
        {"patterns": [".*down.weight"], "partition_type": "row"},
    ]
    cut = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    shape = ModelShape(num_parameters=model_parameters(hidden, layers), hidden_size=hidden, vocab_size=256)
    memory = memory_per_rank(shape, strategy)
    for moments in two_ranks.run(measure, *SIZES["7M"], {**ds_config(strategy), "tensor_parallel": cut}):
        held = moments["backward ends"]
        walked = {f"{kind}_bytes": held[kind] for kind in KINDS}
        assert sum(walked.values()) == pytest.approx(memory.model_states_bytes, rel=WITHIN)
        for kind in ("parameters_bytes", "optimizer_states_bytes"):
            assert walked[kind] == pytest.approx(getattr(memory, kind), rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_zero_3_gathers_is_in_the_buffers(precision: str, two_ranks: Ranks) -> None:
    """All parameters of a model this small are whole at once when the backward pass begins."""
    strategy = Strategy(zero_stage=3, precision=precision, replicas=2, reduce_bucket_size=bucket_of("7M"))
    _, memory = estimated("7M", strategy)
    for moments in two_ranks.run(measure, *SIZES["7M"], ds_config(strategy)):
        assert moments["backward begins"]["allocated"] == pytest.approx(memory.total_bytes, rel=WITHIN)


@pytest.mark.parametrize(
    ("stage", "offload_param", "accumulation"),
    [(1, False, 1), (2, False, 1), (2, False, 2), (3, False, 1), (3, True, 1)],
)
def test_offloaded_states_are_on_the_host(
    stage: int, offload_param: bool, accumulation: int, two_ranks: Ranks
) -> None:
    """Here the host is the device, so that it is the sum that is seen."""
    strategy = Strategy(
        zero_stage=stage,
        offload_optimizer="cpu",
        offload_param=offload_param,
        accumulation=accumulation,
        replicas=2,
        reduce_bucket_size=bucket_of("7M"),
    )
    _, memory = estimated("7M", strategy)
    for moments in two_ranks.run(measure, *SIZES["7M"], ds_config(strategy)):
        in_all = memory.total_bytes + memory.host_bytes
        most = max(held["allocated"] for held in moments.values())
        assert most == pytest.approx(in_all, rel=WITHIN)
