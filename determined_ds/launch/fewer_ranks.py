"""``--elastic``: a rank is lost for good, and the run continues on those that are left.

A rank is lost where it ends a run twice in a row, with no new checkpoint in between: another start has not helped. On
GPUs its device is left out from then on; on CPUs there is one rank fewer.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.variables import Variables
from determined_ds.launch.auto_slots import elastic_slots
from determined_ds.protocol.checkpoint_files import Checkpoint
from determined_ds.protocol.elastic import data_refusal, elastic_refusal

if TYPE_CHECKING:
    from determined_ds.launch.local_run import LocalRun

VISIBLE = "CUDA_VISIBLE_DEVICES"


def without_rank(run: LocalRun, rank: int, checkpoint: Checkpoint | None) -> LocalRun:
    """A run on the ranks that are left.

    Args:
        run: That has lost a rank.
        rank: Which.
        checkpoint: To resume from; None: from step 0.

    Raises:
        ConfigError: it cannot continue on fewer ranks.
    """
    assert run.options.elastic is not None
    if checkpoint is not None and (reason := elastic_refusal(checkpoint.path)):
        raise ConfigError(_problem(run, f"checkpoint {checkpoint.uuid} cannot be read by fewer: {reason}"))
    least, most = run.options.elastic
    accelerator, variables, left = run.accelerator, run.variables, run.experiment.slots - 1
    if accelerator.name == "cuda":
        devices = _devices(run)
        devices.pop(rank)
        left = len(devices)
        accelerator = replace(accelerator, num_devices=left)
        variables = replace(variables, values={**variables.values, VISIBLE: ",".join(devices)})
    fewer, resolved = elastic_slots(
        run.experiment, (least, min(most, left)), context_dir=run.context_dir, accelerator=accelerator
    )
    if checkpoint is not None and resolved is not None:
        batch = resolved.batch
        reason = data_refusal(
            checkpoint.path, replicas=batch.replicas, micro_batch_size=batch.micro_batch_size
        )
        if reason:
            raise ConfigError(_problem(run, reason))
    return replace(run, experiment=fewer, resolved=resolved, accelerator=accelerator, variables=variables)


def _devices(run: LocalRun) -> list[str]:
    """The GPUs of the ranks, in their order, by the names that CUDA takes; rank R computes on the R-th."""
    variables: Variables = run.variables
    named = variables.values.get(VISIBLE) or os.environ.get(VISIBLE)
    if named:
        return [name.strip() for name in named.split(",")]
    return [str(number) for number in range(run.accelerator.num_devices)]


def _problem(run: LocalRun, message: str) -> Problem:
    fix = f"repair what ended it, and resume on {run.experiment.slots} slots"
    return Problem(key="--elastic", message=message, fix=fix, code="elastic")
