"""Accelerate's plugin with the reconciled configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from determined_ds.config.resolve import Where, resolve
from determined_ds.errors import ConfigError, Problem
from determined_ds.transformers.here import accelerator_here, num_machines, num_ranks, trial_here


def deepspeed_plugin(**options: Any) -> Any:
    """An ``accelerate.DeepSpeedPlugin`` with the configuration of the trial's hyperparameters, every "auto" filled.

    ``Accelerator(deepspeed_plugin=deepspeed_plugin(), cpu=...)``.

    Args:
        options: Further arguments of ``accelerate.DeepSpeedPlugin``.

    Raises:
        ConfigError: the configuration cannot run, or there is no trial.
    """
    from accelerate import DeepSpeedPlugin

    trial = trial_here()
    if trial is None:
        fix = (
            "start the script by det-ds run or on a cluster, or give DeepSpeedPlugin(hf_ds_config=...) a file"
        )
        raise ConfigError(Problem(key="deepspeed_plugin", message="there is no trial here", fix=fix))
    trial.check_ranks()
    where = Where(
        context_dir=Path.cwd(),
        accelerator=accelerator_here(use_cpu=False),
        slots=num_ranks(),
        machines=num_machines(),
    )
    resolved = resolve(trial.hyperparameters, where)
    return DeepSpeedPlugin(hf_ds_config=resolved.ds_config, **options)
