"""Determined's model-parallel unit, made from a DeepSpeed engine's."""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist
from determined.pytorch import deepspeed as det_ds


def DeepSpeedMPU(mpu: Any) -> det_ds.ModelParallelUnit:
    """The unit for ``context.wrap_mpu``, from ``engine.mpu`` of any engine.

    Args:
        mpu: A pipeline engine's grid; an object with Megatron's ``get_data_parallel_rank`` and
            ``get_data_parallel_world_size``; DeepSpeed's ``parallel_state_sp``, whose ranks that share a sequence are
            one replica; or None, as a data-parallel engine has it.

    Returns:
        Determined's unit: this rank's replica, and whether it reads data and reports metrics.

    Source: ``determined.pytorch.deepspeed._mpu`` (0.38.1); the class of this name of its first releases.
    """
    if mpu is None:
        return det_ds.ModelParallelUnit(
            data_parallel_rank=dist.get_rank(),
            data_parallel_world_size=dist.get_world_size(),
            should_report_metrics=True,
            should_build_data_loader=True,
        )
    if hasattr(mpu, "get_pipe_parallel_rank"):
        return det_ds.make_deepspeed_mpu(mpu)
    if hasattr(mpu, "initialize_sequence_parallel"):
        size = mpu.get_sequence_parallel_world_size()
        return det_ds.ModelParallelUnit(
            data_parallel_rank=dist.get_rank() // size,
            data_parallel_world_size=dist.get_world_size() // size,
            should_report_metrics=True,
            should_build_data_loader=True,
        )
    return det_ds.ModelParallelUnit(
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_world_size=mpu.get_data_parallel_world_size(),
        should_report_metrics=True,
        should_build_data_loader=True,
    )
