"""A Determined experiment YAML -> Experiment: the part of it that decides a run.

The way of a value::

    YAML -> Document, --set laid over it -> Determined's schemas -> entrypoint, search space -> Experiment
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from determined_ds.config.keys import ignored_keys
from determined_ds.config.params import stated_seed
from determined_ds.documents.document import Document, KeyPath, dotted
from determined_ds.documents.files import read_yaml
from determined_ds.documents.text import parse_yaml_value
from determined_ds.errors import ConfigError, EntrypointError, Problem
from determined_ds.experiment.entrypoint import (
    MEASURE,
    PIPELINE_TRIAL,
    Entrypoint,
    ScriptEntrypoint,
    TrialEntrypoint,
    read_entrypoint,
)
from determined_ds.experiment.schema import LARGEST_SEED, faults_of, in_words, keys_of
from determined_ds.experiment.secrets import masked_override, restored
from determined_ds.experiment.space import SPEC_FIELDS, SearchSpace, first_trial_seed, read_space

T = TypeVar("T", str, int, bool, dict[str, Any])
COERCED_TO_LIST = ("bind_mounts",)  # _CONFIG_PATHS_COERCE_TO_LIST in determined 0.38.1's cli/ntsc.py

# Key of the experiment -> argument of fit, of a trial in Determined's own form. Source: ``_run_deepspeed_trial`` in
# determined 0.38.1's ``exec/harness.py``; ``TrainUnit._from_values`` in its ``pytorch/_pytorch_trial.py``.
FIT_KEYS: dict[KeyPath, str] = {
    ("searcher", "max_length"): "max_length",
    ("min_validation_period",): "validation_period",
    ("min_checkpoint_period",): "checkpoint_period",
    ("checkpoint_policy",): "checkpoint_policy",
    ("perform_initial_validation",): "step_zero_validation",
    ("scheduling_unit",): "reporting_period",
}


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
        """``MODULE:CLASS`` of the trial for a number of pipeline stages, 1 without a pipeline."""
        return self.pipeline_trial if pipe_parallel_size > 1 else self.trial

    @property
    def measures(self) -> bool:
        """Whether its trials are measured for some steps, instead of trained to the end."""
        return MEASURE in self.train_options

    def at(self, point: dict[str, Any]) -> Document:
        """The hyperparameters of a point of :attr:`space`, with their places in the YAML.

        Args:
            point: As :meth:`SearchSpace.at` gives it. All points share one table of places.
        """
        if not self.is_legacy:
            return self.hyperparameters.holding(point)
        return _with_fit(self.hyperparameters.holding(point), self.document)[0]

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


def read_override(override: str, flag: str = "--set") -> tuple[KeyPath, Any]:
    """The path and the value of a ``KEY=VALUE``: one with commas that is no ``[...]`` or ``{...}`` is a list.

    Raises:
        ConfigError: it is not KEY=VALUE, or the value is not YAML.

    Source: ``parse_config_overrides`` in determined 0.38.1's ``cli/ntsc.py``.
    """
    key, equals, text = override.partition("=")
    path: KeyPath = tuple(key.split("."))
    if not equals or not all(path):
        fix = "write e.g. hyperparameters.fit.max_length.batches=10"
        raise ConfigError(Problem(key=f"{flag} {override}", message="is not KEY=VALUE", fix=fix))
    if "," in text and not text.startswith(("[", "{")):
        return path, [parse_yaml_value(part, f"{flag} {key}") for part in text.split(",")]
    value = parse_yaml_value(text, f"{flag} {key}")
    return path, [value] if key in COERCED_TO_LIST and not text.startswith("[") else value


def with_override(document: Document, override: str, flag: str = "--set") -> Document:
    """Lay one ``KEY=VALUE`` over a document, with the meaning ``det`` gives to ``--config``.

    A mapping is merged, all else replaces.

    Raises:
        ConfigError: it is not KEY=VALUE, or merges two types of hyperparameter into one that is neither.
    """
    path, value = read_override(override, flag)
    before, kind = document.get(path), value.get("type") if isinstance(value, dict) else None
    if path[0] == "hyperparameters" and isinstance(before, dict) and kind in SPEC_FIELDS:
        left = sorted(map(str, before.keys() - {"type", *SPEC_FIELDS[kind]}))
        if left:
            message = f"is merged with the mapping of {document.origin(path)}, as by det: {', '.join(left)} would stay"
            fix = f"write the {kind} hyperparameter in the file: --set replaces values, but merges mappings"
            key, code = f"{flag} {dotted(path)}", "hyperparameter-spec"
            raise ConfigError(Problem(key=key, value=value, message=message, fix=fix, code=code))
    return document.overwritten(path, value, f"{flag} {masked_override(override)}")


def parse_experiment(document: Document) -> Experiment:
    """Read the parts of an experiment configuration that decide a run. See :func:`load_experiment`."""
    experiment, problems = read_experiment(document)
    if problems:
        raise ConfigError(problems)
    return experiment


def read_experiment(document: Document) -> tuple[Experiment, list[Problem]]:
    """As :func:`parse_experiment`, but hands back the problems.

    What is wrong is taken as absent, and a misspelt key as the one that was meant, so that nothing follows from it.
    What only a master needs, such as a searcher's metric, may be missing, and keys of another searcher may be left.
    """
    found, meant = faults_of(document)
    faults = {}
    for path, fault in found.items():
        of_another = len(path) == 2 and path[0] == "searcher" and path[1] in keys_of("searcher")
        if (fault.keyword == "missing" and path[0] != "hyperparameters") or (
            fault.keyword == "unknown" and of_another
        ):
            continue  # a master alone needs it, or minds a key of another searcher
        if path[0] != "entrypoint":  # read below
            faults[path] = fault
    problems = in_words(faults, document)
    document = meant

    def value(path: KeyPath, default: T) -> T:
        stated = document.get(path)
        if isinstance(default, int) and isinstance(stated, float) and stated.is_integer():
            stated = int(stated)
        return stated if type(stated) is type(default) else default

    try:
        entrypoint = read_entrypoint(document.get(("entrypoint",)))
    except EntrypointError as error:
        message, fix = error.problems[0].message, error.problems[0].fix
        problems.append(document.problem(("entrypoint",), message, fix, "entrypoint"))
        entrypoint = TrialEntrypoint(trial="")
    slots = value(("resources", "slots_per_trial"), 1)
    if slots == 0 and isinstance(entrypoint, TrialEntrypoint):  # of a script one process runs all the same
        fix = "write the number of devices a trial trains on"
        path = ("resources", "slots_per_trial")
        problems.append(document.problem(path, "must be 1 or more", fix, "out-of-range"))
    seed = value(("reproducibility", "experiment_seed"), 0)
    seed = seed if 0 <= seed <= LARGEST_SEED else 0
    searcher = value(("searcher", "name"), "single")
    space, of_space = read_space(document, searcher=searcher, seed=seed)
    keys = [f"{problem.key}." for problem in problems]  # what the schema refuses, within it or above it
    problems += [
        each
        for each in of_space
        if not any(f"{each.key}.".startswith(key) or key.startswith(f"{each.key}.") for key in keys)
    ]
    point = _point(document, space)
    if isinstance(entrypoint, TrialEntrypoint) and entrypoint.legacy:
        point, of_lengths = _with_fit(point, document)
        problems += of_lengths
    experiment = Experiment(
        document=document,
        name=value(("name",), "unnamed"),
        entrypoint=entrypoint,
        slots=max(slots, 1),
        seed=seed,
        hyperparameters=point,
        searched=space.searched,
        metric=value(("searcher", "metric"), ""),
        smaller_is_better=value(("searcher", "smaller_is_better"), True),
        space=space,
        max_restarts=max(value(("max_restarts",), 0), 0),
    )
    return experiment, problems


def _point(document: Document, space: SearchSpace) -> Document:
    """The middle point's hyperparameters; what was wrapped as ``{type: const, val: ...}`` keeps its places."""
    if not space.middle:
        return Document(name=document.name, data={}, prefix="hyperparameters")
    sub = document.sub(("hyperparameters",))
    inner = [(path[1:], (*path[1:], "val")) for path in space.wrapped]

    def unwrapped(path: KeyPath) -> KeyPath:
        for outer, wrapped in inner:
            if len(path) > len(wrapped) and path[: len(wrapped)] == wrapped:
                return (*outer, *path[len(wrapped) :])
        return path

    return Document(
        name=document.name,
        data=space.middle,
        places={unwrapped(path): place for path, place in sub.places.items()},
        overwrites={unwrapped(path): origin for path, origin in sub.overwrites.items()},
        prefix="hyperparameters",
    )


