"""A Determined experiment YAML -> Experiment: the part of it that decides a run, and its environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from determined_ds.config.keys import ignored_keys
from determined_ds.config.params import stated_seed
from determined_ds.documents.document import Document, KeyPath, dotted
from determined_ds.documents.files import read_yaml
from determined_ds.documents.text import parse_yaml_value
from determined_ds.errors import NOT_GIVEN, ConfigError, EntrypointError, Problem
from determined_ds.experiment.entrypoint import MEASURE, Entrypoint, read_entrypoint
from determined_ds.experiment.schema import faults_of, in_words, keys_of
from determined_ds.experiment.secrets import VARIABLES, masked_override, restored
from determined_ds.experiment.space import SearchSpace, draw_trial_seed, master_random, read_space

T = TypeVar("T", str, int, bool, dict[str, Any])
SLOTS: KeyPath = ("resources", "slots_per_trial")
# A launch sets these itself, after the user's: so does Determined's launch layer on a cluster (torchrun's own).
OF_THE_LAUNCH = re.compile(
    "((GROUP|LOCAL|ROLE)_)?(RANK|WORLD_SIZE)|CROSS_RANK|(CROSS|LOCAL)_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    "|CUDA_VISIBLE_DEVICES|DS_ACCELERATOR|(DET|TORCHELASTIC)_.*"
)

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
        hyperparameters: The point in the middle of the search space (the only one, where nothing is searched).
        metric: ``searcher.metric``, "" where absent.
        smaller_is_better: Of that metric.
        space: All points that the search may visit, and the seed that they are drawn with.
        max_restarts: How often a crash is followed by another start, 0 where absent.
    """

    document: Document
    name: str
    entrypoint: Entrypoint
    slots: int
    hyperparameters: Document
    metric: str
    smaller_is_better: bool
    space: SearchSpace
    max_restarts: int

    @property
    def config(self) -> dict[str, Any]:
        """The plain experiment configuration, as ``context.get_experiment_config()`` gives it."""
        return self.document.data

    @property
    def trial_seed(self) -> int:
        """The seed of its run: ``hyperparameters.trial_seed``, else that of the first trial on a master."""
        return stated_seed(self.hyperparameters.data, draw_trial_seed(master_random(self.space.seed)))

    @property
    def searched(self) -> tuple[str, ...]:
        """Dotted names of the hyperparameters that a search gives values to, from the top of the YAML."""
        return tuple(self.document.key(("hyperparameters", *axis.path)) for axis in self.space.axes)

    @property
    def script(self) -> Entrypoint | None:
        """The script that it runs; None where it trains a trial."""
        return self.entrypoint if self.entrypoint.is_script else None

    @property
    def trial(self) -> str:
        """``MODULE:CLASS`` of its trial; "" where it runs a script."""
        return self.entrypoint.trial

    @property
    def measures(self) -> bool:
        """Whether its trials are measured for some steps, instead of trained to the end."""
        return MEASURE in self.entrypoint.options

    @property
    def states_all(self) -> bool:
        """Whether its hyperparameters have to state all that is trained with.

        A script, or a trial in Determined's own form, may state sizes in its code.
        """
        return not (self.entrypoint.is_script or self.entrypoint.is_legacy)


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
    return parse_experiment(restored(with_flags(read_yaml(path, name=name), overrides), os.environ))


