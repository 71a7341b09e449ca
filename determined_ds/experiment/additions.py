"""What the experiment configuration gained after Determined 0.38.1: one table, a row a key.

Determined's own releases end with 0.38.1; the community fork WU-CVGL/determined continues from there. A version
difference is a row here and no branch elsewhere: ``experiment/schema`` adds the rows to the schemas of 0.38.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

from determined_ds.errors import ConfigError, Problem

OPTION = "--determined-version"
OLDEST = "0.38.1"
# Source: ``docs/release-notes.rst`` of WU-CVGL/determined at 0.42.0. No release is numbered 0.39.
NEWEST = "0.42.0"


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


ADDITIONS = (
    Addition(
        key="resources.prefer_gpu_topology",
        since="0.42.0",
        values=(False, "strong", "soft"),
        source="WU-CVGL/determined 0.42.0: schemas/expconf/v0/resources.json, docs/release-notes.rst",
    ),
)


def added_to(section: str) -> dict[str, Addition]:
    """The keys that a section has gained, in any version, by name."""
    return {row.key.rpartition(".")[2]: row for row in ADDITIONS if row.key.rpartition(".")[0] == section}


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
