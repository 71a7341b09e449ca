"""Going on with a run: from which checkpoint, with what changed since it was written, and whether anything is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from determined_ds.config.hyperparameters import TRIAL_SEED
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.changed_keys import Changes, asked_before, changes_since
from determined_ds.experiment.experiment import Experiment
from determined_ds.protocol.checkpoint_files import (
    Checkpoint,
    checkpoints_in,
    is_index,
    newest_good_checkpoint,
    num_writers,
)
from determined_ds.protocol.paths import count, run_dir_problem
from determined_ds.protocol.run_dir import CHECKPOINTS, DEEPSPEED_CONFIG, EXPERIMENT

NO_CHECKPOINT = "it was ended before its first checkpoint, and starts from the beginning"
UNKNOWN = "unknown: the checkpoint does not say what it was written by, and settings cannot be compared"
MOST_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    Args:
        checkpoint: To go on from; None: from the beginning.
        fork: A checkpoint of another run, to begin with.
        changes: What has changed since either was written.
        damages: What is wrong with checkpoints that are newer.
    """

    checkpoint: Checkpoint | None = None
    fork: Checkpoint | None = None
    changes: Changes = field(default_factory=Changes)
    damages: tuple[str, ...] = ()

    def header(self) -> list[str]:
        """It, in a few lines for people."""
        lines = []
        if self.checkpoint:
            at = self.checkpoint.steps_completed
            lines.append(f"  resume     batch {at}, checkpoint {self.checkpoint.uuid}")
        if self.fork:
            run = self.fork.path.parent.parent
            lines.append(
                f"  fork       batch {self.fork.steps_completed} of {run.parent.name}/{run.name}, checkpoint"
                f" {self.fork.uuid}"
            )
        if self.checkpoint:
            lines += _listed("changed", self.changes.effective)
            lines += _listed("no effect", self.changes.idle)
        return lines


def _listed(title: str, lines: tuple[str, ...]) -> list[str]:
    shown = list(lines[:MOST_SHOWN])
    if len(lines) > MOST_SHOWN:
        shown.append(f"and {len(lines) - MOST_SHOWN} more")
    return [f"  {title if not number else '':<10} {line}" for number, line in enumerate(shown)]


