"""Where a run starts: from which checkpoint, what has changed since it was written, and whether anything is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.files import (
    DATA_FIX,
    Checkpoint,
    checkpoints_in,
    data_refusal,
    elastic_refusal,
    newest_good_checkpoint,
)
from determined_ds.checkpoints.named import FORM, Found, NotFound, find
from determined_ds.config.params import TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import differences
from determined_ds.documents.files import read_yaml
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.changes import Changes, changes_since, settings_before, settings_of
from determined_ds.experiment.decide import Problems
from determined_ds.experiment.experiment import Experiment
from determined_ds.launch.forking import check_writers, fork_of
from determined_ds.rundir.handed_on import LAST
from determined_ds.rundir.run_dir import RunDir, run_dir_problem, short
from determined_ds.rundir.run_lock import check_run_dir

NO_CHECKPOINT = "no checkpoint found; starting from step 0"
BEGUN = "the run that continues {} has begun already, and resumes from its own newest checkpoint"
UNKNOWN = "unknown: the checkpoint does not hold its configuration, so settings cannot be compared"
NOT_RESUMED = "start anew in another --run-dir, without --resume"
MOST_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    Args:
        checkpoint: To resume from; None: from step 0.
        elsewhere: Whether ``checkpoint`` is not in the run directory: training continues from it, and no metrics come
            along.
        superseded: Checkpoints of the run that are newer than ``checkpoint``, the newest first: once it is loaded,
            they are no longer the run's.
        fork: A checkpoint of another run, to start from.
        weights: A checkpoint whose weights are evaluated; nothing is trained.
        changes: What has changed since either was written.
        resets_optimizer: Of the checkpoint to resume from the optimizer's state is left out.
        damages: What is wrong with checkpoints that are newer.
    """

    checkpoint: Checkpoint | None = None
    elsewhere: bool = False
    superseded: tuple[Checkpoint, ...] = ()
    fork: Checkpoint | None = None
    weights: Checkpoint | None = None
    changes: Changes = field(default_factory=Changes)
    resets_optimizer: bool = False
    damages: tuple[str, ...] = ()

    def header(self) -> list[str]:
        """The lines of the header about it."""
        lines = []
        if self.checkpoint:
            at, of = self.checkpoint.steps_completed, ""
            if self.elsewhere:
                of = f" in {short(self.checkpoint.path.parent)}"
            lines.append(f"  resume     batch {at}, checkpoint {self.checkpoint.uuid}{of}")
            if self.superseded:
                later = [f"{each.uuid} (batch {each.steps_completed})" for each in self.superseded]
                lines += _listed("superseded", (*later, f"metrics after batch {at} are removed"))
        if self.fork:
            run = self.fork.path.parent.parent
            lines.append(
                f"  fork       batch {self.fork.steps_completed} of {run.parent.name}/{run.name}, checkpoint"
                f" {self.fork.uuid}"
            )
        if self.weights:
            at = self.weights.steps_completed
            lines.append(f"  weights    batch {at}, checkpoint {self.weights.uuid}")
        if self.checkpoint and self.resets_optimizer:
            lines.append("  optimizer  its state begins anew")
        if self.checkpoint:
            lines += _listed("elastic", self.changes.strategy)
            lines += _listed("changed", self.changes.effective)
            lines += _listed("no effect", self.changes.idle)
        return lines


def _listed(title: str, lines: tuple[str, ...]) -> list[str]:
    shown = list(lines[:MOST_SHOWN])
    if len(lines) > MOST_SHOWN:
        shown.append(f"and {len(lines) - MOST_SHOWN} more")
    return [f"  {title if not number else '':<10} {line}" for number, line in enumerate(shown)]


def start_in(
    run_dir: Path,
    experiment: Experiment,
    resolved: ResolvedConfig | None,
    *,
    resume: str | None,
    stated: bool,
    forks: bool,
    repeated: bool = False,
    resets_optimizer: bool = False,
) -> Start:
    """Where a run starts.

    Args:
        run_dir: The run directory.
        experiment: What will run.
        resolved: What was decided; None where that failed.
        resume: The checkpoint to resume from, as ``--resume`` names it; None: start anew.
        stated: Whether the user named the run directory.
        forks: Whether ``searcher.source_checkpoint_uuid`` is followed.
        repeated: Whether a scheduler may give the same command again, to continue the run that the first one began.
        resets_optimizer: Whether the optimizer's state begins anew.

    Raises:
        ConfigError: it cannot start there; every reason.
    """
    check_run_dir(run_dir)
    there = RunDir(run_dir)
    if resume is None:
        _check_unused(there)
    start = Start() if resume is None else _resumed(there, resume, stated=stated, repeated=repeated)
    if start.checkpoint is None and forks:
        fork, damages = fork_of(experiment, run_dir)
        start = replace(start, fork=fork, damages=(*start.damages, *damages))
    return _compared(replace(start, resets_optimizer=resets_optimizer), experiment, resolved)


