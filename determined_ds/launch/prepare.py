"""An experiment, decided and laid out in a run directory, ready to start on this machine.

Loads no torch: whatever is wrong with a configuration is said before a rank is started.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from determined_ds.check.trial_class import metric_problem, optimizer_problem
from determined_ds.config.deepspeed.normalized import AUTO
from determined_ds.config.hyperparameters import TRIAL_SEED
from determined_ds.config.keys import RUN, not_looked_at
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where
from determined_ds.devices import detect_accelerator, kind_of_device
from determined_ds.documents.document import Document, get_path
from determined_ds.documents.writing import write_whole
from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.experiment.decide import Problems, decide, read_document
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.secrets import missing_in, secrets_of, stored_yaml
from determined_ds.experiment.trial_file import check_trial_file
from determined_ds.experiment.variables import Variables, variables_for
from determined_ds.launch.elsewhere.placement import Placement
from determined_ds.launch.fitting_slots import fitting_slots
from determined_ds.launch.forking import fork_of
from determined_ds.launch.ranks.start import Outcome, run_ranks, say_outcome
from determined_ds.launch.restarting import Restarts
from determined_ds.launch.resuming import (
    Start,
    changes_of,
    check_storage,
    check_writers,
    checkpoint_to_resume,
    completed,
    keeping_seed,
)
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.exhausted import exhausted
from determined_ds.protocol.handed_on import hang_timeout_s as stated_hang_timeout_s
from determined_ds.protocol.header import decided
from determined_ds.protocol.laid_aside import ASIDE, forget_aside, lay_aside
from determined_ds.protocol.metrics_file import kept_until
from determined_ds.protocol.paths import (
    RUNS,
    check_run_dir,
    count,
    is_empty,
    new_run_dir,
    run_dir_problem,
    slug,
)
from determined_ds.protocol.result import write_result
from determined_ds.protocol.run_dir import CHECKPOINTS, EXPERIMENT, METRICS, REPORTED, RESULT, short
from determined_ds.protocol.run_lock import RunLock, unwritable

SLOTS = ("resources", "slots_per_trial")
NOTHING_YET = "--resume: nothing in the run directory to resume; starting from step 0"
STORAGE = "checkpoint_storage"
NOT_RESUMED = "start anew in another --run-dir, without --resume"


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run that will start.

    Args:
        experiment: What was asked for, overrides included.
        resolved: What was decided.
        context_dir: The folder with the code.
        run_dir: Where everything is written.
        start: Where it starts.
        variables: For the environment of its ranks.
        warnings: What is possible, and probably not meant so; keys that are not looked at here.
        accelerator: The one that was asked for, None where it was left to the machine.
        placed: This process's place, where another launcher has started the ranks.
        stated_slots: The experiment's own ``slots_per_trial``, None where absent.
        storage: Whether checkpoints go to the experiment's ``checkpoint_storage``.
    """

    experiment: Experiment
    resolved: ResolvedConfig
    context_dir: Path
    run_dir: Path
    start: Start = field(default_factory=Start)
    variables: Variables = field(default_factory=Variables)
    warnings: tuple[Problem, ...] = ()
    accelerator: str | None = None
    placed: Placement | None = None
    stated_slots: int | None = None
    storage: bool = False

    def header(self) -> list[str]:
        """What will run, in a few lines for people."""
        lines = decided(self.experiment.name, self.experiment.trial, self.resolved)
        lines.append(f"  seed       {self.experiment.trial_seed}{self._seed_origin}")
        lines.append(f"  run dir    {short(self.run_dir)}")
        lines += self._launched_by()
        if self.experiment.searched:
            lines.append(f"  one point of a search: {', '.join(self._searched())}")
        return [*lines, *self.start.header()]

    def _launched_by(self) -> list[str]:
        """Who started the ranks, where that was not this command, and what is then up to whom."""
        if self.placed is None:
            return []
        ranks = f"{count(self.placed.size, 'rank')} on {count(self.placed.machines, 'machine')}"
        if self.stated_slots not in (None, self.placed.size):
            ranks += f", instead of slots_per_trial {self.stated_slots}"
        return [
            f"  launcher   {self.placed.launcher}: {ranks}",
            "             restarts are the launcher's: max_restarts does not apply",
        ]

    @property
    def _seed_origin(self) -> str:
        """Where the trial's seed comes from, for the header."""
        experiment = self.experiment
        if experiment.hyperparameters.get((TRIAL_SEED,)) is not None:
            return ""
        if experiment.document.get(("reproducibility", "experiment_seed")) is None:
            return ", of experiment_seed 0: none is given, and a master would take the time"
        return f", of experiment_seed {experiment.seed} as on a master"

    @property
    def complete(self) -> str:
        """Words for a run that has nothing left to train, e.g. ``200 of 200 batches``; "" elsewhere."""
        return completed(self.start.checkpoint, self.resolved) if self.start.checkpoint else ""

    def _searched(self) -> list[str]:
        """The searched hyperparameters with the values that were taken for them."""
        point = {"hyperparameters": self.experiment.hyperparameters.data}
        shown = []
        for key in self.experiment.searched:
            value = get_path(point, tuple(key.split(".")))
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            shown.append(f"{key.removeprefix('hyperparameters.')} {text}")
        return shown

    def launch(
        self, *, test: bool = False, more: Sequence[str] = (), hang_timeout_s: float | None = None
    ) -> int:
        """Write the run directory and start the ranks, again where they crash; returns the exit code.

        Args:
            test: As ``det-ds run --test``.
            more: More arguments of ``determined_ds.train``.
            hang_timeout_s: As :func:`~determined_ds.launch.ranks.start.run_ranks`; as the environment says, if None.

        Raises:
            ConfigError: the run directory cannot be written to, or another process writes to it.
            TrainingError: the ranks could not be started, for want of room on a disk or of open files.
        """
        # For the ranks, which read the file without them.
        os.environ.update(self.secrets)
        arguments = self.arguments(test=test, more=more)
        restarts = Restarts(allowed=self.experiment.max_restarts, run_dir=self.run_dir)
        run = self
        if hang_timeout_s is None:
            hang_timeout_s = stated_hang_timeout_s({**os.environ, **self.variables.values})
        with RunLock(self.run_dir) as lock:
            while True:
                outcome = run._run_once(arguments, lock, hang_timeout_s)
                say_outcome(outcome, self.run_dir, self.resume_command)
                again = restarts.after(outcome)
                if again is None:
                    return outcome.exit_code
                print(f"{again.message}\n", file=sys.stderr)
                run = replace(self, start=replace(self.start, checkpoint=again.checkpoint))

    def arguments(self, *, test: bool = False, more: Sequence[str] = ()) -> list[str]:
        """Those of ``determined_ds.train`` that are the same at every start."""
        storage = ["--storage"] if self.storage else []
        return [*self.experiment.train_options, *(["--test"] if test else []), *more, *storage]

    @property
    def secrets(self) -> dict[str, str]:
        """Environment variables with what the run directory's configuration leaves out."""
        return secrets_of(self._config, used=(STORAGE,) if self.storage else ())

    def _run_once(self, arguments: Sequence[str], lock: RunLock, hang_timeout_s: float) -> Outcome:
        self.write()
        try:
            outcome = run_ranks(
                self.experiment.trial,
                num_ranks=self.resolved.topology.slots,
                accelerator=self.resolved.accelerator,
                context_dir=self.context_dir,
                run_dir=self.run_dir,
                arguments=[*arguments, *self.start_options],
                variables=self.variables.values,
                keep_open=[lock.fileno()],
                hang_timeout_s=hang_timeout_s,
            )
            if not (self.run_dir / ASIDE).exists():  # else the ranks have left the run as it was
                write_result(
                    self.run_dir,
                    exit_code=outcome.exit_code,
                    stopped=outcome.stopped,
                    trial_seed=self.experiment.trial_seed,
                )
            return outcome
        except OSError as error:
            message = exhausted(error, self.run_dir)
            if message is None:
                raise
            raise TrainingError(message.removeprefix("error: ")) from None
        finally:
            forget_aside(self.run_dir)

    @property
    def start_options(self) -> list[str]:
        """The arguments of ``determined_ds.train`` that say where it starts."""
        if self.start.checkpoint:
            return ["--resume", self.start.checkpoint.uuid]
        return ["--fork", str(self.start.fork.path)] if self.start.fork else []

    @property
    def resume_command(self) -> str:
        """What to type to go on with this run, just as it was."""
        words = ["det-ds", "run", short(self.run_dir / EXPERIMENT), short(self.context_dir)]
        words += ["--run-dir", short(self.run_dir), "--resume"]
        if self.accelerator:
            words += ["--accelerator", self.accelerator]
        words += ["--storage"] if self.storage else []
        return shlex.join(words)

    @property
    def _config(self) -> dict[str, Any]:
        """What is really run: overrides laid over, the one point of a search, the very checkpoint of a fork."""
        point = as_constants(self.experiment.hyperparameters.data)
        config = {**self.experiment.config, "hyperparameters": point}
        if self.start.fork:
            source = {"source_checkpoint_uuid": str(self.start.fork.path)}
            config["searcher"] = {**(config.get("searcher") or {}), **source}
        return config

    def write(self) -> None:
        """Write what ranks find in the run directory; aside, where they go on with what is there.

        Raises:
            ConfigError: it cannot be written to.
        """
        try:
            self._write()
        except OSError as error:
            raise ConfigError(unwritable(self.run_dir, error)) from None

    def _write(self) -> None:
        forget_aside(self.run_dir)
        there = self.run_dir / METRICS
        if self.start.checkpoint is None:
            write_whole(self.run_dir / EXPERIMENT, stored_yaml(self._config))
            write_whole(there, "")
            for name in (RESULT, REPORTED):
                (self.run_dir / name).unlink(missing_ok=True)
            return
        aside = lay_aside(self.run_dir)
        write_whole(aside / EXPERIMENT, stored_yaml(self._config))
        kept = kept_until(there, self.start.checkpoint.steps_completed)
        if kept is not None:
            write_whole(aside / METRICS, kept)


