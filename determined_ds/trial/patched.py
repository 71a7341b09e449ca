"""The names of DeepSpeed, Determined and torch that this library replaces or overrides, and that no version promises.

Where one is gone, a correction would vanish silently, and a training would run on other numbers: so a start without one
is refused.
"""

from __future__ import annotations

import functools
import pkgutil
from importlib.metadata import version

from determined_ds.errors import ConfigError, Problem

# A module or a class, and its names.
PATCHED = {
    "deepspeed": "PipelineEngine set_optimizer_flags",
    "deepspeed.comm.comm": "timers comms_logger",
    "deepspeed.utils.groups": "_init_tp_mesh_device _get_expert_parallel_group",
    "deepspeed.runtime.compiler": "compile",
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.runtime.engine:DeepSpeedEngine": """_backward_prologue _backward_prologue_per_tensor backward scale
        _apply_autotp_partitioning _configure_expert_parallel _get_optimizer_loss_scale clip_fp32_gradients
        _scale_loss_by_gas _start_timers _stop_timers""",
    "deepspeed.runtime.pipe.engine:PipelineEngine": """_INSTRUCTION_MAP _exec_schedule _send_tensor_meta
        _recv_tensor_meta _allocate_or_extend_buffers _exec_load_micro_batch _exec_forward_pass _exec_backward_pass
        _loss_stage_global_rank _train_schedule _inference_schedule""",
    "deepspeed.runtime.pipe.module:PipelineModule": """_partition_layers _build _set_bounds
        _precompute_checkpointable_values""",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": """
        _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads""",
    "determined.pytorch.deepspeed:DeepSpeedTrialContext": "_init_device",
    "determined.core._checkpoint:CheckpointContext": "_report_checkpoint",
    "determined.core._metrics:_Shipper": "_post_metrics",
    "determined.core:DistributedContext": "_init_ipc",
    "determined.core._context": "init",
    "determined._info": "_info",
    "torch.distributed.distributed_c10d": """default_pg_timeout default_pg_nccl_timeout _set_pg_timeout
        _get_default_store""",
}
TESTED = {"deepspeed": "0.19.8", "determined": "0.38.1", "torch": "2.13.0"}


@functools.cache
def check_upstream() -> None:
    """Check that the installed versions have every name that is replaced or overridden.

    Raises:
        ConfigError: one lacks a name.
    """
    problems = []
    for place, names in PATCHED.items():
        try:
            owner = pkgutil.resolve_name(place if ":" in place else f"{place}:")
        except (ImportError, AttributeError):
            owner = None
        if lacking := [name for name in names.split() if not hasattr(owner, name)]:
            package = place.partition(".")[0]
            message = f"{place} has no {', '.join(lacking)}, which is replaced here: it would train on other numbers"
            fix, key = f"pip install {package}=={TESTED[package]}", f"{package} {version(package)}"
            problems.append(Problem(key=key, message=message, fix=fix, code="upstream-names"))
    if problems:
        raise ConfigError(problems)
