"""Accelerate with the reconciled configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from determined_ds.config.resolve import Where, resolve
from determined_ds.errors import ConfigError, Problem
from determined_ds.transformers.filling import with_zero
from determined_ds.transformers.here import (
    accelerator_here,
    missing_ranks,
    num_machines,
    num_ranks,
    trial_here,
)

MIXED = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


def accelerator(**options: Any) -> Any:
    """An ``accelerate.Accelerator`` that trains with the trial's hyperparameters and DeepSpeed JSON, on CPUs too.

    Every ``"auto"`` is filled; ``accelerator.resolved`` is what was decided, e.g. ``resolved.batch.micro_batch_size``.

    Args:
        options: Further arguments of ``accelerate.Accelerator``.

    Returns:
        The accelerator.

    Raises:
        ConfigError: the configuration cannot run, there is no trial, or accelerate does not see all ranks.

    Source: ``PartialState`` in accelerate 1.15's ``state.py``: without a GPU, a rank takes itself for the only one,
    unless a state for CPUs was made before; ``transformers.TrainingArguments`` makes one in the same way.
    """
    import accelerate

    trial = trial_here()
    if trial is None:
        fix = "start the script by det-ds run or on a cluster"
        raise ConfigError(
            Problem(key="determined_ds.transformers.accelerator", message="needs a trial", fix=fix)
        )
    trial.check_ranks()
    where = Where(
        context_dir=Path.cwd(),
        accelerator=accelerator_here(use_cpu=False),
        slots=num_ranks(),
        machines=num_machines(),
    )
    resolved = resolve(trial.hyperparameters, where)
    if resolved.accelerator.name == "cpu":
        accelerate.PartialState(cpu=True)
    made = accelerate.Accelerator(
        deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=with_zero(resolved.ds_config)),
        mixed_precision=MIXED[resolved.strategy.precision],
        gradient_accumulation_steps=resolved.batch.accumulation,
        **options,
    )
    if problem := missing_ranks(
        made.num_processes, "make the accelerator before anything else of accelerate"
    ):
        raise ConfigError(problem)
    made.resolved = resolved
    return made
