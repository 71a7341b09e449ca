"""Determined's core context for a script of transformers, on a cluster and under ``det-ds run``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from determined import core

from determined_ds.train.data.seeds import seed_everything
from determined_ds.train.group.distributed import join_process_group
from determined_ds.train.group.peers import leave_peers
from determined_ds.train.logs.attached import reported_to_tools
from determined_ds.train.master.core_context import cluster_core_context
from determined_ds.train.tensorboard_files import upload_files, upload_last
from determined_ds.transformers.here import accelerator_here, trial_here


@contextlib.contextmanager
def init(*, use_cpu: bool = False) -> Iterator[core.Context]:
    """Join the ranks, seed the generators with the trial's seed, and open Determined's core context.

    Args:
        use_cpu: Train on CPUs although there is a GPU.

    Yields:
        The core context for :class:`~determined_ds.transformers.DetCallback`. On a cluster it survives short outages
        of the master, and stops where the searcher stops the trial.
    """
    trial = trial_here()
    devices = accelerator_here(use_cpu=use_cpu)
    distributed = join_process_group(devices)
    if trial is not None:
        seed_everything(trial.task.seed)
    on_cluster = trial is not None and trial.run is None
    with contextlib.ExitStack() as stack:
        if trial is not None and on_cluster:
            context = stack.enter_context(cluster_core_context(distributed))
            # Also what DetCallback records; once the tools have ended, whose files are beside it.
            stack.callback(upload_last, context.train, partial(upload_files, context.train, distributed.rank))
            stack.enter_context(reported_to_tools(context, trial.task, devices))
        else:
            context = stack.enter_context(core.init(distributed=distributed))
        yield context
        leave_peers()  # a rank that fails shows signs of life to its end
