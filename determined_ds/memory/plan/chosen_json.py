"""The DeepSpeed JSON of a strategy that was planned."""

from __future__ import annotations

from typing import Any

from determined_ds.config.deepspeed.create import create_deepspeed_config, create_offload_config
from determined_ds.config.strategy import Strategy
from determined_ds.memory.plan.needs import PlanRequest


def deepspeed_json(needs: PlanRequest, strategy: Strategy) -> dict[str, Any]:
    """The mapping, with what DeepSpeed or a run fills in left out.

    Args:
        needs: What was planned for.
        strategy: What was chosen.
    """
    offload = None
    if strategy.offload_optimizer:
        nvme = needs.offload == "nvme"
        offload = create_offload_config("nvme" if nvme else "cpu", nvme_path=needs.nvme_path or None)
    return create_deepspeed_config(
        zero_stage=strategy.zero_stage,
        micro_batch_size=strategy.micro_batch_size,
        precision=needs.precision,  # type: ignore[arg-type]
        offload_optimizer=offload,
        offload_param=offload if strategy.offload_param else None,
        contiguous_gradients=strategy.overlap_comm,
        overlap_comm=strategy.overlap_comm,
        stage3_gather_16bit_weights_on_model_save=True if strategy.zero_stage == 3 else None,
        grad_accum_dtype=strategy.grad_accum_dtype,  # type: ignore[arg-type]
    )
