"""Determined's own trial context and trainer on CPUs, to compare with. Imported in ranks only."""

from __future__ import annotations

import logging
from typing import Any

import torch
from determined import core
from determined.pytorch import deepspeed as det_ds

from determined_ds import DeepSpeedTrialContext


class _OnCPU(det_ds.DeepSpeedTrialContext):
    def _init_device(self) -> None:
        self.device = torch.device("cpu")


def determined_context(
    ours: DeepSpeedTrialContext,
    hparams: dict[str, Any],
    checkpoint_storage: str | None = None,
    **ports: int,
) -> det_ds.DeepSpeedTrialContext:
    """Determined's own context, on CPU, of the ranks of ``ours``; they talk over sockets of its own.

    ``ports`` are ``pub_port`` and ``pull_port``, the same for every run on a machine unless they are stated.
    """
    logging.getLogger("determined").setLevel(logging.ERROR)
    distributed = core.DistributedContext(
        rank=ours.distributed.rank,
        size=ours.distributed.size,
        local_rank=ours.distributed.local_rank,
        local_size=ours.distributed.local_size,
        cross_rank=0,
        cross_size=1,
        **ports,
    )
    path = ours.get_tensorboard_path()
    context = core._dummy_init(
        distributed=distributed,
        checkpoint_storage=checkpoint_storage or str(path.parent / "theirs"),
        tensorboard_path=path,
    )
    context.start()
    return _OnCPU(
        core_context=context,
        trial_seed=0,
        hparams=hparams,
        slots_per_trial=ours.distributed.size,
        num_gpus=0,
        exp_conf={},
        steps_completed=0,
    )