def as_constants(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters as a YAML that the master takes: a mapping with a key ``type`` has to be wrapped."""
    return {
        key: {"type": "const", "val": value} if _holds_type(value) else value
        for key, value in hyperparameters.items()
    }


def _holds_type(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return "type" in value or any(_holds_type(item) for item in value.values())


def prepare_run(
    config: Path,
    context_dir: Path,
    *,
    slots: int | str | None,
    overrides: Iterable[str],
    run_dir: Path | None,
    resume: bool,
    accelerator: str | None,
    now: datetime,
    measured: bool = False,
    placed: Placement | None = None,
    storage: bool = False,
) -> LocalRun:
    """Decide a run from what ``det-ds run`` was given.

    Args:
        slots: Ranks; ``"auto"``: the experiment's, or as many as this machine carries; None: the experiment's.
        measured: It is measured for some steps, instead of trained: from weights of its own, without a validation.
        placed: This process's place, where another launcher has started the ranks: then they are the slots, and
            ``resume`` of a run directory that is empty starts the run.
        storage: Checkpoints go to the experiment's ``checkpoint_storage``.

    Raises:
        ConfigError: it cannot run; every reason that is known before a rank is started.
    """
    stated = None if isinstance(slots, str) else slots
    document = read_document(
        config, context_dir, slots=stated if placed is None else None, overrides=overrides
    )
    stated_slots = document.get(SLOTS)
    if placed is not None:
        document = _with_ranks(document, placed, stated)
    found = Problems()
    if storage:
        found.problems += _storage_problems(document)
    is_used = storage and STORAGE in document.data
    found.warn(not_looked_at(document.without((STORAGE,)) if is_used else document, RUN))
    experiment = found.need(lambda: parse_experiment(document))
    found.of(lambda: check_trial_file(experiment.trial, context_dir, experiment.document))
    devices = found.of(lambda: detect_accelerator(accelerator))
    resolved, variables = None, None
    if devices is not None and slots == AUTO and placed is None:
        experiment, fewer = fitting_slots(experiment, context_dir=context_dir, accelerator=devices)
        found.warn(fewer)
    if devices is not None:
        point = experiment.hyperparameters
        machines = placed.machines if placed else 1
        there = Where(context_dir=context_dir, accelerator=devices, machines=machines)
        resolved = found.of(lambda: decide(experiment, point, there, here=True))
        variables = found.of(lambda: variables_for(experiment.document, kind_of_device(devices)))
    if resolved is not None:
        found.warn(resolved.warnings)
        found.problems += _of_the_class(experiment, resolved, context_dir, measured=measured)
    found.warn(variables.warnings if variables is not None else ())
    where = run_dir or new_run_dir(RUNS / slug(experiment.name), now)
    forks = not (measured or experiment.measures)
    # A script of a scheduler is the same at each start of its job, the first one included.
    first = resume and placed is not None and run_dir is not None and is_empty(run_dir)
    start = found.of(
        lambda: _start_in(
            where,
            experiment,
            resolved,
            resume=resume and not first,
            stated=run_dir is not None,
            forks=forks,
        )
    )
    if start is not None and start.checkpoint is not None:
        checkpoint = start.checkpoint
        found.of(lambda: check_storage(checkpoint, storage=storage))
    found.raise_any()
    assert resolved is not None
    assert variables is not None
    assert start is not None
    if first:
        start = replace(start, damages=(*start.damages, NOTHING_YET))
    if start.checkpoint is not None:
        experiment = keeping_seed(start.checkpoint, experiment)
    return LocalRun(
        experiment=experiment,
        resolved=resolved,
        context_dir=context_dir.resolve(),
        run_dir=where.resolve(),
        start=start,
        variables=variables,
        warnings=tuple(found.warnings),
        accelerator=accelerator,
        placed=placed,
        stated_slots=stated_slots if isinstance(stated_slots, int) else None,
        storage=storage,
    )


def _with_ranks(document: Document, placed: Placement, stated: int | None) -> Document:
    """An experiment whose slots are the ranks that a launcher has started.

    Raises:
        ConfigError: ``--slots`` states another number.
    """
    if stated not in (None, placed.size):
        message = f"{placed.launcher} started {count(placed.size, 'rank')}"
        fix = f"leave --slots out, or have {placed.launcher} start {stated}"
        raise ConfigError(
            Problem(key="--slots", value=stated, message=message, fix=fix, code="launcher-slots")
        )
    return document.overwritten(SLOTS, placed.size, placed.launcher)


def _storage_problems(document: Document) -> list[Problem]:
    """What ``--storage`` lacks: the section, or the value of a secret in it that was not stored."""
    if isinstance(document.get((STORAGE,)), dict):
        return missing_in(document, STORAGE)
    fix = f"add {STORAGE}, e.g. {{type: s3, bucket: ...}}, or leave --storage out"
    return [Problem(key="--storage", message=f"the experiment has no {STORAGE}", fix=fix, code="storage")]


def _of_the_class(
    experiment: Experiment, resolved: ResolvedConfig, context_dir: Path, *, measured: bool
) -> list[Problem]:
    """What the source of the trial that will run tells: whether ZeRO takes its optimizer, and what it reports."""
    trained = experiment.trained(resolved.topology.pipe_parallel_size)
    found = [optimizer_problem(trained, context_dir, resolved)]
    if not measured:
        found.append(metric_problem(experiment.document, trained, context_dir, experiment.measures))
    return [problem for problem in found if problem is not None]


def _start_in(
    run_dir: Path,
    experiment: Experiment,
    resolved: ResolvedConfig | None,
    *,
    resume: bool,
    stated: bool,
    forks: bool,
) -> Start:
    """Where a run starts, and what has changed since that was written."""
    check_run_dir(run_dir)
    checkpoint, fork = None, None
    damages: tuple[str, ...] = ()
    if resume:
        checkpoint, damages = checkpoint_to_resume(run_dir, stated=stated)
    else:
        _refuse_to_overwrite(run_dir)
    if checkpoint is None and forks:
        fork, more = fork_of(experiment, run_dir)
        damages = (*damages, *more)
    start = Start(checkpoint=checkpoint, fork=fork, damages=damages)
    found = Problems()
    if checkpoint is not None:
        found.of(lambda: check_writers(checkpoint, experiment, anew=NOT_RESUMED))
    origin = checkpoint or fork
    if checkpoint is not None:
        experiment = keeping_seed(checkpoint, experiment)
    if origin is not None and resolved is not None:
        takes = resolved.fit.warm_start if checkpoint is None else None
        start = replace(start, changes=changes_of(origin, experiment, resolved, warm_start=takes))
        found.problems += start.changes.problems
    found.raise_any()
    return start


def _refuse_to_overwrite(run_dir: Path) -> None:
    there = checkpoints_in(run_dir / CHECKPOINTS)
    if there:
        message = f"holds a run already, trained to batch {there[0].steps_completed}"
        fix = "add --resume to go on with it, or give another --run-dir to start anew"
        raise ConfigError(run_dir_problem(run_dir, message, fix))
