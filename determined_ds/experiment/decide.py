"""What will run: CONFIG and CONTEXT_DIR -> Experiment -> ResolvedConfig of a command; of a task, in its ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from determined_ds.config.params import parse_hyperparameters, stated_seed
from determined_ds.config.resolve import ResolvedConfig, Where, missing_packages, resolve
from determined_ds.documents.document import Document
from determined_ds.documents.files import read_yaml
from determined_ds.errors import NOT_GIVEN, ConfigError, DataError, Problem, TrialError
from determined_ds.experiment.experiment import Experiment, with_override
from determined_ds.experiment.secrets import placeholders_left, restored
from determined_ds.experiment.space import odd_exponents

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
    found, code = Problems(), context_dir

    def refused(message: str, fix: str) -> ConfigError:
        return ConfigError(Problem(key="CONFIG", value=str(config), message=message, fix=fix))

    if config.is_dir() and code.is_file():
        fix = f"the configuration comes first: det-ds {command} {code} {config}"
        raise refused("is a folder", fix)
    if not code.is_dir():
        message = "is a file, not a folder" if code.exists() else "no such folder"
        fix = "give the folder that holds the model's code, e.g. `.`"
        found.problems.append(Problem(key="CONTEXT_DIR", value=str(code), message=message, fix=fix))
    document = found.of(lambda: read_yaml(config))
    if document is not None and config.suffix == ".json" and not OF_EXPERIMENTS & document.data.keys():
        fix = f"name it in an experiment's YAML: hyperparameters: {{deepspeed_config: {config}}}"
        raise refused("is a DeepSpeed JSON, not an experiment", fix)
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


def decide_stated(
    experiment: Experiment, hyperparameters: Document, where: Where, *, here: bool = False
) -> ResolvedConfig | None:
    """What will run at one point; None where the code of a script, or of a trial in Determined's own form, decides it.

    Args:
        experiment: Its slots count, where ``where`` states none.
        hyperparameters: The point.
        where: Where it trains.
        here: Whether it will train on this machine, which must then have the packages that it needs.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    found = Problems()
    if experiment.script is None:
        given = found.of(lambda: parse_hyperparameters(hyperparameters))
        if given is not None and given.fit.max_length is None:
            found.problems.append(no_length(hyperparameters))
    resolved = found.of(lambda: resolve_stated(experiment, hyperparameters, where))
    if here:
        found.problems += missing_packages(resolved.ds if resolved else None, hyperparameters)
    found.raise_any()
    if resolved is None:
        return None
    odd = odd_exponents(experiment.document, experiment.space)
    return dataclasses.replace(resolved, warnings=(*odd, *resolved.warnings))


def resolve_stated(experiment: Experiment, hyperparameters: Document, where: Where) -> ResolvedConfig | None:
    """What one point runs with; None where the code of a script, or of a trial in Determined's own form, decides it.

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
    most = where.accelerator.max_ranks * where.machines
    if (where.slots or 0) > most:
        path, fix = ("resources", "slots_per_trial"), f"use --slots {most} or fewer"
        message = f"this machine carries {most} ranks on {where.accelerator.name}"
        problem = experiment.document.problem(
            path, message, fix, "more-ranks-than-devices", value=where.slots
        )
        raise ConfigError(problem)
    return None


def left_open(experiment: Experiment) -> Problem:
    """What a command says that needs to know what only the code decides."""
    whose = "the script" if experiment.script else "the trial"
    message = f"{whose} decides batch and strategy: they are not known before it runs"
    fix = "state hyperparameters.deepspeed_config and global_batch_size"
    return experiment.document.problem(("entrypoint",), message, fix, "left-open", value=NOT_GIVEN)


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


# ------------------------------------------------------------------------------------------------- a task


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained, whatever it was read from."""

    hyperparameters: Document  # one point of the search space
    exp_conf: dict[str, Any] | None  # the experiment's configuration, where there is one
    seed: int  # of the trial
    steps_completed: int = 0  # by the processes before
    on_cluster: bool = False
    has_hyperparameters: bool = True  # whether any were given, if only an empty mapping

    def _searcher(self, key: str, default: Any) -> Any:
        value = ((self.exp_conf or {}).get("searcher") or {}).get(key)
        return default if value is None else value  # a master writes null for what is not stated

    @property
    def is_search(self) -> bool:
        return bool(self._searcher("name", "single") != "single")

    @property
    def metric(self) -> str:
        return str(self._searcher("metric", ""))

    @property
    def smaller_is_better(self) -> bool:
        return bool(self._searcher("smaller_is_better", True))

    @property
    def slots(self) -> int | None:
        """``resources.slots_per_trial``, where the experiment says it."""
        slots = ((self.exp_conf or {}).get("resources") or {}).get("slots_per_trial")
        return max(1, slots) if isinstance(slots, int) else None  # of none, one process runs all the same

    @property
    def slots_origin(self) -> str:
        """Where the number of ranks comes from."""
        return "resources.slots_per_trial" if self.on_cluster else "the launched ranks"

    def drops_point(self, error: BaseException) -> bool:
        """Whether the searcher should drop this point because of an error, since another point may run."""
        is_of_point = isinstance(error, ConfigError) and not isinstance(error, (DataError, TrialError))
        return self.on_cluster and self.is_search and is_of_point


def task_of_cluster(
    hparams: Mapping[str, Any], config: dict[str, Any], *, seed: int, steps_completed: int
) -> Task:
    """The task of a trial on a cluster.

    Args:
        hparams: The trial's hyperparameters.
        config: The experiment's configuration.
        seed: Of the trial, as the searcher drew it; ``hyperparameters.trial_seed`` replaces it.
        steps_completed: By the trial's processes before.

    Raises:
        ConfigError: a secret of the configuration was not filled in.
    """
    if left := placeholders_left(Document(name="the experiment", data=config)):
        raise ConfigError(left)
    return Task(
        hyperparameters=hyperparameters_of(hparams),
        exp_conf=config,
        seed=stated_seed(hparams, seed),
        steps_completed=steps_completed,
        on_cluster=True,
    )


def hyperparameters_of(hparams: Mapping[str, Any] | None) -> Document:
    """Hyperparameters that come from no file."""
    return Document(name="hyperparameters", data=dict(hparams or {}), prefix="hyperparameters")


def decide_task(task: Task, where: Where) -> ResolvedConfig:
    """What will run.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    resolved = resolve(task.hyperparameters, where)
    if missing := missing_packages(resolved.ds, task.hyperparameters):
        raise ConfigError(missing)
    # Elsewhere det-ds run has reported them.
    stated = Document(name="the experiment", data=task.exp_conf or {})
    odd = odd_exponents(stated) if task.on_cluster else []
    return dataclasses.replace(resolved, warnings=(*odd, *resolved.warnings))
