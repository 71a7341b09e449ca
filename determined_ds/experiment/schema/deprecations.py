"""What a master of 0.38.1 still takes, and would rather not: a row is a key, why, and its replacement.

Source: determined 0.38.1's release notes, the comments in its schemas ``expconf/v0``, and the warnings in its
harness (``determined/exec/harness.py``, ``pytorch/deepspeed/_trainer.py``, ``launch/deepspeed.py``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import ENTRYPOINT_FORM, WORD


@dataclass(frozen=True, kw_only=True)
class Deprecation:
    """One key.

    Args:
        key: Dotted.
        why: What has become of it.
        fix: What to write instead.
    """

    key: str
    why: str
    fix: str


IGNORED = "is ignored by Determined"
DEPRECATED = "is deprecated by Determined since 0.38"
UNREAD = f"{DEPRECATED}, and ignored unless the entrypoint names a class"
TABLE = (
    Deprecation(
        key="searcher.max_length", why=UNREAD, fix="set hyperparameters.fit.max_length, and remove it"
    ),
    Deprecation(
        key="searcher.stop_once",
        why=f"{DEPRECATED}: every ASHA search stops trials early now",
        fix="remove it",
    ),
    Deprecation(
        key="min_validation_period",
        why=UNREAD,
        fix="set hyperparameters.fit.validation_period, and remove it",
    ),
    Deprecation(
        key="min_checkpoint_period",
        why=UNREAD,
        fix="set hyperparameters.fit.checkpoint_period, and remove it",
    ),
    Deprecation(
        key="scheduling_unit", why=UNREAD, fix="set hyperparameters.fit.reporting_period, and remove it"
    ),
    Deprecation(key="optimizations", why=UNREAD, fix="set it in the DeepSpeed JSON, and remove it"),
    Deprecation(key="data_layer", why=f"{IGNORED} since 0.19.10", fix="remove it"),
    Deprecation(key="resources.agent_label", why=f"{IGNORED} since 0.20", fix="use resources.resource_pool"),
    Deprecation(key="security", why=IGNORED, fix="remove it"),
    Deprecation(key="tensorboard_storage", why=IGNORED, fix="remove it: checkpoint_storage is used"),
    Deprecation(
        key="checkpoint_storage.checkpoint_path", why=IGNORED, fix="use checkpoint_storage.storage_path"
    ),
    Deprecation(
        key="checkpoint_storage.tensorboard_path", why=IGNORED, fix="use checkpoint_storage.storage_path"
    ),
    Deprecation(
        key="environment.image.gpu",
        why="is the old name of cuda, from before 0.17.6",
        fix="use environment.image.cuda",
    ),
    Deprecation(
        key="environment.environment_variables.gpu",
        why="is the old name of cuda, from before 0.17.6",
        fix="use environment.environment_variables.cuda",
    ),
)


def deprecations(document: Document) -> list[Problem]:
    """Every deprecated key that is given, a null being none."""
    found = [
        (path, row.why, row.fix)
        for row in TABLE
        for path in _given(document.data, tuple(row.key.split(".")), ())
    ]
    found += [*_entrypoint(document.get(("entrypoint",))), *_policies(document.get(("log_policies",)))]
    found.sort(key=lambda row: (document.origin(row[0]).line, document.origin(row[0]).column))
    return [
        Problem(
            key=document.key(path),
            value=document.get(path),
            message=why,
            origin=document.origin(path),
            fix=fix,
            code="deprecated-key",
        )
        for path, why, fix in found
    ]


def _given(value: Any, key: tuple[str, ...], path: KeyPath) -> Iterator[KeyPath]:
    if not key:
        if value is not None:
            yield path
    elif isinstance(value, dict) and key[0] in value:
        yield from _given(value[key[0]], key[1:], (*path, key[0]))


def _entrypoint(entrypoint: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """A class for an entrypoint, and a launcher's ``--trial``."""
    try:
        words = shlex.split(entrypoint) if isinstance(entrypoint, str) else entrypoint
    except ValueError:
        return
    if not isinstance(words, list):
        return
    fix = f"write a script for it, e.g. {ENTRYPOINT_FORM}"
    if len(words) == 1 and re.fullmatch(rf"{WORD}(\.{WORD})*:{WORD}(\.{WORD})*", str(words[0])):
        yield ("entrypoint",), f"names a class: that form {DEPRECATED}", fix
    if "--trial" in words:
        yield ("entrypoint",), f"--trial {DEPRECATED}", fix


def _policies(policies: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """Log policies of the form from before they had names, and then strings for actions."""
    for index, policy in enumerate(policies if isinstance(policies, list) else ()):
        path: KeyPath = ("log_policies", index)
        action = policy.get("action") if isinstance(policy, dict) else None
        form = f", action: {action['type']}" if isinstance(action, dict) and "type" in action else ""
        if isinstance(policy, dict) and "name" not in policy:
            fix = f"write name: ...{form}; by its name it can be overridden"
            yield path, "has no name: that form of a log policy is the old one", fix
        elif form:
            yield (*path, "action"), "is the old form of an action", f"write {form[2:]}"
