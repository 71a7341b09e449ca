"""A Determined experiment YAML -> Experiment: the part of it that decides a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.config.aliases import IN_YAML
from determined_ds.config.hyperparameters import OWN_KEYS, stated_seed
from determined_ds.documents.document import Document, KeyPath, one_of, words
from determined_ds.documents.reading import parse_yaml_value, read_yaml
from determined_ds.documents.values import Findings
from determined_ds.errors import ConfigError, EntrypointError, Problem
from determined_ds.experiment.additions import added_to
from determined_ds.experiment.entrypoint import (
    MEASURE,
    PIPELINE_TRIAL,
    Entrypoint,
    ScriptEntrypoint,
    TrialEntrypoint,
    read_entrypoint,
)
from determined_ds.experiment.legacy import with_fit
from determined_ds.experiment.secrets import restored
from determined_ds.experiment.space.master_random import first_trial_seed
from determined_ds.experiment.space.space import SearchSpace, read_space

# The fields of Determined 0.38.1's experiment configuration (its schema expconf/v0/experiment.json).
EXPERIMENT_KEYS = words("""
    bind_mounts checkpoint_policy checkpoint_storage data data_layer debug description entrypoint
    environment hyperparameters integrations internal labels log_policies max_restarts
    min_checkpoint_period min_validation_period name optimizations pbs perform_initial_validation
    preemption_timeout profiling project records_per_epoch reproducibility resources retention_policy
    scheduling_unit searcher security slurm tensorboard_storage workspace""")
RESOURCES_KEYS = words("""
    agent_label devices is_single_node max_slots native_parallel priority resource_pool shm_size slots
    slots_per_trial weight""")
REPRODUCIBILITY_KEYS = frozenset({"experiment_seed"})
ENVIRONMENT_KEYS = words("""
    add_capabilities drop_capabilities environment_variables force_pull_image image pod_spec ports proxy_ports
    registry_auth""")
PROFILING_KEYS = words("begin_on_batch enabled end_after_batch sync_timings")
SEARCHER_KEYS = words("""
    bracket_rungs divisor max_concurrent_trials max_length max_rungs max_time max_trials metric mode name
    num_rungs smaller_is_better source_checkpoint_uuid source_trial_id stop_once time_metric""")
# Hyperparameters of this library that are easily written one level too high.
ELSEWHERE = {
    **{key: f"hyperparameters.{key}" for key in OWN_KEYS},
    **{key: f"resources.{key}" for key in RESOURCES_KEYS | added_to("resources").keys()},
    **{key: f"searcher.{key}" for key in SEARCHER_KEYS - {"name"}},
    "experiment_seed": "reproducibility.experiment_seed",
    **IN_YAML,
}
SEARCHERS = ("single", "random", "grid", "adaptive_asha", "async_halving")
LARGEST_SEED = 2**32 - 1  # the master keeps it in 32 bits
COERCED_TO_LIST = ("bind_mounts",)  # _CONFIG_PATHS_COERCE_TO_LIST in determined 0.38.1's cli/ntsc.py


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What an experiment YAML says, checked.

    Args:
        document: The whole YAML with ``--set`` applied; a search's hyperparameters as they stand.
        name: The experiment's name.
        entrypoint: What it runs: a trial or a script.
        slots: ``resources.slots_per_trial``, 1 where absent.
        seed: ``reproducibility.experiment_seed``, 0 where absent.
        hyperparameters: One point of the search space (the only one, where nothing is searched).
        searched: Dotted names of the hyperparameters that the point was chosen for.
        metric: ``searcher.metric``, "" where absent.
        smaller_is_better: Of that metric.
        space: All points that the search may visit.
        max_restarts: How often a crash is followed by another start, 0 where absent.
    """

    document: Document
    name: str
    entrypoint: Entrypoint
    slots: int
    seed: int
    hyperparameters: Document
    searched: tuple[str, ...]
    metric: str
    smaller_is_better: bool
    space: SearchSpace
    max_restarts: int = 0

    @property
    def trial_seed(self) -> int:
        """The seed of its run: ``hyperparameters.trial_seed``, else that of the first trial on a master."""
        return stated_seed(self.hyperparameters.data, first_trial_seed(self.seed))

    @property
    def trial(self) -> str:
        """``MODULE:CLASS`` of its trial; "" where it runs a script."""
        return self.entrypoint.trial if isinstance(self.entrypoint, TrialEntrypoint) else ""

    @property
    def train_options(self) -> tuple[str, ...]:
        """The words after the trial in the entrypoint: options of ``determined_ds.train``."""
        return self.entrypoint.options if isinstance(self.entrypoint, TrialEntrypoint) else ()

    @property
    def script(self) -> ScriptEntrypoint | None:
        """The script that it runs; None where it trains a trial."""
        return self.entrypoint if isinstance(self.entrypoint, ScriptEntrypoint) else None

    @property
    def is_legacy(self) -> bool:
        """Whether it trains a trial in Determined's own form."""
        return isinstance(self.entrypoint, TrialEntrypoint) and self.entrypoint.legacy

    @property
    def states_all(self) -> bool:
        """Whether the configuration has to state all that is trained with.

        A script, or a trial in Determined's own form, may state sizes in its code.
        """
        return self.script is None and not self.is_legacy

    @property
    def pipeline_trial(self) -> str:
        """``MODULE:CLASS`` that is trained where there are pipeline stages."""
        options = self.train_options
        named = options.index(PIPELINE_TRIAL) + 1 if PIPELINE_TRIAL in options else len(options)
        return options[named] if named < len(options) else self.trial

    def trained(self, pipe_parallel_size: int) -> str:
        """The trial for a number of pipeline stages.

        Args:
            pipe_parallel_size: Pipeline stages, >= 1; 1 without a pipeline.

        Returns:
            ``MODULE:CLASS``.
        """
        return self.pipeline_trial if pipe_parallel_size > 1 else self.trial

    @property
    def measures(self) -> bool:
        """Whether its trials are measured for some steps, instead of trained to the end."""
        return MEASURE in self.train_options

    def at(self, point: dict[str, Any]) -> Document:
        """The hyperparameters of a point of :attr:`space`; all points share one table of places.

        Args:
            point: As :meth:`SearchSpace.at` gives it.

        Returns:
            The hyperparameters, with their places in the YAML.
        """
        if not self.is_legacy:
            return self.hyperparameters.holding(point)
        return with_fit(self.hyperparameters.holding(point), self.document)[0]

    @property
    def config(self) -> dict[str, Any]:
        """The plain experiment configuration, as ``context.get_experiment_config()`` gives it."""
        return self.document.data


