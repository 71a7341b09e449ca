"""A Determined experiment YAML -> Experiment: the part of it that decides a run."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.config.document import Document, KeyPath, unknown_key
from determined_ds.config.text import parse_yaml_value, read_yaml
from determined_ds.errors import ConfigError, EntrypointError, Problem

# The fields of Determined 0.38.1's experiment configuration (its schema expconf/v0/experiment.json).
EXPERIMENT_KEYS = frozenset(
    """bind_mounts checkpoint_policy checkpoint_storage data data_layer debug description entrypoint
    environment hyperparameters integrations internal labels log_policies max_restarts
    min_checkpoint_period min_validation_period name optimizations pbs perform_initial_validation
    preemption_timeout profiling project records_per_epoch reproducibility resources retention_policy
    scheduling_unit searcher security slurm tensorboard_storage workspace""".split()
)
RESOURCES_KEYS = frozenset(
    """agent_label devices is_single_node max_slots native_parallel priority resource_pool shm_size slots
    slots_per_trial weight""".split()
)
SPEC_TYPES = ("categorical", "const", "double", "int", "log")
SEARCHERS = ("single", "random", "grid", "adaptive_asha", "async_halving")
ENTRYPOINT_FORM = (
    "python3 -m determined.launch.deepspeed python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial"
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What an experiment YAML says, checked.

    Args:
        document: The whole YAML with ``--set`` applied; a search's hyperparameters as they stand.
        name: The experiment's name.
        trial: ``MODULE:CLASS`` out of the entrypoint.
        slots: ``resources.slots_per_trial``, 1 where absent.
        seed: ``reproducibility.experiment_seed``, 0 where absent.
        hyperparameters: One point of the search space (the only one, where nothing is searched).
        searched: Dotted names of the hyperparameters that the point was chosen for.
        metric: ``searcher.metric``, "" where absent.
        smaller_is_better: Of that metric.
    """

    document: Document
    name: str
    trial: str
    slots: int
    seed: int
    hyperparameters: Document
    searched: tuple[str, ...]
    metric: str
    smaller_is_better: bool

    @property
    def config(self) -> dict[str, Any]:
        """The plain experiment configuration, as ``context.get_experiment_config()`` gives it."""
        return self.document.data


def load_experiment(path: Path, overrides: Iterable[str] = (), *, name: str | None = None) -> Experiment:
    """Read an experiment YAML and lay ``KEY=VALUE`` overrides over it.

    Args:
        path: The YAML file.
        overrides: ``KEY=VALUE`` as in ``det experiment create --config``: dotted key, YAML value.
        name: What to call the file in messages; its path as given, if None.

    Raises:
        ConfigError: everything that is wrong with it, at once.
    """
    document = read_yaml(path, name=name)
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
            mend="write e.g. hyperparameters.fit.max_length.batches=10",
        )
        raise ConfigError(problem)
    if "," in text and not text.startswith(("[", "{")):
        value: Any = [parse_yaml_value(part, f"{flag} {key}") for part in text.split(",")]
    else:
        value = parse_yaml_value(text, f"{flag} {key}")
    return document.overwritten(path, value, f"{flag} {override}")


def parse_experiment(document: Document) -> Experiment:
    """Check the parts of an experiment configuration that decide a run. See :func:`load_experiment`."""
    found = _Findings(document)
    found.unknown((), EXPERIMENT_KEYS)
    name = found.typed(("name",), str, "unnamed")
    slots = _slots(found)
    seed = found.typed(("reproducibility", "experiment_seed"), int, 0)
    if seed < 0:
        found.add(("reproducibility", "experiment_seed"), "must be 0 or more", "write a seed >= 0")
    searcher_name = found.typed(("searcher", "name"), str, "single")
    if searcher_name not in SEARCHERS:
        path: KeyPath = ("searcher", "name")
        found.add(path, "no such searcher", f"use one of {', '.join(SEARCHERS[:4])}")
    metric = found.typed(("searcher", "metric"), str, "")
    smaller_is_better = found.typed(("searcher", "smaller_is_better"), bool, True)
    point: dict[str, Any] = {}
    searched: list[str] = []
    hyperparameters = found.typed(("hyperparameters",), dict, {})
    for key in hyperparameters:
        point[key] = _one_point(found, ("hyperparameters", key), hyperparameters[key], searched)
    trial = _trial(found)
    if found.problems:
        raise ConfigError(found.problems)
    sub = document.sub(("hyperparameters",)) if hyperparameters else None
    return Experiment(
        document=document,
        name=name,
        trial=trial,
        slots=slots,
        seed=seed,
        hyperparameters=Document(
            name=document.name,
            data=point,
            places=sub.places if sub else {},
            overwrites=sub.overwrites if sub else {},
            prefix="hyperparameters",
        ),
        searched=tuple(searched),
        metric=metric,
        smaller_is_better=smaller_is_better,
    )


