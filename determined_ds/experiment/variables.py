"""``environment.environment_variables``: set for the ranks of a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from determined_ds.documents.document import Document, KeyPath, words
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem

PATH: KeyPath = ("environment", "environment_variables")
# Of the key of a list; gpu is the old name.
DEVICES = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "rocm": "rocm"}
# A launch sets these itself, after the user's: so does Determined's launch layer on a cluster (torchrun's own).
OF_THE_LAUNCH = words("""CROSS_RANK CROSS_SIZE CUDA_VISIBLE_DEVICES DS_ACCELERATOR GROUP_RANK GROUP_WORLD_SIZE
    LOCAL_RANK LOCAL_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
    WORLD_SIZE""")
PREFIXES_OF_THE_LAUNCH = ("DET_", "TORCHELASTIC_")


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
    own = [(name, value) for _, of, name, value in _entries(document) if of in (None, device)]
    return {name: value for name, value in own if not _by_launch(name)}


def variable_problems(document: Document, device: str | None = None) -> tuple[list[Problem], list[Problem]]:
    """Entries that are not NAME=VALUE, and warnings of those that a launch sets itself.

    Args:
        document: The experiment.
        device: Of the ranks, whose variables alone are warned of; every one if None.
    """
    problems, warnings, code = [], [], "environment-variables"
    fix = "write e.g. environment_variables: [NCCL_DEBUG=INFO]"
    for path, of_device, name, value in _entries(document):
        if not name or "\0" in f"{name}{value}":
            problems.append(document.problem(path, "is not NAME=VALUE", fix, code, value=NOT_GIVEN))
        elif _by_launch(name) and (device is None or of_device in (None, device)):
            message = f"{name} is set by the launch: this value is not used"
            warnings.append(document.problem(path, message, "remove it", code, value=NOT_GIVEN))
    return problems, warnings


def names_of(config: Mapping[str, Any]) -> list[str]:
    """The names, device before name where they differ by device, sorted; of what cannot be read, nothing."""
    entries = _entries(Document(name="", data=dict(config)))
    return sorted(f"{device or ''} {name}".strip() for _, device, name, _ in entries)


def _by_launch(name: str) -> bool:
    return name in OF_THE_LAUNCH or name.startswith(PREFIXES_OF_THE_LAUNCH)


def _entries(document: Document) -> Iterator[tuple[KeyPath, str | None, str, str | None]]:
    """Path, device (None: every one), name and value of each; the lists of a device come after those of all."""
    given = document.get(PATH)
    lists: dict[KeyPath, tuple[str | None, Any]] = {PATH: (None, given)}
    if isinstance(given, dict):
        lists = {(*PATH, key): (DEVICES[key], listed) for key, listed in given.items() if key in DEVICES}
    for path, (device, listed) in lists.items():
        for index, entry in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(entry, str):
                name, equals, value = entry.partition("=")
                yield (*path, index), device, name, value if equals else None
