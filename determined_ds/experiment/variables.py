"""``environment.environment_variables``: set for the ranks of a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from determined_ds.documents.document import Document, KeyPath, words
from determined_ds.documents.values import kind_of
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem

PATH: KeyPath = ("environment", "environment_variables")
DEVICES = ("cpu", "cuda", "rocm")
OLD_NAMES = {"cuda": "gpu"}
CODE = "environment-variables"
FORM = "write e.g. environment_variables: [NCCL_DEBUG=INFO]"
# A launch sets these itself, after the user's: so does Determined's launch layer on a cluster (torchrun's own).
OF_THE_LAUNCH = words("""CROSS_RANK CROSS_SIZE CUDA_VISIBLE_DEVICES DS_ACCELERATOR GROUP_RANK GROUP_WORLD_SIZE
    LOCAL_RANK LOCAL_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
    WORLD_SIZE""")
PREFIXES_OF_THE_LAUNCH = ("DET_", "TORCHELASTIC_")


@dataclass(frozen=True, kw_only=True)
class Variables:
    """Environment variables for the ranks.

    Args:
        values: Name -> value; None: the variable is removed, as a name without a value is in a container.
        warnings: Those that the launch sets itself.
    """

    values: Mapping[str, str | None] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()


def variables_for(document: Document, device: str) -> Variables:
    """The environment variables that an experiment asks for.

    Args:
        document: The experiment.
        device: What its ranks compute on: ``cpu``, ``cuda`` or ``rocm``.

    Raises:
        ConfigError: they are not lists of NAME=VALUE; every reason at once.
    """
    problems: list[Problem] = []
    values: dict[str, str | None] = {}
    warnings: list[Problem] = []
    for path, of_device, entry in _entries(document, problems):
        name, equals, value = entry.partition("=")
        if not name or "\0" in entry:
            problems.append(document.problem(path, "is not NAME=VALUE", FORM, CODE, value=NOT_GIVEN))
        elif of_device not in (None, device):
            continue
        elif name in OF_THE_LAUNCH or name.startswith(PREFIXES_OF_THE_LAUNCH):
            message = f"{name} is set by the launch: this value is not used"
            warnings.append(document.problem(path, message, "remove it", CODE, value=NOT_GIVEN))
        else:
            values[name] = value if equals else None
    if problems:
        raise ConfigError(problems)
    return Variables(values=values, warnings=tuple(warnings))


def _entries(document: Document, problems: list[Problem]) -> Iterator[tuple[KeyPath, str | None, str]]:
    """Path, device (None: every one) and text of each entry; the lists of a device come after those of all."""
    given = document.get(PATH)
    if given is None:
        return
    lists: dict[KeyPath, tuple[str | None, Any]] = {PATH: (None, given)}
    if isinstance(given, dict):
        known = {old: device for device, old in OLD_NAMES.items()} | {device: device for device in DEVICES}
        lists = {(*PATH, key): (known.get(key), value) for key, value in given.items()}
    for path, (device, entries) in lists.items():
        if len(path) > len(PATH) and device is None:
            problems.append(
                document.problem(
                    path, "unknown key", f"use one of {', '.join(DEVICES)}", CODE, value=NOT_GIVEN
                )
            )
        elif not isinstance(entries, list):
            if entries is not None:
                message = f"must be a list of NAME=VALUE, not {kind_of(entries)}"
                problems.append(document.problem(path, message, FORM, CODE, value=NOT_GIVEN))
        else:
            for index, entry in enumerate(entries):
                if isinstance(entry, str):
                    yield (*path, index), device, entry
                else:
                    message = f"must be NAME=VALUE, not {kind_of(entry)}"
                    problems.append(document.problem((*path, index), message, FORM, CODE, value=NOT_GIVEN))


def names_of(config: Mapping[str, Any]) -> list[str]:
    """The names, device before name where they differ by device, sorted; of what cannot be read, nothing."""
    document = Document(name="", data=dict(config))
    if not isinstance(document.get(PATH[:1], {}), dict):
        return []
    return sorted(
        f"{device or ''} {entry.partition('=')[0]}".strip() for _, device, entry in _entries(document, [])
    )
