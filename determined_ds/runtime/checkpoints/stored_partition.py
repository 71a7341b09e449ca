"""The partition of a pipeline in the checkpoint that training continues from, before the model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from determined import core
from determined.errors import CheckpointNotFound

from determined_ds.errors import CheckpointError, ConfigError
from determined_ds.pipe.partition import NAME
from determined_ds.protocol.run_dir import RunDir
from determined_ds.runtime.checkpoints.finding import find_checkpoint
from determined_ds.runtime.checkpoints.trial_state import STATE, read_state


def stored_partition(context: Any, run_dir: RunDir, trial_id: int | None) -> str | None:
    """The text of ``partition.json``; None where there is none. Fetches no other file; for one rank.

    Args:
        context: Its core context stores the checkpoints; ``resumed_from`` names one, or is None.
        run_dir: Holds the partition of a run that begins again without a checkpoint.
        trial_id: On a cluster; the partition of another trial, on whatever machine that ran, is not taken.
    """
    if context.resumed_from is None:
        return _text_of(run_dir.partition)
    wanted = (NAME, STATE)
    mode = core.DownloadMode.NoSharedDownload
    try:
        uuid = find_checkpoint(context, context.resumed_from)
        with context._core.checkpoint.restore_path(uuid, mode, selector=lambda name: name in wanted) as path:
            found = _text_of(Path(path) / NAME)
            is_own = found is None or trial_id in (None, read_state(Path(path), uuid).trial_id)
            return found if is_own else None
    except (CheckpointNotFound, CheckpointError, ConfigError):  # loading it says so
        return None


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