def _with_fit(hyperparameters: Document, document: Document) -> tuple[Document, list[Problem]]:
    """Hyperparameters whose ``fit`` has what the experiment says in the keys of Determined's own trials.

    What ``fit`` itself states stays. A length in records is counted in batches, rounded down, at least one; that
    is a problem where the size of a batch is unknown.
    """
    problems: list[Problem] = []
    for path, name in FIT_KEYS.items():
        value, batch = document.get(path), hyperparameters.get(("global_batch_size",))
        if name == "reporting_period" and value is not None:
            value = {"batches": value}
        if isinstance(value, dict) and value.get("records"):
            if isinstance(value["records"], int) and isinstance(batch, int) and batch > 0:
                value = {"batches": max(1, value["records"] // batch)}
            else:
                message = "records can be counted only where hyperparameters.global_batch_size is a number"
                fix = "write {batches: N}, or state global_batch_size"
                problems.append(document.problem(path, message, fix, "records"))
                continue
        states_none = value is None or (isinstance(value, dict) and not any(value.values()))
        if not states_none and hyperparameters.get(("fit", name)) is None:
            origin = document.origin(path)
            place = origin.reworded(f"{dotted(path)}, {origin}")
            hyperparameters = hyperparameters.overwritten(("fit", name), value, place)
    return hyperparameters, problems


def ignored_keys_of(document: Document, place: int) -> list[Problem]:
    """A warning for each key of an experiment that is ignored in ``RUN``, ``CLUSTER``, ``SEARCH`` or ``MEASURE``."""
    read: set[str] = set()
    with contextlib.suppress(EntrypointError):
        entrypoint = read_entrypoint(document.get(("entrypoint",)))
        if isinstance(entrypoint, ScriptEntrypoint):
            read = {"searcher.max_length"}  # the Core API hands it on
        elif entrypoint.legacy:
            read = {*map(dotted, FIT_KEYS), "records_per_epoch"}
    return [warning for warning in ignored_keys(document, place) if warning.key not in read]
