"""How many slots: ``--slots auto``, the experiment's or as many of them as fit; ``--elastic``, within bounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import decide_stated, with_flags
from determined_ds.experiment.experiment import Experiment, parse_experiment

ORIGIN, ELASTIC = "--slots auto", "--elastic"


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
        fewer = _on(experiment.document, slots)
        try:
            decide_stated(
                fewer, fewer.hyperparameters, Where(context_dir=context_dir, accelerator=accelerator)
            )
        except ConfigError:
            continue
        return fewer, [_fewer(experiment, accelerator, slots)]
    return experiment, []


def elastic_slots(
    experiment: Experiment, bounds: tuple[int, int], *, context_dir: Path, accelerator: Accelerator
) -> tuple[Experiment, ResolvedConfig | None]:
    """An experiment on as many slots as a machine can run, within bounds, and its batch and stages divide by.

    Args:
        experiment: Its own slots do not count.
        bounds: The fewest and the most.
        context_dir: Where the DeepSpeed JSON is.
        accelerator: This machine's.

    Returns:
        The experiment, and what was decided; None where its code decides it.

    Raises:
        ConfigError: no number of slots within the bounds can run; why, of the largest.
    """
    least, most = bounds[0], min(bounds[1], accelerator.max_ranks)
    first: ConfigError | None = None
    for slots in range(most, least - 1, -1):
        fewer = replace(_on(experiment.document, slots, ELASTIC), hyperparameters=experiment.hyperparameters)
        try:
            there = Where(context_dir=context_dir, accelerator=accelerator)
            return fewer, decide_stated(fewer, fewer.hyperparameters, there, here=True)
        except ConfigError as error:
            first = first or error
    message = f"{most} {'is' if most == 1 else 'are'} left, and {least} is the least"
    if first is not None:
        message = (
            f"none of {least} to {most} slots can run this experiment; {most}: {first.problems[0].message}"
        )
    fix = "give other bounds, or a global_batch_size that divides by more numbers of replicas"
    raise ConfigError(
        Problem(key=ELASTIC, value="{}:{}".format(*bounds), message=message, fix=fix, code="elastic")
    )


def _on(document: Document, slots: int, origin: str = ORIGIN) -> Experiment:
    return parse_experiment(with_flags(document, slots=slots, overrides=(), origin=origin))


def _fewer(experiment: Experiment, accelerator: Accelerator, slots: int) -> Problem:
    message = f"this machine can run {accelerator.max_ranks} on {accelerator.name}; using {slots}"
    fix = f"use a machine with {experiment.slots} devices, or --accelerator cpu"
    return experiment.document.problem(("resources", "slots_per_trial"), message, fix, "fewer-slots")
