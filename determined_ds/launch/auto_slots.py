"""``--slots auto``: the experiment's slots, or as many of them as fit."""

from __future__ import annotations

from pathlib import Path

from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import Where
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import decide_stated, with_flags
from determined_ds.experiment.experiment import Experiment, parse_experiment


def fitting_slots(
    experiment: Experiment, *, context_dir: Path, accelerator: Accelerator
) -> tuple[Experiment, list[Problem]]:
    """An experiment on as many of its slots as a machine can run and its batch and stages divide by.

    Args:
        experiment: Its slots are the most that are used.
        context_dir: Where the DeepSpeed JSON is.
        accelerator: This machine's.

    Returns:
        The experiment, and a warning where it has fewer slots than it states. It is unchanged where the machine has
        enough, and where no number works: its problems are then reported for the slots that it states.
    """
    if experiment.slots <= accelerator.max_ranks:
        return experiment, []
    for slots in range(accelerator.max_ranks, 0, -1):
        fewer = parse_experiment(
            with_flags(experiment.document, slots=slots, overrides=(), origin="--slots auto")
        )
        try:
            decide_stated(
                fewer, fewer.hyperparameters, Where(context_dir=context_dir, accelerator=accelerator)
            )
        except ConfigError:
            continue
        return fewer, [_fewer(experiment, accelerator, slots)]
    return experiment, []


def _fewer(experiment: Experiment, accelerator: Accelerator, slots: int) -> Problem:
    message = f"this machine can run {accelerator.max_ranks} on {accelerator.name}; using {slots}"
    fix = f"use a machine with {experiment.slots} devices, or --accelerator cpu"
    return experiment.document.problem(("resources", "slots_per_trial"), message, fix, "fewer-slots")
