"""What this process trains: the trial of a cluster or of ``det-ds run``, and the core context of its script."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from determined import core

from determined_ds.cluster.core_context import cluster_core_context
from determined_ds.config.layout import Accelerator
from determined_ds.devices import detect_accelerator
from determined_ds.train.data.seeds import seed_everything
from determined_ds.train.group.process_group import join_process_group, load_deepspeed
from determined_ds.train.group.watch import leave_watch
from determined_ds.train.here import Here, here, report_to_tools, script_run


def trial_here() -> Here | None:
    """The trial that this process trains; None where neither a cluster nor ``det-ds run`` has started it.

    Raises:
        ConfigError: on a cluster, the ranks are not those that the experiment requests.
    """
    trial = here()
    if trial is not None:
        trial.check_ranks(num_ranks())
    return trial


def accelerator_here(*, use_cpu: bool) -> Accelerator:
    """What this rank computes on, ``use_cpu`` being transformers' argument; DeepSpeed is loaded for it."""
    run = script_run()
    found = detect_accelerator("cpu" if use_cpu else run.accelerator if run else None)
    load_deepspeed(found.name)
    return found


def num_ranks() -> int:
    """The ranks in all, by the launcher's variables."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_chief() -> bool:
    """Whether this is rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def placed(output_dir: str | None) -> str | None:
    """Where transformers writes: off-cluster, a relative folder is one of the run directory.

    Two runs of one script, as those of a search, would overwrite each other's checkpoints otherwise.
    """
    run = script_run()
    if run is None or (output_dir is not None and Path(output_dir).is_absolute()):
        return output_dir
    return str(run.run_dir.absolute() / (output_dir or "trainer_output"))


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
        seed_everything(trial.seed)
    with contextlib.ExitStack() as stack:
        if trial is not None and trial.on_cluster:
            context = stack.enter_context(cluster_core_context(distributed))
            stack.enter_context(report_to_tools(context))
        else:
            context = stack.enter_context(core.init(distributed=distributed))
        yield context
        leave_watch()  # a rank that fails shows signs of life to its end
