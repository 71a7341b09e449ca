"""What a task is to train, decided by the same code in the start-up hook and in every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from determined_ds.config.deepspeed.packages import missing_packages
from determined_ds.config.hyperparameters import stated_seed
from determined_ds.config.loggers import missing_loggers
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where, resolve
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, DataError, TrialError
from determined_ds.experiment.secrets import placeholders_left
from determined_ds.experiment.space.exponents import exponents_in


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained, whatever it was read from.

    Args:
        hyperparameters: One point of the search space.
        exp_conf: The experiment's configuration; None where there is none.
        seed: Of the trial.
        steps_completed: By the processes before.
        on_cluster: Whether a cluster runs it.
        has_hyperparameters: Whether any were given, if only an empty mapping.
    """

    hyperparameters: Document
    exp_conf: dict[str, Any] | None
    seed: int
    steps_completed: int = 0
    on_cluster: bool = False
    has_hyperparameters: bool = True

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

    Args:
        task: What is to be trained.
        where: On how many ranks, and what they compute on.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    resolved = resolve(task.hyperparameters, where)
    missing = [*missing_packages(resolved.ds), *missing_loggers(task.hyperparameters)]
    if missing:
        raise ConfigError(missing)
    # Elsewhere det-ds run has reported them.
    odd = exponents_in(task.exp_conf or {}) if task.on_cluster else []
    return replace(resolved, warnings=(*odd, *resolved.warnings)) if odd else resolved
