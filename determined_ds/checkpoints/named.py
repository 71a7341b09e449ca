"""Which checkpoints a word means: ``best``, ``last``, a uuid, a checkpoint's folder, a run directory. No torch.

word -> a folder -> its checkpoints, the newest first -> the first that is intact
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from determined_ds.checkpoints.files import (
    MANIFEST,
    METADATA,
    STATE,
    THEIR_STATE,
    Checkpoint,
    checkpoint_at,
    checkpoints_in,
    newest_good,
)
from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.handed_on import BEST, LAST
from determined_ds.rundir.records import best_checkpoint
from determined_ds.rundir.run_dir import CHECKPOINTS, RUNS, RunDir, short

FIX = "give a path of a checkpoint or a run directory; or, with --run-dir, best, last or a uuid in it"


def find(given: str, run: RunDir | None = None, *, key: str) -> list[Checkpoint]:
    """The checkpoints that a word means, the newest first; they may be damaged.

    Args:
        given: ``best`` or ``last`` of ``run``; a uuid in it, below ``runs`` or beside it; the path of a checkpoint, or
            of a run directory, all of whose checkpoints are meant, as by ``last``.
        run: The run directory that was stated, if any.
        key: The option or the argument that gives it.

    Raises:
        ConfigError: there is none.
    """

    def refused(message: str) -> ConfigError:
        return ConfigError(Problem(key=key, value=given, message=message, fix=FIX, code="no-checkpoint"))

    run = run and RunDir(run.path.resolve())
    if run is not None and given in (BEST, LAST):
        kept = checkpoints_in(run.checkpoints)
        if not kept:
            raise refused(f"there is no such checkpoint: {short(run.path)} has none")
        best = best_checkpoint(run)
        if given == BEST and best is None:
            raise refused(f"no checkpoint in {short(run.path)} has a validation of searcher.metric")
        return [best] if best is not None and given == BEST else kept
    path = next(_folders(given, run), None)
    if path is None:
        raise refused("there is no such checkpoint, and there is no such folder")
    if found := checkpoints_at(path):
        return found
    raise refused("holds no checkpoint; of safetensors alone, det-ds checkpoint import makes one")


def find_good(given: str, run: RunDir | None = None, *, key: str) -> tuple[Checkpoint, tuple[str, ...]]:
    """The newest intact one of what :func:`find` finds, and what is wrong with newer ones.

    Raises:
        ConfigError: there is none.
    """
    good, damages = newest_good(find(given, run, key=key))
    if good is None:
        message = "; ".join(damages)
        raise ConfigError(Problem(key=key, value=given, message=message, fix=FIX, code="no-checkpoint"))
    return good, tuple(damages)


def checkpoints_at(path: Path) -> list[Checkpoint]:
    """The checkpoint that a folder is, of this library or of Determined's own loop; or those of a run directory."""
    path = path.resolve()
    if any((path / name).is_file() for name in (MANIFEST, METADATA, THEIR_STATE, STATE)):
        return [checkpoint_at(path)]
    return checkpoints_in(path / CHECKPOINTS)


def _folders(given: str, run: RunDir | None) -> Iterator[Path]:
    """The folders that a uuid or a path may mean, the likeliest first."""
    places = [Path()]
    if "/" not in given and not given.startswith("."):  # it may be a uuid
        places += [*RUNS.glob(f"*/*/{CHECKPOINTS}"), *RUNS.glob(f"*/*/trials/*/{CHECKPOINTS}")]
        if run is not None:
            places = [run.checkpoints, *places, *run.path.parent.glob(f"*/{CHECKPOINTS}")]
    return (place / given for place in places if os.path.isdir(place / given))
