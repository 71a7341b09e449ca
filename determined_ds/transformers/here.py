"""What this process trains: the trial that a cluster or ``det-ds run`` runs, as a script of transformers needs it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import determined as det

from determined_ds.config.layout import Accelerator
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Task
from determined_ds.train.scripts.given_run import ScriptRun, cluster_trial, script_run, task_of
from determined_ds.train.upstream import load_deepspeed


@dataclass(frozen=True, kw_only=True)
class TrialHere:
    """A trial, and the rank that this process is.

    Args:
        task: What is to be trained.
        latest_checkpoint: Uuid of the checkpoint to resume from, or None.
        run: The run of ``det-ds run``; None on a cluster.
    """

    task: Task
    latest_checkpoint: str | None
    run: ScriptRun | None

    @property
    def hyperparameters(self) -> Document:
        """Of the trial; off-cluster with their places in the YAML."""
        return self.task.hyperparameters if self.run is None else self.run.experiment.hyperparameters

    @property
    def searcher(self) -> dict[str, Any]:
        """``searcher`` of the experiment."""
        return dict((self.task.exp_conf or {}).get("searcher") or {})

    def check_ranks(self) -> None:
        """Check that the ranks are those that the experiment requests.

        Raises:
            ConfigError: they are not.
        """
        if self.run is None and self.task.slots not in (None, num_ranks()):
            message = f"{num_ranks()} rank{'s' if num_ranks() > 1 else ''} started for them"
            fix = "start the script with python3 -m determined.launch.torch_distributed"
            key = "resources.slots_per_trial"
            raise ConfigError(Problem(key=key, value=self.task.slots, message=message, fix=fix, code="ranks"))


def trial_here() -> TrialHere | None:
    """The trial that this process trains; None where neither a cluster nor ``det-ds run`` has started it."""
    run, info = script_run(), det.get_cluster_info()
    task = cluster_trial() if run is None else task_of(run.experiment)
    if task is None or info is None:
        return None
    return TrialHere(task=task, latest_checkpoint=info.latest_checkpoint or None, run=run)


def accelerator_here(*, use_cpu: bool) -> Accelerator:
    """What this rank computes on; DeepSpeed is loaded for it.

    Args:
        use_cpu: Whether the arguments of transformers say so.
    """
    run = script_run()
    found = detect_accelerator("cpu" if use_cpu else run.accelerator if run else None)
    load_deepspeed(found.name)
    return found


def num_ranks() -> int:
    """The ranks in all, by the launcher's variables."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_machines() -> int:
    """The machines that the ranks are on."""
    named = (os.environ.get(name) for name in ("CROSS_SIZE", "GROUP_WORLD_SIZE"))
    return max(1, int(next((value for value in named if value), "1")))


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


def missing_ranks(seen: int, fix: str) -> Problem | None:
    """The problem of ranks that do not see each other; None where all are seen.

    Without a GPU, accelerate takes each rank for the only one unless CPUs are requested. DeepSpeed would still
    train over all ranks, with each of them reading all of the data.

    Args:
        seen: Ranks that transformers or accelerate sees.
        fix: What to write.
    """
    if seen == num_ranks():
        return None
    message = f"accelerate sees {seen} of {num_ranks()} ranks: each would train on all of the data"
    return Problem(key="ranks", value=seen, message=message, fix=fix, code="ranks")
