"""Old names of keys, which the installed DeepSpeed still reads: replaced by the current names.

Source: deepspeed 0.19.8's ``DeepSpeedConfigModel._process_deprecated_field``, for the fields of
``runtime/zero/config.py`` that name a ``new_param``; ``get_bfloat16_config`` in ``runtime/precision_config.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import Problem

ZERO = "zero_optimization"
GATHER = "gather_16bit_weights_on_model_save"
# Old path -> the new one, and what else the new one is called.
NEW_NAMES: dict[KeyPath, tuple[KeyPath, ...]] = {
    ("bfloat16",): (("bf16",),),
    (ZERO, "cpu_offload"): ((ZERO, "offload_optimizer"),),
    (ZERO, "cpu_offload_param"): ((ZERO, "offload_param"),),
    (ZERO, "stage3_gather_fp16_weights_on_model_save"): ((ZERO, f"stage3_{GATHER}"), (ZERO, GATHER)),
}
OFFLOADS = frozenset({"cpu_offload", "cpu_offload_param"})
_ABSENT: Any = object()


def given_twice(document: Document, path: KeyPath) -> Problem | None:
    """The problem of a key that is given by its old name and by its new one: DeepSpeed takes one of them only."""
    for new in NEW_NAMES[path]:
        if document.get(new, _ABSENT) is not _ABSENT:
            message = f"is an old name of {new[-1]}, which is given too ({document.origin(new)})"
            return document.problem(path, message, f"remove it, and keep {new[-1]}", "deprecated-key")
    return None


def old_names(document: Document) -> Iterator[Problem]:
    """A warning for every key of a DeepSpeed JSON, as written, that has a new name."""
    for path, (new, *_) in NEW_NAMES.items():
        value = document.get(path, _ABSENT)
        if value is not _ABSENT:
            says = f'{new[-1]}: {{"device": "cpu"}}' if path[-1] in OFFLOADS else new[-1]
            fix = f"write {says} instead" if value or path[-1] not in OFFLOADS else "remove it"
            yield document.problem(path, "is an old name, deprecated by DeepSpeed", fix, "deprecated-key")


def by_new_names(document: Document) -> Document:
    """The same DeepSpeed JSON by current names; it must not have a key by both."""
    for path, (new, *_) in NEW_NAMES.items():
        value = document.get(path, _ABSENT)
        if value is _ABSENT:
            continue
        origin = document.origin(path)
        origins = {key: document.origin((*path, key)) for key in value} if isinstance(value, dict) else {}
        document = document.without(path)
        if path[-1] in OFFLOADS:
            value = {"device": "cpu"} if value is True else None
        if isinstance(value, dict):
            document = document.overwritten_all(
                ((*new, key), item, origins.get(key, origin)) for key, item in value.items()
            )
        elif isinstance(value, bool):
            document = document.overwritten(new, value, origin)
    return document