def checkpoint_to_resume(run_dir: Path, *, stated: bool) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest good checkpoint of a run, None for the beginning, and what is wrong with those after it.

    Args:
        run_dir: The run directory.
        stated: Whether the user named it.

    Raises:
        ConfigError: there is nothing to go on from.
    """
    if not stated:  # of which run? The newest one of the same experiment is a good guess
        siblings = run_dir.parent.glob("*")
        runs = sorted((path for path in siblings if checkpoints_in(path / CHECKPOINTS)), reverse=True)
        fix = f"add --run-dir {runs[0]}" if runs else "add the --run-dir of the run to go on with"
        raise ConfigError(Problem(key="--resume", message="needs the --run-dir to resume from", fix=fix))
    good, damages = newest_good_checkpoint(run_dir / CHECKPOINTS)
    if good is None and not damages and (run_dir / EXPERIMENT).is_file():
        return None, (NO_CHECKPOINT,)
    if good is None:
        message = "; ".join(["there is no complete checkpoint in it to resume from", *damages])
        fix = "give the --run-dir of the run to go on with, or start anew in another, without --resume"
        raise ConfigError(run_dir_problem(run_dir, message, fix))
    return good, tuple(damages)


def check_writers(checkpoint: Checkpoint, experiment: Experiment, *, anew: str) -> None:
    """A checkpoint has one part for each rank that wrote it.

    Args:
        checkpoint: The checkpoint.
        experiment: What is to read it.
        anew: How to start without it, for the message.

    Raises:
        ConfigError: other ranks than these wrote it.
    """
    writers = num_writers(checkpoint.path)
    if writers in (0, experiment.slots):  # 0: not one of ours; the ranks will say
        return
    path = ("resources", "slots_per_trial")
    raise ConfigError(
        Problem(
            key=experiment.document.key(path),
            value=experiment.slots,
            origin=experiment.document.origin(path),
            message=f"checkpoint {checkpoint.uuid} was written by {count(writers, 'rank')}",
            fix=f"use --slots {writers}, or {anew}",
            code="resume-slots",
        )
    )


def check_storage(checkpoint: Checkpoint, *, storage: bool) -> None:
    """A run goes on with its checkpoints where it has kept them.

    Args:
        checkpoint: To go on from.
        storage: Whether ``--storage`` was given.

    Raises:
        ConfigError: they are in the other place.
    """
    elsewhere = is_index(checkpoint.path)
    if elsewhere == storage:
        return
    where = "checkpoint_storage" if elsewhere else "the run directory"
    message = f"checkpoint {checkpoint.uuid} of this run is in {where}"
    fix = "add --storage" if elsewhere else "leave --storage out, or start anew in another --run-dir"
    raise ConfigError(Problem(key="--resume", message=message, fix=fix, code="storage"))


def trial_seed_of(checkpoint: Checkpoint) -> int | None:
    """The seed of the trial that wrote a checkpoint; None where it does not tell.

    Before checkpoints named it, a run here took the experiment's own seed for the trial's.
    """
    told = _read(checkpoint.path / "load_data.json")
    config = told.get("experiment_config")
    if TRIAL_SEED in told or not isinstance(config, dict):
        return told.get(TRIAL_SEED)
    return int((config.get("reproducibility") or {}).get("experiment_seed") or 0)


def keeping_seed(checkpoint: Checkpoint, experiment: Experiment) -> Experiment:
    """An experiment with the trial seed of the checkpoint that it goes on from, unless it states one itself."""
    seed, point = trial_seed_of(checkpoint), experiment.hyperparameters
    if seed in (None, experiment.trial_seed) or point.get((TRIAL_SEED,)) is not None:
        return experiment
    kept = point.overwritten((TRIAL_SEED,), seed, f"checkpoint {checkpoint.uuid}")
    return replace(experiment, hyperparameters=kept)


def changes_of(
    checkpoint: Checkpoint, experiment: Experiment, resolved: ResolvedConfig, *, warm_start: str | None = None
) -> Changes:
    """What has changed since a checkpoint was written; of one that does not tell, a line says so.

    Args:
        checkpoint: The checkpoint.
        experiment: What is asked for now.
        resolved: What it makes.
        warm_start: What is taken of it by a training that begins anew; None where training goes on.
    """
    told = _read(checkpoint.path / "load_data.json")
    ds_config = (
        told.get("deepspeed_config") or _read(checkpoint.path.parent.parent / DEEPSPEED_CONFIG) or None
    )
    before = asked_before(told.get("experiment_config") or {}, ds_config, trial_seed_of(checkpoint))
    if before is None:
        return Changes(effective=(UNKNOWN,))
    written = f"checkpoint {checkpoint.uuid}"
    changes = changes_since(before, experiment, resolved, written=written, warm_start=warm_start)
    # The number of ranks has a check of its own.
    problems = [problem for problem in changes.problems if problem.key != "resources.slots_per_trial"]
    return Changes(effective=changes.effective, idle=changes.idle, problems=tuple(problems))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def completed(checkpoint: Checkpoint, resolved: ResolvedConfig) -> str:
    """Words for a run that has nothing left to train; "" where something is, a last validation included."""
    length = resolved.fit.max_length
    if length is None or not isinstance(length.value, int):
        return ""
    state = _read(checkpoint.path / "trial_state.json")
    trained = state.get("epochs_trained" if length.unit == "epochs" else "batches_trained")
    if not isinstance(trained, int) or trained < length.value:
        return ""
    if trained == length.value and state.get("last_validation") != state.get("batches_trained"):
        return ""
    if trained > length.value:
        return f"{trained} {length.unit} are trained, and {length.value} were asked for"
    return f"{trained} of {length.value} {length.unit}"
