"""What the experiment configuration gained after Determined 0.38.1: one table, a row a key.

Determined's own releases end with 0.38.1; the community fork WU-CVGL/determined continues from there. A version
difference is a row here and no branch elsewhere: the schemas in ``experiment/schema`` are those of 0.38.1, and what a
newer master takes beyond them is judged by this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

from determined_ds.documents.document import KeyPath
from determined_ds.errors import ConfigError, Problem, shown

OPTION = "--determined-version"
OLDEST = "0.38.1"
# Source: ``docs/release-notes.rst`` of WU-CVGL/determined at 0.42.0. No release is numbered 0.39.
NEWEST = "0.42.0"
_NONE = object()


@dataclass(frozen=True, kw_only=True)
class Addition:
    """A key that a master takes from some version on.

    Args:
        key: Dotted, below a section of 0.38.1.
        since: The first version that takes it.
        values: All that it takes; null stands for absent.
        source: Where upstream it is stated.
    """

    key: str
    since: str
    values: tuple[Any, ...]
    source: str

    @property
    def path(self) -> KeyPath:
        return tuple(self.key.split("."))

    def problem_with(self, value: Any, version: str) -> tuple[str, str, str] | None:
        """What is wrong with a value on a master of a version: (code, message, fix); None where nothing is.

        An older master refuses the key whatever its value, null and false included: its schema has no such property.
        """
        if Version(version) < Version(self.since):
            message = f"needs Determined {self.since} or newer, and this is checked for {version}"
            fix = f"remove it, or check with {OPTION} {self.since} where the master is that new"
            return "determined-version", message, fix
        if value is None or any(type(value) is type(known) and value == known for known in self.values):
            return None
        known = ", ".join(map(_written, self.values))
        return (
            "out-of-range",
            f"must be one of {known}, not {_written(value)}",
            f"write {_written(self.values[-1])}",
        )


ADDITIONS = (
    Addition(
        key="resources.prefer_gpu_topology",
        since="0.42.0",
        values=(False, "strong", "soft"),
        source="WU-CVGL/determined 0.42.0: schemas/expconf/v0/resources.json, docs/release-notes.rst",
    ),
)


def added_to(section: str) -> frozenset[str]:
    """Names of the keys that a section has gained, in any version."""
    keys = (row.key.rpartition(".") for row in ADDITIONS)
    return frozenset(name for parent, _, name in keys if parent == section)


def split_additions(config: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Addition, Any]]]:
    """A configuration as 0.38.1 knows it, and the added keys that it has, with their values."""
    given = []
    for row in ADDITIONS:
        value = _at(config, row.path)
        if value is not _NONE:
            given.append((row, value))
            config = _without(config, row.path)
    return config, given


def _at(node: Any, path: KeyPath) -> Any:
    for key in path:
        if not isinstance(node, dict) or key not in node:
            return _NONE
        node = node[key]
    return node


def _without(node: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {key: value for key, value in node.items() if key != head}
    return {key: _without(value, tuple(rest)) if key == head else value for key, value in node.items()}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


# --- Versions ---------------------------------------------------------------------------------------------


def version_to_check(stated: str | None) -> str:
    """The master's version to check for: the stated one, or that of the ``determined`` installed here.

    Args:
        stated: What ``--determined-version`` was given.

    Raises:
        ConfigError: it is not a valid version, or from before 0.38.1.
    """
    if stated is None:
        return _installed()
    try:
        known = Version(stated) >= Version(OLDEST)
    except InvalidVersion:
        known = False
    if known:
        return stated
    raise ConfigError(
        Problem(
            key=OPTION,
            value=stated,
            message=f"must be a version of Determined, {OLDEST} or newer",
            fix=f"write {', '.join(versions())}",
            code="determined-version",
        )
    )


def versions() -> Iterator[str]:
    """Versions at which something changes, oldest first."""
    yield from sorted({OLDEST, *(row.since for row in ADDITIONS)}, key=Version)


def is_newer_than_known(version: str) -> bool:
    """Whether a version may know more keys than this table."""
    return Version(version).release > Version(NEWEST).release


def _installed() -> str:
    """``determined`` is a requirement; where it is broken, the oldest is assumed."""
    try:
        found = metadata.version("determined")
        return found if Version(found) >= Version(OLDEST) else OLDEST
    except (metadata.PackageNotFoundError, InvalidVersion):
        return OLDEST