def _compared(start: Start, experiment: Experiment, resolved: ResolvedConfig | None) -> Start:
    """Where a run starts, with what has changed since its checkpoint was written.

    Raises:
        ConfigError: the run cannot start from it; every reason.
    """
    found, checkpoint = Problems(), start.checkpoint
    if checkpoint is not None:
        found.of(lambda: check_writers(checkpoint, experiment, anew=NOT_RESUMED))
        experiment = keeping_seed(checkpoint, experiment)
    if checkpoint is not None and experiment.script is None:
        found.problems += _weights_alone(checkpoint)
    if checkpoint is not None and start.resets_optimizer:
        found.problems += _not_reset(checkpoint)
    origin = checkpoint or start.fork
    by_library = origin is not None and (experiment.script is None or _is_librarys(origin))
    if origin is not None and resolved is not None and by_library:
        takes = resolved.fit.warm_start if checkpoint is None else None
        changes = _changes_of(
            origin, experiment, resolved, warm_start=takes, resets_optimizer=start.resets_optimizer
        )
        start = replace(start, changes=changes)
        found.problems += start.changes.problems
    elif checkpoint is not None and not experiment.states_all:
        start = replace(start, changes=_changes_in_yaml(RunDir(checkpoint.path.parent.parent), experiment))
    found.raise_any()
    return start


def _check_unused(there: RunDir) -> None:
    """Check that no run is in a run directory, whose results another one would replace.

    Raises:
        ConfigError: one is.
    """
    if kept := checkpoints_in(there.checkpoints):
        message = f"holds a run already, trained to batch {kept[0].steps_completed}"
        fix = "add --resume to continue it, or give another --run-dir to start anew"
        raise ConfigError(run_dir_problem(there.path, message, fix))


def _weights_alone(checkpoint: Checkpoint) -> list[Problem]:
    """Whether a checkpoint has no training that a trial could continue, as one that was imported has none."""
    path = checkpoint.path
    if any(path.glob("det_state_dict_rank*.pth")) or elastic_refusal(path) is not None:
        return []
    fix = f"leave --resume out and start from them: --set searcher.source_checkpoint_uuid={short(path)}"
    message = "holds weights alone, without the state of a training"
    return [Problem(key="--resume", value=checkpoint.uuid, message=message, fix=fix, code="weights-alone")]


def _not_reset(checkpoint: Checkpoint) -> list[Problem]:
    """Why the optimizer's state cannot be left out of a checkpoint."""
    reason = elastic_refusal(checkpoint.path)
    if reason is None:
        return []
    message = f"the optimizer's state of checkpoint {checkpoint.uuid} cannot be left out: {reason}"
    return [Problem(key="--reset-optimizer", message=message, fix=NOT_RESUMED, code="reset-optimizer")]


def _resumed(there: RunDir, given: str, *, stated: bool, repeated: bool) -> Start:
    """The start of a run that resumes: from the checkpoint that is named, of this run or of another.

    Raises:
        ConfigError: there is nothing to resume; or the checkpoint is another run's, and this one has its own.
    """
    if given == LAST or not stated:
        checkpoint, damages = _newest(there, stated=stated)
        return Start(checkpoint=checkpoint, damages=damages)
    found = _named(there, given)
    checkpoint, kept = found.checkpoint, checkpoints_in(there.checkpoints)
    if checkpoint.path.parent != there.checkpoints.resolve():
        if kept and repeated:
            good, damages = _newest(there, stated=True)
            return Start(checkpoint=good, damages=(*damages, BEGUN.format(given)))
        if kept:
            message = f"holds a run already, and checkpoint {checkpoint.uuid} is not one of it"
            fix = "give a new --run-dir, which continues from it; or add --resume alone to continue this run"
            raise ConfigError(run_dir_problem(there.path, message, fix))
        return Start(checkpoint=checkpoint, elsewhere=True, damages=found.damages)
    later = [each.uuid for each in kept].index(checkpoint.uuid)
    return Start(checkpoint=checkpoint, superseded=tuple(kept[:later]))


def _named(there: RunDir, given: str) -> Found:
    try:
        return find(given, there)
    except NotFound as error:
        raise ConfigError(Problem(key="--resume", value=given, message=str(error), fix=FORM)) from None