def load_experiment(path: Path, overrides: Iterable[str] = (), *, name: str | None = None) -> Experiment:
    """Read an experiment YAML, with its secrets from the environment, and lay ``KEY=VALUE`` overrides over it.

    Args:
        path: The YAML file.
        overrides: ``KEY=VALUE`` as in ``det experiment create --config``: dotted key, YAML value.
        name: What to call the file in messages; its path as given, if None.

    Returns:
        The experiment: its hyperparameters, its search space and what it runs.

    Raises:
        ConfigError: everything that is wrong with it, at once.
    """
    document = restored(read_yaml(path, name=name), os.environ)
    for override in overrides:
        document = with_override(document, override)
    return parse_experiment(document)


def with_override(document: Document, override: str, flag: str = "--set") -> Document:
    """Lay one ``KEY=VALUE`` over a document, with the meaning ``det`` gives to ``--config``.

    Source: ``parse_config_overrides`` in determined 0.38.1's ``cli/ntsc.py``: a value with commas that is
    no ``[...]`` or ``{...}`` is a list; a mapping is merged, all else replaces.
    """
    key, equals, text = override.partition("=")
    path: KeyPath = tuple(key.split("."))
    if not equals or not all(path):
        problem = Problem(
            key=f"{flag} {override}",
            message="is not KEY=VALUE",
            fix="write e.g. hyperparameters.fit.max_length.batches=10",
        )
        raise ConfigError(problem)
    if "," in text and not text.startswith(("[", "{")):
        value: Any = [parse_yaml_value(part, f"{flag} {key}") for part in text.split(",")]
    else:
        value = parse_yaml_value(text, f"{flag} {key}")
        if key in COERCED_TO_LIST and not text.startswith("["):
            value = [value]
    return document.overwritten(path, value, f"{flag} {override}")


def parse_experiment(document: Document) -> Experiment:
    """Check the parts of an experiment configuration that decide a run. See :func:`load_experiment`."""
    experiment, problems = read_experiment(document)
    if problems:
        raise ConfigError(problems)
    return experiment


