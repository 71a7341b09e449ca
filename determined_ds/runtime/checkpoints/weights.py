"""The weights alone of an engine that DeepSpeed wrote by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from determined_ds.errors import ConfigError, Problem


def read_own_weights(engine: Any, path: Path, index: int) -> None:
    """Have DeepSpeed fill an engine with its weights alone, of a checkpoint that the same ranks wrote.

    Args:
        engine: One whose tensors cannot be cut, see :func:`~determined_ds.runtime.checkpoints.slices.own_layout`.
        path: The checkpoint's folder.
        index: Of the engine.

    Raises:
        ConfigError: DeepSpeed cannot.
    """
    if getattr(engine, "zero_nvme_offload_optimizer", bool)():
        raise _refused("the optimizer's copy of the weights lies on NVMe, where it cannot be replaced")
    if engine.zero_optimization_partition_weights():
        raise _refused("the weights of a model-parallel engine under ZeRO 3 cannot be read alone")
    engine.load_checkpoint(
        str(path),
        tag=f"model{index}",
        load_optimizer_states=False,
        load_lr_scheduler_states=False,
        load_module_only=True,
    )


def _refused(message: str) -> ConfigError:
    key, fix = (
        "hyperparameters.fit.warm_start",
        "write all, at the ZeRO stage and the slots of the checkpoint",
    )
    return ConfigError(Problem(key=key, value="weights", message=message, fix=fix, code="warm-start"))