class _Findings:
    """Collects every problem of a document instead of stopping at the first."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []

    def add(self, path: KeyPath, message: str, mend: str, code: str = "invalid") -> None:
        self.problems.append(
            Problem(
                key=self.document.key(path),
                value=self.document.get(path),
                origin=self.document.origin(path),
                message=message,
                mend=mend,
                code=code,
            )
        )

    def unknown(self, path: KeyPath, known: Iterable[str]) -> None:
        section = self.document.get(path) if path else self.document.data
        for key in section if isinstance(section, dict) else ():
            if key not in known:
                self.problems.append(unknown_key(self.document, (*path, key), known))

    def typed(self, path: KeyPath, kind: type, default: Any) -> Any:
        """The value at ``path`` if it is of ``kind``; else the default, and a problem unless it is absent."""
        value = self.document.get(path)
        parent = self.document.get(path[:-1]) if len(path) > 1 else self.document.data
        if parent is not None and not isinstance(parent, dict):
            self.add(path[:-1], f"must be a mapping, not {kind_of(parent)}", "write `key: value` below it")
            return default
        if value is None:
            return default
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
        self.add(path, f"must be {KINDS[kind]}, not {kind_of(value)}", type_mend(kind, value), "wrong-type")
        return default


KINDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    float: "a number",
}


def kind_of(value: Any) -> str:
    """What a YAML value is, in words: ``a string``, ``an integer``, ``null`` ..."""
    if value is None:
        return "null"
    return KINDS.get(type(value), type(value).__name__)


def type_mend(kind: type, value: Any) -> str:
    """How to write a value of the right type; unquotes numbers where that is all it takes."""
    if kind in (int, float) and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return f"write {KINDS[kind]}"
        if math.isfinite(number) and (kind is float or number.is_integer()):
            return f"remove the quotes: {int(number) if number.is_integer() else number}"
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return f"write {KINDS[kind]}"


def _slots(found: _Findings) -> int:
    found.unknown(("resources",), RESOURCES_KEYS)
    slots = found.typed(("resources", "slots_per_trial"), int, 1)
    if slots < 1:
        path: KeyPath = ("resources", "slots_per_trial")
        found.add(path, "must be 1 or more", "write the number of devices a trial trains on")
        return 1
    return int(slots)


def _trial(found: _Findings) -> str:
    entrypoint = found.document.get(("entrypoint",))
    try:
        return trial_of_entrypoint(entrypoint)
    except EntrypointError as error:
        mend = error.problems[0].mend
        found.add(("entrypoint",), error.problems[0].message, mend, "entrypoint")
        return ""


def trial_of_entrypoint(entrypoint: Any) -> str:
    """``MODULE:CLASS`` out of an entrypoint that runs ``determined_ds.train``.

    Raises:
        EntrypointError: the entrypoint is missing, or does not run ``determined_ds.train MODULE:CLASS``.
    """

    def refuse(message: str) -> EntrypointError:
        problem = Problem(key="entrypoint", message=message, mend=f"write: {ENTRYPOINT_FORM}")
        return EntrypointError(problem)

    if entrypoint is None:
        raise refuse("missing: it says which trial to train")
    if isinstance(entrypoint, str):
        try:
            words = shlex.split(entrypoint)
        except ValueError as error:
            raise refuse(f"cannot be split into words: {error}") from None
    elif isinstance(entrypoint, list) and all(isinstance(word, str) for word in entrypoint):
        words = entrypoint
    else:
        raise refuse(f"must be a command, not {kind_of(entrypoint)}")
    if len(words) == 1 and ":" in words[0]:
        raise refuse("names a class: that form is deprecated by Determined, and DeepSpeed needs a launcher")
    if "determined_ds.train" not in words:
        raise refuse("does not run determined_ds.train")
    rest = words[words.index("determined_ds.train") + 1 :]
    if not rest or not re.fullmatch(r"[\w.]+:\w+", rest[0]):
        raise refuse("determined_ds.train needs MODULE:CLASS")
    return rest[0]


def _one_point(found: _Findings, path: KeyPath, value: Any, searched: list[str]) -> Any:
    """One point of the search space below ``path``: constants unwrapped, specs at their middle."""
    if not isinstance(value, dict):
        return value
    if "type" not in value:
        return {key: _one_point(found, (*path, key), item, searched) for key, item in value.items()}
    kind = value["type"]
    if kind not in SPEC_TYPES:
        found.add(
            path,
            "a mapping with a key `type` is read by Determined as a hyperparameter to search",
            "wrap it: {type: const, val: {...}}, or keep a DeepSpeed JSON in a file",
            "hyperparameter-spec",
        )
        return None
    if kind == "const":
        return value.get("val")
    searched.append(found.document.key(path))
    try:
        return middle_of(value)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError):
        found.add(path, f"is no complete {kind} hyperparameter", _spec_form(kind), "hyperparameter-spec")
        return None


def _spec_form(kind: str) -> str:
    if kind == "categorical":
        return "write {type: categorical, vals: [...]}"
    base = ", base: 10" if kind == "log" else ""
    return f"write {{type: {kind}, minval: ..., maxval: ...{base}}} with minval < maxval"


def middle_of(spec: dict[str, Any]) -> Any:
    """The value in the middle of a hyperparameter's range; the first of a list.

    A ``log`` hyperparameter ranges over base**minval .. base**maxval.
    """
    if spec["type"] == "categorical":
        return spec["vals"][0]
    low, high = spec["minval"], spec["maxval"]
    if not low < high:
        raise ValueError("minval must be below maxval")
    if spec["type"] == "int":
        return (int(low) + int(high)) // 2
    middle = (low + high) / 2
    return float(spec["base"] ** middle) if spec["type"] == "log" else float(middle)
