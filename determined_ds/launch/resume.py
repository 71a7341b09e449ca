"""Where a run starts: from which checkpoint, what has changed since it was written, and whether anything is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from determined_ds.checkpoints.files import (
    DATA_FIX,
    Checkpoint,
    checkpoints_in,
    data_refusal,
    elastic_refusal,
    newest_good,
    read_object,
    written_by,
)
from determined_ds.checkpoints.named import find_good
from determined_ds.config.params import TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import KeyPath, dotted
from determined_ds.errors import EXIT_CRASHED, ConfigError, Problem
from determined_ds.experiment.changes import Changes, changes_since, settings_before
from determined_ds.experiment.decide import Problems
from determined_ds.experiment.experiment import Experiment
from determined_ds.launch.ranks import Outcome
from determined_ds.rundir.handed_on import LAST
from determined_ds.rundir.records import RESUME, read_faults, read_launches
from determined_ds.rundir.run_dir import RunDir, check_run_dir, run_dir_problem, short

SOURCE: KeyPath = ("searcher", "source_checkpoint_uuid")
SOURCE_TRIAL: KeyPath = ("searcher", "source_trial_id")
SLOTS: KeyPath = ("resources", "slots_per_trial")
UNKNOWN = "unknown: the checkpoint does not hold its configuration, so settings cannot be compared"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts."""

    checkpoint: Checkpoint | None = None  # to resume from; None: from step 0
    # Whether that is not in the run directory: training continues from it, and no metrics come along.
    elsewhere: bool = False
    # Checkpoints of the run that are newer than it, the newest first: once it is loaded, they are no longer the run's.
    superseded: tuple[Checkpoint, ...] = ()
    fork: Checkpoint | None = None  # a checkpoint of another run, to start from
    weights: Checkpoint | None = None  # a checkpoint whose weights are evaluated; nothing is trained
    changes: Changes = field(default_factory=Changes)  # since it was written
    damages: tuple[str, ...] = ()  # what is wrong with checkpoints that are newer

    def header(self) -> list[str]:
        """The lines of the header about it."""

        def listed(title: str, entries: list[str]) -> list[str]:
            return [f"  {'' if number else title:<10} {line}" for number, line in enumerate(entries)]

        lines = []
        if resumed := self.checkpoint:
            at, of = resumed.steps_completed, f" in {short(resumed.path.parent)}" if self.elsewhere else ""
            lines.append(f"  resume     batch {at}, checkpoint {resumed.uuid}{of}")
            if self.superseded:
                later = [f"{each.uuid} (batch {each.steps_completed})" for each in self.superseded]
                lines += listed("superseded", [*later, f"metrics after batch {at} are removed"])
        if fork := self.fork:
            run = fork.path.parent.parent
            of = f"{run.parent.name}/{run.name}"
            lines.append(f"  fork       batch {fork.steps_completed} of {of}, checkpoint {fork.uuid}")
        if self.weights:
            lines.append(f"  weights    batch {self.weights.steps_completed}, checkpoint {self.weights.uuid}")
        if resumed:
            lines += listed("elastic", self.changes.strategy)
            lines += listed("changed", self.changes.effective)
            lines += listed("no effect", self.changes.idle)
        return lines

    def again(self, outcome: Outcome, run_dir: Path) -> Start | None:
        """Where another launch starts after a crash; None where it could not get further.

        It may where nothing moved, where the process was killed, e.g. for want of memory, or where the rank says so:
        see :func:`~determined_ds.train.rank.ending_of`, which decides it on a cluster too. What a rank
        has diagnosed would be the same again: a configuration that cannot run, a loss that is not finite.
        """
        first = outcome.failures[0] if outcome.failures else None
        may = first and (first.code < 0 or first.exit_code == EXIT_CRASHED)
        if not may or outcome.signals:
            return None
        if (back := gone_back(RunDir(run_dir), checkpoints_in(RunDir(run_dir).checkpoints))) is not None:
            return replace(back, fork=None if back.checkpoint else self.fork)
        if any(each.path.is_dir() for each in self.superseded):  # what --resume named is not loaded yet
            return replace(self, damages=())
        good, damages = newest_good(checkpoints_in(RunDir(run_dir).checkpoints))
        if good is None and self.elsewhere:
            return replace(self, damages=tuple(damages))
        return replace(self, checkpoint=good, damages=tuple(damages), elsewhere=False, superseded=())


def start_in(
    run_dir: Path,
    experiment: Experiment,
    resolved: ResolvedConfig | None,
    *,
    resume: str | None,
    forks: bool,
) -> Start:
    """Where a run starts: anew, or as ``resume`` names it. Raises every reason why it cannot."""
    check_run_dir(run_dir)
    there, start = RunDir(run_dir), Start()
    if resume is not None:
        start = _resumed(there, resume)
    elif kept := checkpoints_in(there.checkpoints):
        message = f"holds a run already, trained to batch {kept[0].steps_completed}"
        fix = "add --resume to continue it, or give another --run-dir to start anew"
        raise ConfigError(run_dir_problem(there.path, message, fix))
    if start.checkpoint is None and forks:
        fork, damages = fork_of(experiment, run_dir)
        start = replace(start, fork=fork, damages=(*start.damages, *damages))
    return _compared(start, experiment, resolved)


