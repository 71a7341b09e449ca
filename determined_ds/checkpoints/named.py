"""Which checkpoint a word means: ``best``, ``last``, a uuid, a checkpoint's folder, a run directory. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from determined_ds.checkpoints.files import (
    MANIFEST,
    METADATA,
    STATE,
    THEIR_STATE,
    Checkpoint,
    checkpoint_at,
    checkpoints_in,
    damage_of,
    newest_good_checkpoint,
)
from determined_ds.checkpoints.retention import as_number, best_of
from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.handed_on import BEST, LAST
from determined_ds.rundir.links import metric_of
from determined_ds.rundir.metrics_file import read_records
from determined_ds.rundir.records import read_result
from determined_ds.rundir.run_dir import CHECKPOINTS, RUNS, RunDir, short


class NotFound(Exception):
    """There is no such checkpoint, or it cannot be loaded; the text says why."""


def refused(key: str, given: str, message: str) -> ConfigError:
    """The error of an option or an argument that names no checkpoint."""
    fix = "give a path of a checkpoint or a run directory; or, with --run-dir, best, last or a uuid in it"
    return ConfigError(Problem(key=key, value=given, message=message, fix=fix, code="no-checkpoint"))


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint that was named.

    Args:
        checkpoint: It.
        damages: What is wrong with newer ones, where the newest good one was meant.
    """

    checkpoint: Checkpoint
    damages: tuple[str, ...] = ()


def find(given: str, run: RunDir | None = None, *, key: str) -> Found:
    """The intact checkpoint that a word means; arguments and errors as of :func:`locate`."""
    try:
        return intact(locate(given, run, key=key))
    except NotFound as error:
        raise refused(key, given, str(error)) from None


def locate(given: str, run: RunDir | None = None, *, key: str) -> Path:
    """The folder that a word means: of a checkpoint, which may be damaged, or of a run.

    Args:
        given: ``best`` or ``last`` of ``run``; a uuid in it, below ``runs`` or beside it; the path of a checkpoint, or
            of a run directory, whose newest good one is meant.
        run: The run directory that was stated, if any.
        key: The option or the argument that gives it.

    Raises:
        ConfigError: there is none.
    """
    if run is not None and given in (BEST, LAST):
        if not checkpoints_in(run.checkpoints):
            raise refused(key, given, f"there is no such checkpoint: {short(run.path)} has none")
        if given == LAST:
            return run.path
        if best := best_checkpoint(run):
            return best.path
        raise refused(key, given, f"no checkpoint in {short(run.path)} has a validation of searcher.metric")
    if (path := next(candidates(given, run), None)) is not None:
        return path
    is_file = False
    with contextlib.suppress(OSError, ValueError):  # too long, or a null byte in it
        is_file = Path(given).is_file()
    message = "is a file, and a checkpoint is a folder" if is_file else "there is no such checkpoint"
    raise refused(key, given, message)


def intact(path: Path) -> Found:
    """The checkpoint of a folder, or the newest good one of a run directory.

    Raises:
        NotFound: it is damaged, or there is none.
    """
    path = path.resolve()
    if is_checkpoint(path):
        if damage := damage_of(path):
            raise NotFound(f"cannot be loaded: {damage}")
        return Found(checkpoint=checkpoint_at(path))
    if RunDir(path).checkpoints.is_dir():
        good, damages = newest_good_checkpoint(RunDir(path).checkpoints)
        if good is None:
            raise NotFound("; ".join(["holds no complete checkpoint", *damages]))
        return Found(checkpoint=good, damages=tuple(damages))
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        raise NotFound(
            "holds weights alone: det-ds checkpoint import makes of them what a training can start from"
        )
    raise NotFound(f"cannot be loaded: {damage_of(path)}")


def best_checkpoint(run: RunDir) -> Checkpoint | None:
    """The checkpoint with the best validation of ``searcher.metric`` among those that a run has; None if unknown."""
    metric, smaller_is_better = metric_of(run)
    kept = checkpoints_in(run.checkpoints)
    records = read_records(run.metrics, "validation") if metric else []
    values = {record["steps_completed"]: as_number(record["metrics"].get(metric)) for record in records}
    if best := best_of(kept, values, smaller_is_better=smaller_is_better):
        return best
    result = read_result(run)
    stated = (result.best or {}).get("checkpoint") if result is not None else None
    return next((each for each in kept if each.uuid == stated), None)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder looks like a checkpoint, of this library or of Determined's own loop."""
    return any((path / name).is_file() for name in (MANIFEST, METADATA, THEIR_STATE, STATE))


def names_checkpoints(path: Path) -> bool:
    """Whether a folder is a checkpoint or has some, as a run directory does."""
    return is_checkpoint(path) or (path / CHECKPOINTS).is_dir()


def candidates(given: str, run: RunDir | None = None) -> Iterator[Path]:
    """The folders that a uuid or a path may mean, the likeliest first.

    Args:
        given: The uuid or the path.
        run: The run directory that was stated; its checkpoints come first, those of its neighbours last.
    """
    is_name = "/" not in given and not given.startswith(".")
    try:
        if run is not None and is_name and (run.checkpoints / given).is_dir():
            yield run.checkpoints / given
        if Path(given).is_dir():
            yield Path(given)
    except (OSError, ValueError):  # too long, or a null byte in it
        return
    if not is_name or given in (BEST, LAST):
        return
    places = [(RUNS, f"*/*/{CHECKPOINTS}"), (RUNS, f"*/*/trials/*/{CHECKPOINTS}")]
    if run is not None:
        places.append((run.path.parent, f"*/{CHECKPOINTS}"))
    for folder, pattern in places:
        yield from (there / given for there in folder.glob(pattern) if (there / given).is_dir())
