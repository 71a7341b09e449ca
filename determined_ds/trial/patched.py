"""The names of DeepSpeed, Determined and torch that this library replaces or overrides, and that no version promises.

Where one is gone, a correction would vanish silently, and a training would run on other numbers: so a start without one
is refused.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import version

from determined_ds.errors import ConfigError, Problem

# Module, "" or a class in it, and the names.
PATCHED = (
    ("deepspeed", "", "PipelineEngine set_optimizer_flags"),
    ("deepspeed.comm.comm", "", "timers comms_logger"),
    ("deepspeed.utils.groups", "", "_init_tp_mesh_device _get_expert_parallel_group"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "_backward_prologue _backward_prologue_per_tensor"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "_apply_autotp_partitioning _configure_expert_parallel"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "_get_optimizer_loss_scale _report_progress"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "clip_fp32_gradients scale backward"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "_scale_loss_by_gas _start_timers _stop_timers"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine", "_INSTRUCTION_MAP _exec_schedule _send_tensor_meta"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine", "_recv_tensor_meta _allocate_or_extend_buffers"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine", "_exec_load_micro_batch _exec_forward_pass"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine", "_exec_backward_pass _loss_stage_global_rank"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine", "_train_schedule _inference_schedule"),
    ("deepspeed.runtime.pipe.module", "PipelineModule", "_partition_layers _build _set_bounds"),
    ("deepspeed.runtime.pipe.module", "PipelineModule", "_precompute_checkpointable_values"),
    (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    ),
    ("determined.pytorch.deepspeed", "DeepSpeedTrialContext", "_init_device"),
    ("determined.core._checkpoint", "CheckpointContext", "_report_checkpoint"),
    ("determined.core._metrics", "_Shipper", "_post_metrics"),
    ("determined.core", "DistributedContext", "_init_ipc"),
    ("determined.core._context", "", "init"),
    ("determined._info", "", "_info"),
    ("deepspeed.runtime.compiler", "", "compile"),
    ("deepspeed.ops", "", "__compatible_ops__"),
    ("torch.distributed.distributed_c10d", "", "default_pg_timeout default_pg_nccl_timeout _set_pg_timeout"),
    ("torch.distributed.distributed_c10d", "", "_get_default_store"),
)
TESTED = {"deepspeed": "0.19.8", "determined": "0.38.1", "torch": "2.13.0"}


@functools.cache
def check_upstream() -> None:
    """Check that the installed versions have every name that is replaced or overridden.

    Raises:
        ConfigError: one lacks a name.
    """
    missing: dict[str, list[str]] = {}
    for module, kind, names in PATCHED:
        package = module.partition(".")[0]
        try:
            owner = importlib.import_module(module)
            owner = getattr(owner, kind) if kind else owner
            lacking = [name for name in names.split() if not hasattr(owner, name)]
        except (ImportError, AttributeError):
            lacking = names.split()
        missing.setdefault(package, []).extend(f"{kind or module}.{name}" for name in lacking)
    problems = [
        Problem(
            key=f"{package} {version(package)}",
            message=f"has no {', '.join(names)}, which this library replaces: it would train on other numbers",
            fix=f"pip install {package}=={TESTED[package]}",
            code="upstream-names",
        )
        for package, names in missing.items()
        if names
    ]
    if problems:
        raise ConfigError(problems)
