"""The checkpoint that ``Trainer.fit(latest_checkpoint=...)`` names, and its partition of a pipeline."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import appdirs
from determined import core
from determined.errors import CheckpointNotFound

from determined_ds.checkpoints.rank_state import STATE, read_state
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.pipe.partition import NAME
from determined_ds.rundir.run_dir import RunDir
from determined_ds.train.local_core import AtomicStorage


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
    places = [storage.folder / name, determineds_folder() / name] if os.sep not in name else []
    for place in (*places, Path(name)):
        if place.is_dir():
            place = place.absolute()
            return place.name if place.parent == storage.folder.absolute() else str(place)
    folders = ", ".join(dict.fromkeys(str(place.parent) for place in (*places, Path(name))))
    message, fix = f"there is no such checkpoint in {folders}", "give its uuid, or the path of its folder"
    raise ConfigError(
        Problem(key="latest_checkpoint", value=name, message=message, fix=fix, code="no-checkpoint")
    )


def stored_partition(context: Any, run_dir: RunDir, trial_id: int | None) -> str | None:
    """The text of ``partition.json`` of the checkpoint that training continues from, before the model is built.

    None where there is none. Fetches no other file; for one rank.

    Args:
        context: Its core context stores the checkpoints; ``resumed_from`` names one, or is None.
        run_dir: Holds the partition of a run that begins again without a checkpoint.
        trial_id: On a cluster; the partition of another trial, on whatever machine that ran, is not taken.
    """
    with contextlib.suppress(OSError, CheckpointNotFound, CheckpointError, ConfigError):  # loading it says so
        if context.resumed_from is None:
            return run_dir.partition.read_text()
        uuid, mode = find_checkpoint(context, context.resumed_from), core.DownloadMode.NoSharedDownload
        wanted = (NAME, STATE)
        with context._core.checkpoint.restore_path(uuid, mode, selector=lambda name: name in wanted) as path:
            found = (Path(path) / NAME).read_text()
            if trial_id in (None, read_state(Path(path), uuid).trial_id):
                return found
    return None