def _resumed(there: RunDir, given: str) -> Start:
    """The start of a run that resumes: from the checkpoint that is named, of this run or of another."""
    kept = checkpoints_in(there.checkpoints)
    if given == LAST and (back := gone_back(there, kept)) is not None:
        return back
    if given != LAST:
        checkpoint, newer = find_good(given, there, key="--resume")
        if checkpoint.path.parent == there.checkpoints.resolve():
            later = [each.uuid for each in kept].index(checkpoint.uuid)
            return Start(checkpoint=checkpoint, superseded=tuple(kept[:later]))
        if not kept:
            return Start(checkpoint=checkpoint, elsewhere=True, damages=newer)
        message = f"holds a run already, and checkpoint {checkpoint.uuid} is not one of it"
        fix = "give a new --run-dir, which continues from it; or add --resume alone to continue this run"
        raise ConfigError(run_dir_problem(there.path, message, fix))
    good, damages = newest_good(kept)
    if good is None and not damages and there.experiment.is_file():
        return Start(damages=("no checkpoint found; starting from step 0",))
    if good is None:
        message = "; ".join(["there is no complete checkpoint in it to resume from", *damages])
        fix = "give the --run-dir of the run to resume, or start anew in another, without --resume"
        raise ConfigError(run_dir_problem(there.path, message, fix))
    return Start(checkpoint=good, damages=tuple(damages))


def gone_back(there: RunDir, kept: Sequence[Checkpoint]) -> Start | None:
    """The start before a spike that a run takes back; None where it does not, or has gone back already."""
    to = read_faults(there.recoveries).goes_back(kept[0].uuid if kept else "")
    if to is None:
        return None
    found = next((at for at, each in enumerate(kept) if each.uuid == to), len(kept))
    if found < len(kept):
        return Start(checkpoint=kept[found], superseded=tuple(kept[:found]))
    launches = read_launches(there.launches)
    if to or (launches and launches[0].kind == RESUME):
        message = "goes back to before a spike, and what it has begun from then is not in it"
        fix = "start anew in another --run-dir, with --set hyperparameters.fit.skip_batches=[FIRST,LAST]"
        raise ConfigError(run_dir_problem(there.path, message, fix))
    return Start(superseded=tuple(kept))


def fork_of(experiment: Experiment, run_dir: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The checkpoint that ``searcher.source_checkpoint_uuid`` names, and what is wrong with newer ones.

    The neighbours of the run directory are searched for a uuid.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    document, source = experiment.document, experiment.document.get(SOURCE)
    if document.get(SOURCE_TRIAL) is not None:
        message = "names a trial on a cluster; none of it is on this machine"
        fix = f"remove it; {dotted(SOURCE)}: write the path of a run directory or of a checkpoint in one"
        raise ConfigError(document.problem(SOURCE_TRIAL, message, fix, "fork"))
    if source is None:
        return None, ()
    return find_good(str(source), RunDir(run_dir), key=dotted(SOURCE))


# ------------------------------------------------------------------------------------------- what has changed


def _compared(start: Start, experiment: Experiment, resolved: ResolvedConfig | None) -> Start:
    """Where a run starts, with what has changed since its checkpoint was written."""
    found, checkpoint = Problems(), start.checkpoint
    if checkpoint is not None:
        path, uuid = checkpoint.path, checkpoint.uuid
        refusal = elastic_refusal(path)
        experiment = keeping_seed(checkpoint, experiment)
        if experiment.script is None and refusal is None and not any(path.glob("det_state_dict_rank*.pth")):
            message, code = "holds weights alone, without the state of a training", "weights-alone"
            fix = f"leave --resume out and start from them: --set {dotted(SOURCE)}={short(path)}"
            found.problems.append(Problem(key="--resume", value=uuid, message=message, fix=fix, code=code))
    origin = checkpoint or start.fork
    by_library = origin and (experiment.script is None or (origin.path / "trial_state.json").is_file())
    if origin is not None and resolved is not None and by_library:
        start = replace(start, changes=_changes(start, origin, experiment, resolved))
        found.problems += start.changes.problems
    found.raise_any()
    return start


def _changes(start: Start, origin: Checkpoint, experiment: Experiment, resolved: ResolvedConfig) -> Changes:
    """What has changed since a checkpoint was written; one line where that is unknown."""
    load_data = read_object(origin.path / "load_data.json")
    ds_config = load_data.get("deepspeed_config")
    ds_config = ds_config or read_object(RunDir(origin.path.parent.parent).deepspeed_config) or None
    before = settings_before(load_data.get("experiment_config") or {}, ds_config, _trial_seed_of(origin))
    if before is None:
        return Changes(effective=[UNKNOWN])
    changes = changes_since(
        before,
        experiment,
        resolved,
        written=f"checkpoint {origin.uuid}",
        warm_start=resolved.fit.warm_start if start.checkpoint is None else None,
        refusal=elastic_refusal(origin.path),
    )
    problems = [*changes.problems]
    if start.checkpoint is not None:  # training data whose position other replicas cannot take over
        reason = data_refusal(written_by(origin.path), replicas=resolved.batch.replicas)
        if reason is not None:
            value, code = origin.uuid, "data-apart"
            problems.append(Problem(key="--resume", value=value, message=reason, fix=DATA_FIX, code=code))
    return replace(changes, problems=problems)


def keeping_seed(checkpoint: Checkpoint, experiment: Experiment) -> Experiment:
    """An experiment with the trial seed of the checkpoint that it resumes from, unless it states one itself."""
    seed, point = _trial_seed_of(checkpoint), experiment.hyperparameters
    if seed in (None, experiment.trial_seed) or point.get((TRIAL_SEED,)) is not None:
        return experiment
    kept = point.overwritten(((TRIAL_SEED,), seed, f"checkpoint {checkpoint.uuid}"))
    return replace(experiment, hyperparameters=kept)


def _trial_seed_of(checkpoint: Checkpoint) -> int | None:
    """The seed of the trial that wrote a checkpoint; None if unknown."""
    return read_object(checkpoint.path / "load_data.json").get(TRIAL_SEED)