def _newest(there: RunDir, *, stated: bool) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest good checkpoint of a run, None for step 0, and what is wrong with newer ones.

    Raises:
        ConfigError: there is nothing to resume.
    """
    if not stated:  # the newest run of the same experiment is a good guess
        siblings = there.path.parent.glob("*")
        runs = sorted((path for path in siblings if checkpoints_in(RunDir(path).checkpoints)), reverse=True)
        fix = f"add --run-dir {runs[0]}" if runs else "add the --run-dir of the run to resume"
        raise ConfigError(Problem(key="--resume", message="needs the --run-dir to resume from", fix=fix))
    good, damages = newest_good_checkpoint(there.checkpoints)
    if good is None and not damages and there.experiment.is_file():
        return None, (NO_CHECKPOINT,)
    if good is None:
        message = "; ".join(["there is no complete checkpoint in it to resume from", *damages])
        fix = "give the --run-dir of the run to resume, or start anew in another, without --resume"
        raise ConfigError(run_dir_problem(there.path, message, fix))
    return good, tuple(damages)


def trial_seed_of(checkpoint: Checkpoint) -> int | None:
    """The seed of the trial that wrote a checkpoint; None if unknown.

    Before checkpoints held it, a run here took the experiment's seed as the trial's.
    """
    written = _read(checkpoint.path / "load_data.json")
    config = written.get("experiment_config")
    if TRIAL_SEED in written or not isinstance(config, dict):
        return written.get(TRIAL_SEED)
    return int((config.get("reproducibility") or {}).get("experiment_seed") or 0)


def keeping_seed(checkpoint: Checkpoint, experiment: Experiment) -> Experiment:
    """An experiment with the trial seed of the checkpoint that it resumes from, unless it states one itself."""
    seed, point = trial_seed_of(checkpoint), experiment.hyperparameters
    if seed in (None, experiment.trial_seed) or point.get((TRIAL_SEED,)) is not None:
        return experiment
    kept = point.overwritten((TRIAL_SEED,), seed, f"checkpoint {checkpoint.uuid}")
    return replace(experiment, hyperparameters=kept)


def _changes_of(
    checkpoint: Checkpoint,
    experiment: Experiment,
    resolved: ResolvedConfig,
    *,
    warm_start: str | None = None,
    resets_optimizer: bool = False,
) -> Changes:
    """What has changed since a checkpoint was written; one line where that is unknown.

    Args:
        checkpoint: The checkpoint.
        experiment: What will run.
        resolved: What was decided.
        warm_start: What a training that starts anew loads of it; None where training resumes.
        resets_optimizer: Whether the optimizer's state begins anew.
    """
    load_data = _read(checkpoint.path / "load_data.json")
    written_beside = RunDir(checkpoint.path.parent.parent).deepspeed_config
    ds_config = load_data.get("deepspeed_config") or _read(written_beside) or None
    before = settings_before(load_data.get("experiment_config") or {}, ds_config, trial_seed_of(checkpoint))
    if before is None:
        return Changes(effective=(UNKNOWN,))
    written = f"checkpoint {checkpoint.uuid}"
    changes = changes_since(
        before,
        experiment,
        resolved,
        written=written,
        warm_start=warm_start,
        refusal=elastic_refusal(checkpoint.path),
        resets_optimizer=resets_optimizer,
    )
    # check_writers checks the number of ranks.
    problems = [problem for problem in changes.problems if problem.key != "resources.slots_per_trial"]
    if warm_start is None and (apart := _apart(checkpoint, resolved)) is not None:
        problems.append(apart)
    return replace(changes, problems=tuple(problems))


def _apart(checkpoint: Checkpoint, resolved: ResolvedConfig) -> Problem | None:
    """The problem of training data whose position other replicas cannot take over."""
    batch = resolved.batch
    reason = data_refusal(checkpoint.path, replicas=batch.replicas, micro_batch_size=batch.micro_batch_size)
    if reason is None:
        return None
    return Problem(key="--resume", value=checkpoint.uuid, message=reason, fix=DATA_FIX, code="data-apart")


def _is_librarys(checkpoint: Checkpoint) -> bool:
    """Whether a loop of this library wrote a checkpoint."""
    return (checkpoint.path / "trial_state.json").is_file()


def _changes_in_yaml(there: RunDir, experiment: Experiment) -> Changes:
    """What has changed in an experiment since its run began; what that means, only its code knows."""
    try:
        before = settings_before(read_yaml(there.experiment).data, None)
    except ConfigError:
        before = None
    if before is None:
        return Changes(effective=(UNKNOWN,))
    now = settings_of(experiment, None)
    return Changes(effective=tuple(str(each) for each in differences(before.experiment, now.experiment)))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def completed(checkpoint: Checkpoint, resolved: ResolvedConfig) -> str:
    """Words for a run that has nothing left to train; "" where something is, a last validation included."""
    state, length = _read(checkpoint.path / "trial_state.json"), resolved.fit.max_length
    if length is None or not isinstance(length.value, int):
        return ""
    trained = state.get("epochs_trained" if length.unit == "epochs" else "batches_trained")
    if not isinstance(trained, int) or trained < length.value:
        return ""
    if trained == length.value and state.get("last_validation") != state.get("batches_trained"):
        return ""
    if trained > length.value:
        return f"{trained} {length.unit} are trained, max_length is {length.value}"
    return f"{trained} of {length.value} {length.unit}"
