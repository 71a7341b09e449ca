"""``checkpoint_storage.save_*``: which checkpoints are kept when an experiment ends.

Source: ``RawSaveExperimentBest`` and its neighbours in determined 0.38.1's ``master/pkg/schemas/expconf``, with the
defaults of ``checkpoint-storage.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from determined_ds.documents.document import Document, nearest
from determined_ds.documents.values import kind_of
from determined_ds.errors import ConfigError, Problem

STORAGE = "checkpoint_storage"


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """How many checkpoints are kept; one that any of the three keeps is kept.

    Args:
        save_experiment_best: The best of all trials, by ``searcher.metric``.
        save_trial_best: The best of each trial.
        save_trial_latest: The latest of each trial.
    """

    save_experiment_best: int = 0
    save_trial_best: int = 1
    save_trial_latest: int = 1

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())


NAMES = tuple(field.name for field in fields(SavePolicy))


def stated_policy(document: Document) -> SavePolicy | None:
    """What an experiment states, the rest as a master defaults it; None where it states nothing of it.

    Raises:
        ConfigError: a number that is none, or below 0; a misspelt name.
    """
    section = document.get((STORAGE,))
    if not isinstance(section, dict):
        return None
    problems = [_problem(document, name) for name in section if str(name).startswith("save_")]
    if found := [problem for problem in problems if problem is not None]:
        raise ConfigError(found)
    stated = {name: section[name] for name in NAMES if section.get(name) is not None}
    return SavePolicy(**stated) if stated else None


def limit_problem(document: Document, total_limit: int | None) -> Problem | None:
    """A warning where ``fit.save_total_limit`` may delete, while training, what is to be kept at the end.

    Args:
        document: The experiment.
        total_limit: Of ``fit``.
    """
    try:
        policy = stated_policy(document)
    except ConfigError:
        return None
    if policy is None or total_limit is None:
        return None
    wanted = {"save_experiment_best": 1, "save_trial_best": 1, "save_trial_latest": total_limit}
    name = next((name for name, most in wanted.items() if getattr(policy, name) > most), None)
    if name is None:
        return None
    message = (
        f"may not be reached: hyperparameters.fit.save_total_limit {total_limit} deletes the oldest while training, "
        "all but the best and the newest"
    )
    fix = "leave save_total_limit out, or write a larger one"
    value = getattr(policy, name)
    return document.problem((STORAGE, name), message, fix, "save-limit", value=value)


def _problem(document: Document, name: str) -> Problem | None:
    path, value = (STORAGE, name), document.get((STORAGE, name))
    if name not in NAMES:
        fix = f"did you mean {nearest(name, NAMES) or NAMES[1]!r}?"
        return document.problem(path, "unknown key", fix, "unknown-key")
    if value is None or (_is_count(value) and value >= 0):
        return None
    message = "must be 0 or more" if _is_count(value) else f"must be an integer, not {kind_of(value)}"
    return document.problem(path, message, "write how many checkpoints to keep, e.g. 1", "out-of-range")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
