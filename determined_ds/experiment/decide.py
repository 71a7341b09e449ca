"""CONFIG and CONTEXT_DIR -> Experiment -> ResolvedConfig, for every command."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from determined_ds.config.deepspeed.packages import missing_packages
from determined_ds.config.hyperparameters import parse_hyperparameters
from determined_ds.config.loggers import missing_loggers
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where, resolve
from determined_ds.documents.document import Document
from determined_ds.documents.reading import read_yaml
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.experiment import Experiment, with_override
from determined_ds.experiment.secrets import restored
from determined_ds.experiment.space.exponents import exponents

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

    def need(self, step: Callable[[], T]) -> T:
        """What a step returns that the others depend on.

        Raises:
            ConfigError: it finds problems, or there are some already.
        """
        result = self.of(step)
        self.raise_any()
        assert result is not None
        return result

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
    command: str = "run",
) -> Document:
    """The experiment's YAML, overwritten by ``--slots`` and ``--set``, for a ``det-ds`` command.

    Raises:
        ConfigError: there is no such file or folder, or it cannot be read.
    """
    found = Problems()
    if config.is_dir() and context_dir.is_file():
        fix = f"the configuration comes first: det-ds {command} {context_dir} {config}"
        raise ConfigError(Problem(key="CONFIG", value=str(config), message="is a folder", fix=fix))
    if not context_dir.is_dir():
        message = "is a file, not a folder" if context_dir.exists() else "no such folder"
        fix = "give the folder that holds the model's code, e.g. `.`"
        found.problems.append(Problem(key="CONTEXT_DIR", value=str(context_dir), message=message, fix=fix))
    document = found.of(lambda: read_yaml(config))
    if document is not None and config.suffix == ".json" and not OF_EXPERIMENTS & document.data.keys():
        message = "is a DeepSpeed JSON, not an experiment"
        fix = f"name it in an experiment's YAML: hyperparameters: {{deepspeed_config: {config}}}"
        raise ConfigError(Problem(key="CONFIG", value=str(config), message=message, fix=fix))
    if document is not None:
        document = found.of(partial(with_flags, document, slots=slots, overrides=overrides))
    if document is not None:
        runs = command in ("run", "search", "compare", "autotune")
        document = found.of(partial(restored, document, os.environ, required=runs))
    found.raise_any()
    assert document is not None
    return document


def with_flags(
    document: Document, *, slots: int | None, overrides: Iterable[str], origin: str = "--slots"
) -> Document:
    """A document overwritten by the command's ``--slots`` and ``--set``.

    Raises:
        ConfigError: an override is not KEY=VALUE.
    """
    found = Problems()
    if slots is not None:
        document = document.overwritten(("resources", "slots_per_trial"), slots, origin)
    for override in overrides:
        document = found.of(partial(with_override, document, override)) or document
    found.raise_any()
    return document


def decide(
    experiment: Experiment, hyperparameters: Document, where: Where, *, here: bool = False
) -> ResolvedConfig:
    """What will run at one point of an experiment's search space.

    Args:
        experiment: Its slots count, where ``where`` states none.
        hyperparameters: The point.
        where: Where it trains.
        here: Whether it will train on this machine, which must then have the packages that it needs.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    found = Problems()
    given = found.of(lambda: parse_hyperparameters(hyperparameters))
    if given is not None and given.fit.max_length is None and experiment.script is None:
        found.problems.append(no_length(hyperparameters))
    resolved = found.of(lambda: resolve(hyperparameters, on_slots_of(experiment, where)))
    if here and resolved is not None:
        found.problems += missing_packages(resolved.ds)
        found.problems += missing_loggers(hyperparameters)
    found.raise_any()
    assert resolved is not None
    odd = exponents(experiment.space.axes, experiment.document)
    return dataclasses.replace(resolved, warnings=(*odd, *resolved.warnings)) if odd else resolved


def decide_stated(
    experiment: Experiment, hyperparameters: Document, where: Where, *, here: bool = False
) -> ResolvedConfig | None:
    """As :func:`decide`; None where the code of a script, or of a trial in Determined's own form, decides the batch.

    Args:
        experiment: As for :func:`decide`, like the others.
        hyperparameters: The point.
        where: Where it trains.
        here: Whether on this machine.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    found = Problems()
    resolved = found.of(lambda: resolve_stated(experiment, hyperparameters, where))
    if resolved is not None or experiment.states_all:
        return decide(experiment, hyperparameters, where, here=here)
    if experiment.is_legacy:
        given = found.of(lambda: parse_hyperparameters(hyperparameters))
        if given is not None and given.fit.max_length is None:
            found.problems.append(no_length(hyperparameters))
    if here:
        found.problems += missing_loggers(hyperparameters)
    found.raise_any()
    return None


def resolve_stated(experiment: Experiment, hyperparameters: Document, where: Where) -> ResolvedConfig | None:
    """What one point runs with, as :func:`~determined_ds.config.resolve.resolve` says; None where code decides it.

    Args:
        experiment: The experiment. Only a script, or a trial in Determined's own form, may leave something open.
        hyperparameters: The point.
        where: Where it trains.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    where = on_slots_of(experiment, where)
    if experiment.states_all:
        return resolve(hyperparameters, where)
    if hyperparameters.get(("deepspeed_config",)) is not None:
        try:
            return resolve(hyperparameters, where)
        except ConfigError as error:
            problems = [each for each in error.problems if each.code not in LEFT_OPEN]
            if problems:
                raise ConfigError(problems, error.warnings) from None
    if problems := _too_many_ranks(experiment, where):
        raise ConfigError(problems)
    return None


def left_open(experiment: Experiment) -> Problem:
    """What a command says that needs to know what only the code decides."""
    whose = "the script" if experiment.script else "the trial"
    message = f"{whose} decides batch and strategy: they are not known before it runs"
    fix = "state hyperparameters.deepspeed_config and global_batch_size"
    return experiment.document.problem(("entrypoint",), message, fix, "left-open", value=NOT_GIVEN)


def _too_many_ranks(experiment: Experiment, where: Where) -> list[Problem]:
    most = where.accelerator.max_ranks * where.machines
    if (where.slots or 0) <= most:
        return []
    message = f"this machine carries {most} ranks on {where.accelerator.name}"
    path = ("resources", "slots_per_trial")
    problem = experiment.document.problem(
        path, message, f"use --slots {most} or fewer", "more-ranks-than-devices"
    )
    return [dataclasses.replace(problem, value=where.slots)]


def on_slots_of(experiment: Experiment, where: Where) -> Where:
    """The same with the experiment's slots, where none are stated."""
    if where.slots is not None:
        return where
    origin = experiment.document.origin(("resources", "slots_per_trial"))
    return dataclasses.replace(where, slots=experiment.slots, slots_origin=origin)


def no_length(hyperparameters: Document) -> Problem:
    """The problem of hyperparameters without ``fit.max_length``."""
    message, fix = "missing: nothing says how long to train", "write fit: {max_length: {batches: 200}}"
    return hyperparameters.problem(("fit", "max_length"), message, fix, "max-length", value=NOT_GIVEN)
