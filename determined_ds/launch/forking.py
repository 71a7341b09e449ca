"""``searcher.source_checkpoint_uuid`` without a cluster: a checkpoint's folder, a run directory, or a uuid."""

from __future__ import annotations

from pathlib import Path

from determined_ds.checkpoints.files import Checkpoint, elastic_refusal, num_writers
from determined_ds.checkpoints.named import NotFound, candidates, intact
from determined_ds.documents.document import KeyPath
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.run_dir import RUNS, RunDir

CHECKPOINT: KeyPath = ("searcher", "source_checkpoint_uuid")
TRIAL: KeyPath = ("searcher", "source_trial_id")
SLOTS: KeyPath = ("resources", "slots_per_trial")
ANEW = f"start without {CHECKPOINT[-1]}"
FORM = "write the path of a run directory or of a checkpoint in one, e.g. runs/NAME/TIME"


def fork_of(experiment: Experiment, run_dir: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The checkpoint that an experiment starts from, and what is wrong with newer ones.

    Args:
        experiment: What will run.
        run_dir: Where; its neighbours are searched for a uuid.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or another number of ranks wrote one that is to be
            loaded whole.
    """
    document = experiment.document
    trial, source = document.get(TRIAL), document.get(CHECKPOINT)
    if trial is not None:
        raise ConfigError(
            _problem(experiment, TRIAL, "names a trial on a cluster; none of it is on this machine")
        )
    if source is None:
        return None, ()
    if not isinstance(source, str) or not source:
        raise ConfigError(_problem(experiment, CHECKPOINT, "must be a path or a uuid"))
    checkpoint, damages = _found(experiment, source, run_dir)
    if experiment.hyperparameters.get(("fit", "warm_start")) == "all":
        check_writers(checkpoint, experiment, anew=f"fit.warm_start: weights, or {ANEW}")
    return checkpoint, damages


def check_writers(checkpoint: Checkpoint, experiment: Experiment, *, anew: str) -> None:
    """Check that a checkpoint can be read by the ranks that will be there.

    Args:
        checkpoint: The checkpoint.
        experiment: What will read it.
        anew: How to start without it, for the message.

    Raises:
        ConfigError: another number of ranks wrote it, and only that can read it.
    """
    writers = num_writers(checkpoint.path)
    if writers in (0, experiment.slots):  # 0: another program wrote it; the ranks will check it
        return
    reason = elastic_refusal(checkpoint.path)
    if reason is None:
        return
    by = f"checkpoint {checkpoint.uuid} was written by {count(writers, 'rank')}"
    message = f"{by}, and only those can read it: {reason}"
    fix = f"use --slots {writers}, or {anew}"
    raise ConfigError(experiment.document.problem(SLOTS, message, fix, "resume-slots"))


def _found(experiment: Experiment, source: str, run_dir: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    path = next(candidates(source, RunDir(run_dir)), None)
    if path is None:
        message = f"there is no such folder, and no checkpoint of that name below {RUNS}"
        raise ConfigError(_problem(experiment, CHECKPOINT, message))
    try:
        found = intact(path)
    except NotFound as error:
        message = f"must be a checkpoint that can be loaded; it {error}"
        raise ConfigError(_problem(experiment, CHECKPOINT, message)) from None
    return found.checkpoint, found.damages


def _problem(experiment: Experiment, path: KeyPath, message: str) -> Problem:
    document = experiment.document
    fix = FORM if path == CHECKPOINT else f"remove it; in its place {CHECKPOINT[0]}.{CHECKPOINT[1]}: {FORM}"
    fix = f"{fix}, or {ANEW}" if path == CHECKPOINT else fix
    return document.problem(path, message, fix, "fork")
