"""A run that was decided: shown, written to its run directory, launched and launched again after a crash."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.files import remove_partial
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.documents.document import Document, get_path
from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.experiment.decide import decide_stated
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.secrets import secrets_of, stored_yaml
from determined_ds.extensions import before_ranks
from determined_ds.launch.options import RunOptions
from determined_ds.launch.placement import Placement
from determined_ds.launch.ranks import Failure, Outcome, environment_of_ranks, run_ranks, show_outcome
from determined_ds.launch.resume import Start
from determined_ds.report.header import decided, in_micro_batches
from determined_ds.report.numbers import count
from determined_ds.report.terminal import closing_block
from determined_ds.rundir.limits import allow_open_files, exhausted
from determined_ds.rundir.metrics_file import jsonable, kept_until, read_records
from determined_ds.rundir.records import (
    FORK,
    RESTART,
    RESUME,
    START,
    Faults,
    is_run,
    launch_of,
    read_faults,
    read_launches,
    read_run,
    relink,
    status_of,
    write_result,
)
from determined_ds.rundir.recoveries import goodput, recoveries_of, with_smaller_batch
from determined_ds.rundir.run_dir import RunDir, RunLock, short, unwritable
from determined_ds.rundir.signals import Interrupts


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run that will start."""

    options: RunOptions  # the command's
    experiment: Experiment  # what was requested, overrides included
    # What was decided; None where the code of a script or of a trial in Determined's own form decides it.
    resolved: ResolvedConfig | None
    accelerator: Accelerator  # what the ranks compute on
    context_dir: Path  # the folder with the code
    run_dir: Path  # where everything is written
    start: Start = field(default_factory=Start)
    variables: Mapping[str, str | None] = field(default_factory=dict)  # for the environment of its ranks
    warnings: tuple[Problem, ...] = ()  # what is probably a mistake; keys that have no effect here
    placed: Placement | None = None  # this process's place, where another launcher has started the ranks
    restarted: str = ""  # why it is started again, after a crash
    own_resume: str = ""  # the command that resumes it, where it is not det-ds run

    # ------------------------------------------------------------------------------------------ for people

    def _header(self) -> list[str]:
        """What will run, in a few lines."""
        experiment, placed = self.experiment, self.placed
        lines = decided(
            experiment.name,
            str(experiment.entrypoint),
            self.resolved,
            experiment.slots,
            self.accelerator,
            by_script=experiment.script is not None,
        )
        lines.append(f"  seed       {experiment.trial_seed}")
        lines.append(f"  run dir    {short(self.run_dir)}")
        if placed is not None:
            ranks = f"{count(placed.size, 'rank')} on {count(placed.machines, 'machine')}"
            lines.append(f"  launcher   {placed.launcher}: {ranks}")
            lines.append("             restarts are the launcher's: max_restarts does not apply")
        if experiment.searched:  # the searched hyperparameters, with the values that were taken for them
            point = {"hyperparameters": experiment.hyperparameters.data}
            taken = [f"{key} {get_path(point, tuple(key.split('.')))}" for key in experiment.searched]
            lines.append(f"  one point of a search: {', '.join(taken)}".replace(" hyperparameters.", " "))
        return [*lines, *self.start.header()]

    def show(self) -> None:
        """Print the header, and on stderr what is probably a mistake.

        Raises:
            ConfigError: this machine lacks a compiler that DeepSpeed needs.
        """
        if self.resolved is not None and self.options.engine == "deepspeed":
            merged = {**os.environ, **self.variables}
            environment = {name: value for name, value in merged.items() if value is not None}
            before_ranks(self.resolved, environment, self.warnings)
        known = self.warnings  # a command that starts many runs has shown what applies to all of them
        if self.options.parent is not None:
            known = self.resolved.warnings if self.resolved is not None else ()
        warnings = [*self.start.damages, *known]
        print(*self._header(), sep="\n", flush=True)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    @property
    def resume_command(self) -> str:
        """The command that resumes this run as it was."""
        if self.own_resume:
            return self.own_resume
        words = ["det-ds", "run", short(RunDir(self.run_dir).experiment), short(self.context_dir)]
        words += ["--run-dir", short(self.run_dir), "--resume"]
        words += ["--accelerator", self.options.accelerator] if self.options.accelerator else []
        return shlex.join(words)

    # ------------------------------------------------------------------------------------------ for ranks

    @property
    def rank_words(self) -> list[str]:
        """What each rank runs, after ``python3 -m``."""
        start, script = self.start, self.experiment.script
        own = [*self.experiment.entrypoint.options, *self.options.train_arguments]
        if start.weights:
            own += ["--evaluate", str(start.weights.path)]
        elif start.checkpoint:
            own += ["--resume", str(start.checkpoint.path) if start.elsewhere else start.checkpoint.uuid]
        elif start.fork:
            own += ["--fork", str(start.fork.path)]
        there = ["--run-dir", str(self.run_dir), "--accelerator", self.accelerator.name]
        if script is None:
            return ["determined_ds.train", self.experiment.trial, *there, *own]
        return ["determined_ds.script", *there, *own, "--", *script.words]

    def write(self) -> None:
        """Write what ranks read in the run directory; to ``next`` where they resume what is there.

        Raises:
            ConfigError: it cannot be written to.
        """
        there, checkpoint = RunDir(self.run_dir), self.start.checkpoint
        try:
            there.remove_next()
            if (checkpoint is not None and not self.start.elsewhere) or self.start.superseded:
                new = there.make_next()
                write_whole(new.experiment, stored_yaml(self._config))
                write_whole(new.launches, self._launches(there))
                kept = kept_until(there.metrics, checkpoint.steps_completed if checkpoint else -1)
                if kept is not None:
                    write_whole(new.metrics, kept)
                if self.start.superseded:
                    there.supersede([each.uuid for each in self.start.superseded])
                return
            write_whole(there.experiment, stored_yaml(self._config))
            write_whole(there.metrics, "")
            write_whole(there.launches, self._launches(there if self.restarted else None))
            is_new = not self.restarted and self.options.resume is None
            of_before = (
                (there.loggers, there.recoveries) if is_new else () if self.restarted else (there.loggers,)
            )
            for path in (there.result, there.master, *of_before):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(unwritable(self.run_dir, error)) from None

    def _launches(self, before: RunDir | None) -> str:
        """``launches.jsonl`` with a line for this one, after those of the run so far."""
        start, experiment, records = self.start, self.experiment, read_records(RunDir(self.run_dir).metrics)
        begins = start.checkpoint or start.fork
        launch = launch_of(
            name=experiment.name,
            runs=str(experiment.entrypoint),
            hyperparameters=experiment.hyperparameters.data,
            resolved=self.resolved,
            accelerator=self.accelerator,
            slots=experiment.slots,
            trial_seed=experiment.trial_seed,
            kind=RESTART if self.restarted else RESUME if start.checkpoint else FORK if start.fork else START,
            reason=self.restarted,
            steps_completed=start.checkpoint.steps_completed if start.checkpoint else 0,
            trained_before=max((each["steps_completed"] for each in records), default=0),
            checkpoint=begins.uuid if begins else "",
            resume=self.resume_command,
        )
        earlier = read_launches(before.launches) if before is not None else ()
        return "".join(f"{json.dumps(jsonable(asdict(each)))}\n" for each in (*earlier, launch))

    @property
    def _config(self) -> dict[str, Any]:
        """What is run: overrides applied, one point of a search, the exact checkpoint of a fork."""
        point = as_constants(self.experiment.hyperparameters.data)
        config = {**self.experiment.config, "hyperparameters": point}
        if self.start.fork:
            source = {"source_checkpoint_uuid": str(self.start.fork.path)}
            config["searcher"] = {**(config.get("searcher") or {}), **source}
        return config

    # ------------------------------------------------------------------------------------------ launched

    def launch(self) -> int:
        """Write the run directory and start the ranks, again where they crash. Returns the exit code.

        Rank 0 writes to this terminal, the others to ``logs``. When one dies, the others are ended. The first SIGINT,
        SIGTERM or SIGHUP has the ranks finish their batch and checkpoint; the second ends them.
        """
        os.environ.update(secrets_of(self._config))  # the file that ranks read has none
        allow_open_files()
        run, used, allowed, known = self, 0, self.experiment.max_restarts, self._faults().all
        with RunLock(self.run_dir) as lock:
            try:
                while True:
                    outcome = run._launch_once(lock)
                    show_outcome(outcome, RunDir(self.run_dir))
                    faults = self._faults()
                    recovers = len(faults.all) > len(known) and not outcome.signals
                    start = run.start.again(outcome, self.run_dir) if recovers or used < allowed else None
                    if start is None:
                        run.show_closing()
                        return outcome.exit_code
                    used, known = used + (not recovers), faults.all
                    origin = "step 0"
                    if (resumed := start.checkpoint) is not None:
                        origin = f"checkpoint {resumed.uuid} at batch {resumed.steps_completed}"
                    line = (
                        f"restart {used} of {allowed} from {origin}; it crashed: {outcome.failures[0].reason}"
                    )
                    if recovers:
                        line = f"recovery {len(known)}, from {origin}; {known[-1].cause}: {known[-1].reason}"
                    restarted = "\n".join([*(f"warning: {damage}" for damage in start.damages), line])
                    print(f"{restarted}\n", file=sys.stderr)
                    where = Where(context_dir=self.context_dir, accelerator=self.accelerator)
                    smaller = shrunk(run.experiment, faults.too_large, where)
                    if smaller is not run.experiment and (
                        decided := decide_stated(smaller, smaller.hyperparameters, where)
                    ):
                        print(f"  batch      {in_micro_batches(decided.batch)}\n", file=sys.stderr)
                        run = replace(run, experiment=smaller, resolved=decided)
                    run = replace(run, start=start, restarted=restarted)
            except OSError as error:
                if (message := exhausted(error, self.run_dir)) is None:
                    raise
                raise TrainingError(message.removeprefix("error: ")) from None
            finally:
                RunDir(self.run_dir).remove_next()

    def _faults(self) -> Faults:
        return read_faults(RunDir(self.run_dir).recoveries)

    def _launch_once(self, lock: RunLock) -> Outcome:
        self.write()
        there, slots = RunDir(self.run_dir), self.experiment.slots
        there.logs.mkdir(exist_ok=True)
        with Interrupts("stopping after this batch, with a checkpoint") as interrupts:
            failures = run_ranks(
                [sys.executable, "-m", *self.rank_words],
                interrupts,
                size=slots,
                environment=environment_of_ranks(slots, self.accelerator, self.context_dir, self.variables),
                cwd=self.context_dir,
                run_dir=there,
                keep_open=[lock.fileno()],
            )
        if failures:
            remove_partial(there.checkpoints)
        outcome = Outcome(failures=tuple(failures), signals=tuple(interrupts.signals))
        self._write_result(outcome)
        return outcome

    def end(self, code: int, cause: str, reason: str, *, stopped: bool) -> None:
        """Write how it ended, as rank 0 says it whom no launcher of ours watches, and print what came of it."""
        if code:
            remove_partial(RunDir(self.run_dir).checkpoints)
        failure = Failure(rank=0, code=code, exit_code=code, time=time.time(), cause=cause, reason=reason)
        signals = (signal.SIGTERM,) if stopped and not code else ()
        self._write_result(Outcome(failures=(failure,) if code else (), signals=signals))
        self.show_closing()

    def show_closing(self) -> None:
        """Print what came of the training, after everything else; nothing where the ranks left the run as it was."""
        options = self.options
        trained = not (options.test or options.is_measured or options.evaluate is not None)
        if trained and RunDir(self.run_dir).is_replaced and (lines := closing_block(read_run(self.run_dir))):
            print(*lines, sep="\n", flush=True)

    def _write_result(self, outcome: Outcome) -> None:
        """Write ``result.json``; not where the ranks have left the run as it was and no other command reads it."""
        there = RunDir(self.run_dir)
        if not there.is_replaced and self.options.parent is None:
            return
        relink(there)
        run = read_run(self.run_dir) if is_run(self.run_dir) else None
        write_result(
            there,
            status=status_of(outcome.exit_code, stopped=outcome.stopped),
            cause=outcome.first and outcome.first.cause,
            reason=outcome.first and outcome.first.reason,
            trial_seed=self.experiment.trial_seed,
            metric=self.experiment.metric,
            smaller_is_better=self.experiment.smaller_is_better,
            resume=self.resume_command,
            slots=self.experiment.slots,
            recoveries=[each._asdict() for each in recoveries_of(run)] if run else [],
            goodput=goodput(run) if run else None,
        )


def shrunk(experiment: Experiment, too_large: int, where: Where) -> Experiment:
    """An experiment whose micro-batches are smaller than some that did not fit; itself where they are already.

    Raises:
        ConfigError: no smaller ones can run.
    """

    def resolve(point: Document) -> ResolvedConfig | None:
        return decide_stated(experiment, point, where)

    smaller = with_smaller_batch(experiment.hyperparameters, too_large, resolve)
    return (
        experiment if smaller is experiment.hyperparameters else replace(experiment, hyperparameters=smaller)
    )


def as_constants(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters as the master accepts them: a mapping with a key ``type`` has to be wrapped."""

    def holds_type(value: Any) -> bool:
        return isinstance(value, dict) and ("type" in value or any(map(holds_type, value.values())))

    return {
        key: {"type": "const", "val": value} if holds_type(value) else value
        for key, value in hyperparameters.items()
    }
