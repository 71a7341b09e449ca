"""``det-ds run --slots auto``: the slots that an experiment asks for, or as many of them as this machine carries."""

from __future__ import annotations

from pathlib import Path

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.resolve import Where
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import decide, laid_over
from determined_ds.experiment.experiment import Experiment, parse_experiment

ORIGIN = "--slots auto"


def fitting_slots(
    experiment: Experiment, *, context_dir: Path, accelerator: Accelerator
) -> tuple[Experiment, list[Problem]]:
    """An experiment on as many of its slots as a machine carries and its batch and its stages can be laid out on.

    Args:
        experiment: Its slots are the most that are taken.
        context_dir: Where the DeepSpeed JSON is.
        accelerator: This machine's.

    Returns:
        The experiment, and a warning where it has fewer slots than it asked for. It is as it was where there are
        enough, and where no number would do: its problems are then reported for the slots that it states.
    """
    if experiment.slots <= accelerator.max_ranks:
        return experiment, []
    for slots in range(accelerator.max_ranks, 0, -1):
        fewer = _on(experiment.document, slots)
        try:
            decide(fewer, fewer.hyperparameters, Where(context_dir=context_dir, accelerator=accelerator))
        except ConfigError:
            continue
        return fewer, [_fewer(experiment, accelerator, slots)]
    return experiment, []


def _on(document: Document, slots: int) -> Experiment:
    return parse_experiment(laid_over(document, slots=slots, overrides=(), origin=ORIGIN))


def _fewer(experiment: Experiment, accelerator: Accelerator, slots: int) -> Problem:
    path = ("resources", "slots_per_trial")
    carries = f"this machine carries {accelerator.max_ranks} on {accelerator.name}"
    return Problem(
        key="resources.slots_per_trial",
        value=experiment.slots,
        origin=experiment.document.origin(path),
        message=f"{carries}: {slots} {'is' if slots == 1 else 'are'} taken",
        fix=f"use a machine with {experiment.slots} devices, or --accelerator cpu",
        code="fewer-slots",
    )
