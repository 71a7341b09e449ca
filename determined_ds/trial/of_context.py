"""What a context decides for its trial: the configuration, the hyperparameters with its numbers, the unit of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed.comm as dist
from determined import pytorch
from determined.pytorch import deepspeed as det_ds

from determined_ds.config.resolve import ResolvedConfig, Where, resolve
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document
from determined_ds.trial.author import refused


def completed_hparams(
    data: dict[str, Any], resolved: ResolvedConfig, ds_config_path: Path | None = None
) -> dict[str, Any]:
    """The hyperparameters with the derived ones filled in, as ``args`` for ``deepspeed.initialize``.

    ``deepspeed_config`` becomes the path of the JSON that DeepSpeed is given; unchanged without a path.
    """
    return {
        **data,
        "global_batch_size": resolved.batch.global_batch_size,
        "data_parallel_world_size": resolved.topology.data_parallel_world_size,
        "pipe_parallel_size": resolved.topology.pipe_parallel_size,
        "model_parallel_size": resolved.topology.model_parallel_size,
        "sequence_parallel_size": resolved.topology.sequence_parallel_size,
        "train_micro_batch_size_per_gpu": resolved.batch.micro_batch_size,
        "gradient_accumulation_steps": resolved.batch.accumulation,
        **({} if ds_config_path is None else {"deepspeed_config": str(ds_config_path)}),
    }


def resolved_of(context: det_ds.DeepSpeedTrialContext) -> ResolvedConfig:
    """The reconciled configuration of a context: ours has it, for Determined's own it is made here.

    Raises:
        ConfigError: it cannot run; or the context is a PyTorchTrial's, with which Determined (0.38.1) loads trials.
    """
    if isinstance(context, pytorch.PyTorchTrialContext):
        message = "Determined's load_trial_from_checkpoint_path takes a PyTorchTrial, not a DeepSpeedTrial"
        fix = "determined_ds.load_model_from_checkpoint_path(path) returns the trained model"
        raise refused("context", message, fix, "context", value=type(context).__name__)
    resolved = getattr(context, "resolved", None)
    if isinstance(resolved, ResolvedConfig):
        return resolved
    ranks = context.distributed
    accelerator, here = detect_accelerator(), Path.cwd()
    where = Where(context_dir=here, accelerator=accelerator, slots=ranks.size, machines=ranks.cross_size)
    data = context.get_hparams()
    return resolve(Document(name="hyperparameters", data=data, prefix="hyperparameters"), where)


def DeepSpeedMPU(mpu: Any) -> det_ds.ModelParallelUnit:
    """Determined's unit for ``context.wrap_mpu``: this rank's replica, and whether it reads data and reports metrics.

    Args:
        mpu: ``engine.mpu`` of any engine: a pipeline engine's grid; an object with Megatron's methods; DeepSpeed's
            ``parallel_state_sp``, whose ranks that share a sequence are one replica; or None, of a data-parallel one.

    Source: ``determined.pytorch.deepspeed._mpu`` (0.38.1); the class of this name of its first releases.
    """
    if hasattr(mpu, "get_pipe_parallel_rank"):
        return det_ds.make_deepspeed_mpu(mpu)
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):
        size = 1 if mpu is None else mpu.get_sequence_parallel_world_size()
        rank, replicas = dist.get_rank() // size, dist.get_world_size() // size
    else:
        rank, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    return det_ds.ModelParallelUnit(
        data_parallel_rank=rank,
        data_parallel_world_size=replicas,
        should_report_metrics=True,
        should_build_data_loader=True,
    )