def with_flags(document: Document, overrides: Iterable[str], *, slots: int | None = None) -> Document:
    """A document overwritten by a command's ``--slots`` and ``--set``, with the meaning ``det`` gives to ``--config``.

    A mapping is merged, all else replaces. A value with commas that is no ``[...]`` or ``{...}`` is a list.

    Raises:
        ConfigError: an override is not KEY=VALUE, or its value is not YAML.

    Source: ``parse_config_overrides`` in determined 0.38.1's ``cli/ntsc.py``.
    """
    if slots is not None:
        document = document.overwritten((SLOTS, slots, "--slots"))
    for override in overrides:
        key, equals, text = override.partition("=")
        path, flag = tuple(key.split(".")), f"--set {key}"
        if not equals or not all(path):
            fix = "write e.g. hyperparameters.fit.max_length.batches=10"
            raise ConfigError(Problem(key=f"--set {override}", message="is not KEY=VALUE", fix=fix))
        if "," in text and not text.startswith(("[", "{")):
            value: Any = [parse_yaml_value(part, flag) for part in text.split(",")]
        else:
            value = parse_yaml_value(text, flag)
        document = document.overwritten((path, value, f"--set {masked_override(override)}"))
    return document


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
    of_other_searchers = {("searcher", key) for key in keys_of("searcher")}
    faults = {
        path: fault
        for path, fault in found.items()
        if path[0] != "entrypoint"  # read below
        and not (fault.keyword == "missing" and path[0] != "hyperparameters")
        and not (fault.keyword == "unknown" and path in of_other_searchers)
    }
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
        wrong = error.problems[0]
        problems.append(document.problem(("entrypoint",), wrong.message, wrong.fix, "entrypoint"))
        entrypoint = Entrypoint(words=("",))
    slots = value(SLOTS, 1)
    if slots == 0 and not entrypoint.is_script:  # of a script one process runs all the same
        fix = "write the number of devices a trial trains on"
        problems.append(document.problem(SLOTS, "must be 1 or more", fix, "out-of-range"))
    space, of_space = read_space(
        _with_fit(document) if entrypoint.is_legacy else document,
        searcher=value(("searcher", "name"), "single"),
        seed=value(("reproducibility", "experiment_seed"), 0),
        refused=faults_of(document)[0],
    )
    problems += of_space
    experiment = Experiment(
        document=document,
        name=value(("name",), "unnamed"),
        entrypoint=entrypoint,
        slots=max(slots, 1),
        hyperparameters=space.constants.holding(space.at([axis.middle for axis in space.axes])),
        metric=value(("searcher", "metric"), ""),
        smaller_is_better=value(("searcher", "smaller_is_better"), True),
        space=space,
        max_restarts=max(value(("max_restarts",), 0), 0),
    )
    return experiment, problems


def _with_fit(document: Document) -> Document:
    """An experiment whose ``fit`` has, where it states nothing itself, what the keys of Determined's own trials say."""
    for path, name in FIT_KEYS.items():
        value, target = document.get(path), ("hyperparameters", "fit", name)
        if name == "reporting_period" and value is not None:
            value = {"batches": value}
        if isinstance(value, dict):
            value = {unit: number for unit, number in value.items() if number}  # of 0 Determined does nothing
        if value not in (None, {}) and document.get(target) is None:
            origin = document.origin(path)
            document = document.overwritten((target, value, origin.reworded(f"{dotted(path)}, {origin}")))
    return document


def ignored_keys_of(experiment: Experiment, place: int) -> list[Problem]:
    """A warning for each key of an experiment that is ignored in ``RUN``, ``CLUSTER``, ``SEARCH`` or ``MEASURE``."""
    read = {*map(dotted, FIT_KEYS)} if experiment.entrypoint.is_legacy else set[str]()
    if experiment.script is not None:
        read = {"searcher.max_length"}  # the Core API hands it on
    return [warning for warning in ignored_keys(experiment.document, place) if warning.key not in read]


def variables_for(document: Document, device: str) -> dict[str, str | None]:
    """The environment variables that an experiment asks for; what is not a list of strings, its reader refuses.

    Args:
        document: The experiment.
        device: What its ranks compute on: ``cpu``, ``cuda`` or ``rocm``.

    Returns:
        Name -> value; None: the variable is removed, as a name without a value is in a container.

    Raises:
        ConfigError: an entry is not NAME=VALUE; every reason at once.
    """
    if problems := variable_problems(document)[0]:
        raise ConfigError(problems)
    own = [(name, value) for _, of, name, value in variables_of(document) if of in ("", device)]
    return {name: value for name, value in own if not OF_THE_LAUNCH.fullmatch(name)}


def variable_problems(document: Document) -> tuple[list[Problem], list[Problem]]:
    """Entries of an experiment that are not NAME=VALUE, and warnings of those that a launch sets itself."""
    problems, warnings, code = [], [], "environment-variables"
    fix = "write e.g. environment_variables: [NCCL_DEBUG=INFO]"
    for path, _, name, value in variables_of(document):
        if not name or "\0" in f"{name}{value}":
            problems.append(document.problem(path, "is not NAME=VALUE", fix, code, value=NOT_GIVEN))
        elif OF_THE_LAUNCH.fullmatch(name):
            message = f"{name} is set by the launch: this value is not used"
            warnings.append(document.problem(path, message, "remove it", code, value=NOT_GIVEN))
    return problems, warnings


def variables_of(document: Document) -> Iterator[tuple[KeyPath, str, str, str | None]]:
    """Path, device ("" of every one), name and value of each environment variable; None of a name alone."""
    given = document.get(VARIABLES)
    for key, listed in (given if isinstance(given, dict) else {"": given}).items():
        path = (*VARIABLES, key) if key else VARIABLES
        for index, entry in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(entry, str):
                name, equals, value = entry.partition("=")
                device = "cuda" if key == "gpu" else key  # gpu is the old name
                yield (*path, index), device, name, value if equals else None
