"""What a master of 0.38.1 accepts but has deprecated: a row is a key, why, and its replacement.

Source: determined 0.38.1's release notes, the comments in its schemas ``expconf/v0``, and the warnings in its
harness (``determined/exec/harness.py``, ``pytorch/deepspeed/_trainer.py``, ``launch/deepspeed.py``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import Problem
from determined_ds.experiment.entrypoint import CLASS, ENTRYPOINT_FORM, WORD

IGNORED = "is ignored by Determined"
DEPRECATED = "is deprecated by Determined since 0.38"
UNREAD = f"{DEPRECATED}, and ignored unless the entrypoint names a class"
CUDA = "is the old name of cuda, from before 0.17.6"
FIT = "set hyperparameters.fit.{}, and remove it"
# Dotted key, what has become of it, what to write instead.
TABLE = (
    ("searcher.max_length", UNREAD, FIT.format("max_length")),
    ("searcher.stop_once", f"{DEPRECATED}: every ASHA search stops trials early now", "remove it"),
    ("min_validation_period", UNREAD, FIT.format("validation_period")),
    ("min_checkpoint_period", UNREAD, FIT.format("checkpoint_period")),
    ("scheduling_unit", UNREAD, FIT.format("reporting_period")),
    ("optimizations", UNREAD, "set it in the DeepSpeed JSON, and remove it"),
    ("data_layer", f"{IGNORED} since 0.19.10", "remove it"),
    ("resources.agent_label", f"{IGNORED} since 0.20", "use resources.resource_pool"),
    ("security", IGNORED, "remove it"),
    ("tensorboard_storage", IGNORED, "remove it: checkpoint_storage is used"),
    ("checkpoint_storage.checkpoint_path", IGNORED, "use checkpoint_storage.storage_path"),
    ("checkpoint_storage.tensorboard_path", IGNORED, "use checkpoint_storage.storage_path"),
    ("environment.image.gpu", CUDA, "use environment.image.cuda"),
    ("environment.environment_variables.gpu", CUDA, "use environment.environment_variables.cuda"),
)


def deprecations(document: Document) -> list[Problem]:
    """Every deprecated key that is given; null counts as absent."""
    found = [
        (path, why, fix)
        for key, why, fix in TABLE
        for path in _given(document.data, tuple(key.split(".")), ())
    ]
    found += [*_entrypoint(document.get(("entrypoint",))), *_policies(document.get(("log_policies",)))]
    found.sort(key=lambda row: (document.origin(row[0]).line, document.origin(row[0]).column))
    return [document.problem(path, why, fix, "deprecated-key") for path, why, fix in found]


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
    trial = next((str(word) for word in words if CLASS.fullmatch(str(word))), ENTRYPOINT_FORM.split()[-1])
    fix = f"write a script for it, e.g. {' '.join([*ENTRYPOINT_FORM.split()[:-1], trial])}"
    if len(words) == 1 and re.fullmatch(rf"{WORD}(\.{WORD})*:{WORD}(\.{WORD})*", str(words[0])):
        # determined/exec/launch.py starts it by torch_distributed, and pytorch/deepspeed/_trainer.py refuses that.
        why = "on more than one slot a cluster cannot start a DeepSpeedTrial by it"
        yield ("entrypoint",), f"names a class: that form {DEPRECATED}; {why}", fix
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
