"""What a run was given, key by key with where each value came from, and in which keys runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from determined_ds.report.runs.run_view import RunView

# Facts of a launch that are decided, in the order of the page.
DECIDED = (
    "strategy",
    "slots",
    "machines",
    "accelerator",
    "global_batch_size",
    "micro_batch_size",
    "accumulation",
    "replicas",
    "trial_seed",
)
IN_DS_CONFIG = ("deepspeed_config", "overwrite_deepspeed_args")  # hyperparameters that are part of it
RUN_DIR = "RUN_DIR"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value that a run was given.

    Args:
        value: As JSON text; a text without its quotation marks.
        origin: Where it came from; "" where that is not recorded.
    """

    value: str
    origin: str = ""


Settings = dict[str, Setting]


@dataclass(frozen=True, kw_only=True)
class DifferingKey:
    """A key that is not the same in all runs.

    Args:
        key: Dotted.
        values: Of each run; None where it lacks the key.
    """

    key: str
    values: tuple[str | None, ...]


def configuration(shown: RunView) -> dict[str, Settings]:
    """Section -> dotted key -> what the run was given: what was decided, hyperparameters, what DeepSpeed gets."""
    launch = shown.launch
    ds_config: Any = (launch.ds_config if launch else None) or shown.run.ds_config
    hyperparameters = dict(shown.hyperparameters or {}) if isinstance(shown.hyperparameters, Mapping) else {}
    if ds_config:
        for key in IN_DS_CONFIG:
            if isinstance(hyperparameters.get(key), Mapping):
                del hyperparameters[key]
    decided = {key: value for key in DECIDED if (value := getattr(launch, key, None)) not in (None, "", 0)}
    origins = launch.origins if launch else {}
    sections = {
        "decided": _settings(decided, {}, shown),
        "hyperparameters": _settings(hyperparameters, {}, shown),
        "DeepSpeed": _settings(ds_config, origins, shown),
    }
    return {name: settings for name, settings in sections.items() if settings}


def environment(shown: RunView) -> Settings:
    """Versions and facts of the machine, as recorded at the last launch."""
    launch = shown.launch
    if launch is None:
        return {}
    machine = dict(launch.machine)
    memory = machine.pop("memory_bytes", None)
    if isinstance(memory, (int, float)):
        machine["memory"] = f"{memory / 2**30:.1f} GiB"
    return _settings({**launch.versions, **machine}, {}, shown)


def differences(each: Sequence[Mapping[str, Setting]]) -> list[DifferingKey]:
    """The keys whose values differ between runs, in the order in which they come.

    Args:
        each: The settings of each run.
    """
    keys = dict.fromkeys(key for settings in each for key in settings)
    found = []
    for key in keys:
        values = tuple(settings[key].value if key in settings else None for settings in each)
        if len(set(values)) > 1:
            found.append(DifferingKey(key=key, values=values))
    return found


def with_sections(sections: Mapping[str, Settings]) -> Settings:
    """All settings of a configuration under one name each: those of DeepSpeed begin with ``deepspeed_config.``."""
    prefix = {"DeepSpeed": "deepspeed_config."}
    return {
        f"{prefix.get(name, '')}{key}": setting
        for name, settings in sections.items()
        for key, setting in settings.items()
    }


def _settings(tree: Any, origins: Mapping[str, str], shown: RunView) -> Settings:
    """Leaves of a tree by their dotted keys. A path in the run directory is the same in every run."""
    folder = str(shown.run.path.resolve())
    return {
        key: Setting(value=_text(value).replace(folder, RUN_DIR), origin=_origin(key, origins))
        for key, value in _leaves(tree, "")
    }


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """That of the key, or of the mapping that it is in."""
    while key:
        if key in origins:
            return str(origins[key])
        key = key.rpartition(".")[0]
    return ""


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and (tree or not prefix):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
