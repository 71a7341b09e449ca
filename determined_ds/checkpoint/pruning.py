"""Which checkpoints of a run may go, and their removal."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from determined_ds.errors import ConfigError, Problem
from determined_ds.protocol.checkpoint_files import (
    PARTIAL,
    Checkpoint,
    checkpoints_in,
    is_index,
    newest_good_checkpoint,
)
from determined_ds.protocol.named_checkpoint import best_checkpoint
from determined_ds.protocol.run_dir import RunDir, run_dir_problem, short


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """What becomes of the checkpoints of a run.

    Args:
        kept: The newest first.
        removed: The newest first.
        best: The one with the best validation, which is kept; None if unknown.
        newest: The newest intact one, which is kept.
        damages: What is wrong with newer ones, which are removed before others.
    """

    kept: tuple[Checkpoint, ...]
    removed: tuple[Checkpoint, ...]
    best: Checkpoint | None
    newest: Checkpoint
    damages: tuple[str, ...] = ()


def plan_pruning(run_dir: Path, keep: int) -> Pruning:
    """Decide which checkpoints go, as ``fit.save_total_limit`` does: damaged ones and the oldest first.

    Args:
        run_dir: The run directory; the newest checkpoint in it is verified.
        keep: How many are kept, >= 1; always the best and the newest intact one.

    Raises:
        ConfigError: it has no checkpoints, none is intact, or they are in another storage.
    """
    there = RunDir(run_dir)
    found = checkpoints_in(there.checkpoints)
    if not found:
        fix = "give the folder of a run: the one that has checkpoints/"
        raise ConfigError(_problem(run_dir, "has no checkpoints", fix))
    if any(is_index(each.path) for each in found):
        message = "its checkpoints are in checkpoint_storage"
        fix = "resume it with --storage and fit.save_total_limit, which prunes them there"
        raise ConfigError(_problem(run_dir, message, fix))
    newest, damages = newest_good_checkpoint(there.checkpoints)
    if newest is None:
        message = "; ".join(["has no intact checkpoint", *damages])
        raise ConfigError(_problem(run_dir, message, "delete the folder if none of it is needed"))
    best = best_checkpoint(there)
    newer = found[: found.index(newest)]
    order = [*newer, *(each for each in reversed(found) if each not in newer)]
    spare = [each for each in order if each not in (best, newest)]
    removed = spare[: max(0, len(found) - keep)]
    return Pruning(
        kept=tuple(each for each in found if each not in removed),
        removed=tuple(each for each in found if each in removed),
        best=best,
        newest=newest,
        damages=tuple(damages),
    )


def remove(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint; from the first moment on it is incomplete by its name."""
    aside = checkpoint.path.with_name(f".{checkpoint.uuid}{PARTIAL}")
    checkpoint.path.rename(aside)
    shutil.rmtree(aside)


def _problem(run_dir: Path, message: str, fix: str) -> Problem:
    problem = run_dir_problem(run_dir, message, fix)
    return Problem(key="RUN_DIR", value=short(run_dir), message=problem.message, fix=fix, code="prune")
