"""The checkpoint that ``Trainer.fit(latest_checkpoint=...)`` names: a uuid or a path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import appdirs

from determined_ds.errors import ConfigError, Problem
from determined_ds.runtime.local_core import AtomicStorage


def determineds_folder() -> Path:
    """Where Determined's trainers write checkpoints off-cluster.

    Source: ``_dummy_init`` in determined 0.38.1's ``core/_context.py``.
    """
    return Path(appdirs.user_data_dir("determined"))


def find_checkpoint(context: Any, given: str | os.PathLike[str]) -> str:
    """What to load: a uuid in this run's storage, or the folder of another checkpoint.

    Args:
        context: Its core context stores the checkpoints of this run.
        given: A uuid, of this run or in :func:`determineds_folder`, or a path.

    Raises:
        ConfigError: there is none, with where it was searched for.
    """
    name, storage = os.fspath(given), getattr(context._core.checkpoint, "_storage_manager", None)
    if not isinstance(storage, AtomicStorage):
        return name
    places = (
        [Path(name)] if os.sep in name else [storage.folder / name, determineds_folder() / name, Path(name)]
    )
    for place in places:
        if place.is_dir():
            place = place.absolute()
            return place.name if place.parent == storage.folder.absolute() else str(place)
    folders = ", ".join(dict.fromkeys(str(place.parent) for place in places))
    message, fix = f"there is no such checkpoint in {folders}", "give its uuid, or the path of its folder"
    raise ConfigError(
        Problem(key="latest_checkpoint", value=name, message=message, fix=fix, code="no-checkpoint")
    )
