"""What will run, for a command: CONFIG and CONTEXT_DIR -> Experiment -> ResolvedConfig."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from determined_ds.config.params import read_hyperparameters
from determined_ds.config.resolve import ResolvedConfig, Where, missing_packages, resolve
from determined_ds.documents.document import Document
from determined_ds.documents.files import read_yaml
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.experiment import SLOTS, Experiment, with_flags
from determined_ds.experiment.secrets import restored

T = TypeVar("T")

# A JSON that has one of these is an experiment, which Determined reads too; any other is DeepSpeed's.
OF_EXPERIMENTS = frozenset({"entrypoint", "hyperparameters", "searcher", "resources"})
# Codes of problems with what code may state: the batch, and what a DeepSpeed JSON leaves open.
LEFT_OPEN = ("batch-missing", "auto-undetermined")


class Problems:
    """Collects every problem of several steps, to report all of them at once, and the warnings beside them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []

    def of(self, step: Callable[[], T]) -> T | None:
        """What a step returns; None where it finds problems, which are kept."""
        try:
            return step()
        except ConfigError as error:
            self.problems.extend(problem for problem in error.problems if problem not in self.problems)
            self.warn(error.warnings)
            return None

    def warn(self, warnings: Iterable[Problem]) -> None:
        """Keep warnings, each once."""
        self.warnings.extend(warning for warning in warnings if warning not in self.warnings)

    def raise_any(self) -> None:
        if self.problems:
            raise ConfigError(self.problems, self.warnings)


def read_document(
    config: Path,
    context_dir: Path,
    *,
    slots: int | None = None,
    overrides: Iterable[str] = (),
    trains: bool = True,
) -> Document:
    """The experiment's YAML, overwritten by ``--slots`` and ``--set``, for a ``det-ds`` command.

    One that ``trains`` needs the secrets too that are not stored in it.

    Raises:
        ConfigError: there is no such file or folder, or it cannot be read.
    """
    found = Problems()
    if not context_dir.is_dir():
        message = "is a file, not a folder" if context_dir.exists() else "no such folder"
        fix = "give the folder that holds the model's code, e.g. `.`"
        found.problems.append(Problem(key="CONTEXT_DIR", value=str(context_dir), message=message, fix=fix))
    document = found.of(lambda: with_flags(read_yaml(config), overrides, slots=slots))
    found.raise_any()
    assert document is not None
    return restored(document, os.environ, required=trains)


def decide_stated(experiment: Experiment, hyperparameters: Document, where: Where) -> ResolvedConfig | None:
    """What one point runs with on this machine; None where the code of a script, or of a legacy trial, decides it.

    Args:
        experiment: Its slots count, where ``where`` states none.
        hyperparameters: The point.
        where: Where it trains.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    found = Problems()
    if experiment.script is None and not read_hyperparameters(hyperparameters)[1]:
        found.problems += no_length(hyperparameters)
    resolved = found.of(lambda: resolve_stated(experiment, hyperparameters, where))
    found.problems += missing_packages(hyperparameters)
    found.raise_any()
    return resolved and replace(resolved, warnings=(*found.warnings, *resolved.warnings))


def resolve_stated(experiment: Experiment, hyperparameters: Document, where: Where) -> ResolvedConfig | None:
    """As :func:`decide_stated`, but how long it trains, and with which packages, is not looked at."""
    if where.slots is None:
        where = replace(where, slots=experiment.slots, slots_origin=experiment.document.origin(SLOTS))
    if experiment.states_all:
        return resolve(hyperparameters, where)
    problems, warnings = list[Problem](), tuple[Problem, ...]()
    if hyperparameters.get(("deepspeed_config",)) is not None:
        try:
            return resolve(hyperparameters, where)
        except ConfigError as error:
            problems = [each for each in error.problems if each.code not in LEFT_OPEN]
            warnings = error.warnings
    elif experiment.script is None:
        problems = read_hyperparameters(hyperparameters)[1]
    most = where.accelerator.max_ranks * where.machines
    if not problems and (where.slots or 0) > most:
        message = f"this machine carries {most} ranks on {where.accelerator.name}"
        fix, code = f"use --slots {most} or fewer", "more-ranks-than-devices"
        problems = [experiment.document.problem(SLOTS, message, fix, code, value=where.slots)]
    if problems:
        raise ConfigError(problems, warnings)
    return None


def left_open(experiment: Experiment) -> Problem:
    """What a command says that needs to know what only the code decides."""
    whose = "the script" if experiment.script else "the trial"
    message = f"{whose} decides batch and strategy: they are not known before it runs"
    fix = "state hyperparameters.deepspeed_config and global_batch_size"
    return experiment.document.problem(("entrypoint",), message, fix, "left-open", value=NOT_GIVEN)


def no_length(hyperparameters: Document) -> list[Problem]:
    """The problem of hyperparameters that do not say how long to train."""
    fit = hyperparameters.get(("fit",))
    if (fit.get("max_length") if isinstance(fit, dict) else fit) is not None:
        return []
    message, fix = "missing: nothing says how long to train", "write fit: {max_length: {batches: 200}}"
    return [hyperparameters.problem(("fit", "max_length"), message, fix, "max-length", value=NOT_GIVEN)]