def read_experiment(document: Document) -> tuple[Experiment, list[Problem]]:
    """As :func:`parse_experiment`, but hands back the problems; what is wrong is taken as absent."""
    found = Findings(document)
    found.unknown((), EXPERIMENT_KEYS, ELSEWHERE)
    name = found.typed(("name",), str, "unnamed")
    entrypoint = _entrypoint(found)
    slots = _slots(found, least=0 if isinstance(entrypoint, ScriptEntrypoint) else 1)
    seed = _seed(found)
    metric, smaller_is_better = _searcher(found)
    searcher = str(found.document.get(("searcher", "name")) or "single")
    hyperparameters = found.typed(("hyperparameters",), dict, {})
    space, searched = read_space(found, hyperparameters, searcher=searcher, seed=seed)
    max_restarts = _switches(found)
    point = _hyperparameters(document, space.middle, found.constants)
    if isinstance(entrypoint, TrialEntrypoint) and entrypoint.legacy:
        point, problems = with_fit(point, document)
        found.problems += problems
    experiment = Experiment(
        document=document,
        name=name,
        entrypoint=entrypoint,
        slots=slots,
        seed=seed,
        hyperparameters=point,
        searched=searched,
        metric=metric,
        smaller_is_better=smaller_is_better,
        space=space,
        max_restarts=max_restarts,
    )
    return experiment, found.problems


def _hyperparameters(document: Document, point: dict[str, Any], constants: list[KeyPath]) -> Document:
    """The document of one point; what was wrapped as ``{type: const, val: ...}`` keeps its places."""
    if not point:
        return Document(name=document.name, data=point, prefix="hyperparameters")
    sub = document.sub(("hyperparameters",))
    inner = [(path[1:], (*path[1:], "val")) for path in constants]

    def unwrapped(path: KeyPath) -> KeyPath:
        for outer, wrapped in inner:
            if len(path) > len(wrapped) and path[: len(wrapped)] == wrapped:
                return (*outer, *path[len(wrapped) :])
        return path

    return Document(
        name=document.name,
        data=point,
        places={unwrapped(path): place for path, place in sub.places.items()},
        overwrites={unwrapped(path): origin for path, origin in sub.overwrites.items()},
        prefix="hyperparameters",
    )


def _slots(found: Findings, *, least: int) -> int:
    """The ranks to start. A script on a cluster may have none, and one process runs all the same."""
    known = RESOURCES_KEYS | added_to("resources").keys()  # which master takes them, `check` knows
    found.section(("resources",), known - {"slots"}, {"slots": "resources.slots_per_trial"})
    path: KeyPath = ("resources", "slots_per_trial")
    slots: int = found.typed(path, int, 1)
    if slots < least:
        found.add(
            path, f"must be {least} or more", "write the number of devices a trial trains on", "out-of-range"
        )
    return max(slots, 1)


def _seed(found: Findings) -> int:
    found.section(("reproducibility",), REPRODUCIBILITY_KEYS)
    path: KeyPath = ("reproducibility", "experiment_seed")
    seed = int(found.typed(path, int, 0))
    if seed < 0:
        found.add(path, "must be 0 or more", "write a seed >= 0", "out-of-range")
    elif seed > LARGEST_SEED:
        found.add(path, f"must be at most {LARGEST_SEED}", "write a smaller seed", "out-of-range")
    return seed


def _searcher(found: Findings) -> tuple[str, bool]:
    found.section(("searcher",), SEARCHER_KEYS)
    path: KeyPath = ("searcher", "name")
    name = found.typed(path, str, "single")
    if found.document.get(path, "absent") is None:
        found.add(path, "must be a string, not null", one_of(SEARCHERS), "wrong-type")
    elif name not in SEARCHERS:
        found.add(path, "no such searcher", one_of(SEARCHERS, name), "out-of-range")
    metric: str = found.typed(("searcher", "metric"), str, "")
    return metric, bool(found.typed(("searcher", "smaller_is_better"), bool, True))


def _switches(found: Findings) -> int:
    """Check what turns something on in a run; returns ``max_restarts``."""
    found.typed(("debug",), bool, False)
    found.section(("environment",), ENVIRONMENT_KEYS)
    found.section(("profiling",), PROFILING_KEYS)
    found.typed(("profiling", "enabled"), bool, False)
    path: KeyPath = ("max_restarts",)
    restarts: int = found.typed(path, int, 0)
    if restarts < 0:
        found.add(
            path, "must be 0 or more", "write how often a crash may be followed by a restart", "out-of-range"
        )
    return max(restarts, 0)


def _entrypoint(found: Findings) -> Entrypoint:
    try:
        return read_entrypoint(found.document.get(("entrypoint",)))
    except EntrypointError as error:
        fix = error.problems[0].fix
        found.add(("entrypoint",), error.problems[0].message, fix, "entrypoint")
        return TrialEntrypoint(trial="")
