"""A run that was decided: shown, written to its run directory, launched and launched again after a crash."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from determined_ds.config.layout import Accelerator
from determined_ds.config.params import TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import get_path
from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.secrets import secrets_of, stored_yaml
from determined_ds.launch.options import RunOptions
from determined_ds.launch.outcome import Outcome, show_outcome
from determined_ds.launch.placement import Placement
from determined_ds.launch.ranks import run_ranks
from determined_ds.launch.resume import Start, completed
from determined_ds.report.closing import closing_block
from determined_ds.rundir.handed_on import HANG_TIMEOUT, count, hang_timeout_s, in_words
from determined_ds.rundir.header import decided, undecided
from determined_ds.rundir.limits import exhausted
from determined_ds.rundir.links import relink
from determined_ds.rundir.metrics_file import kept_until
from determined_ds.rundir.records import (
    COMPLETED,
    FORK,
    RESTART,
    RESUME,
    START,
    launch_line,
    launch_of,
    read_launches,
    read_result,
    read_run,
    write_result,
)
from determined_ds.rundir.run_dir import RunDir, short, unwritable
from determined_ds.rundir.run_lock import RunLock


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run that will start.

    Args:
        options: The command's.
        experiment: What was requested, overrides included.
        resolved: What was decided; None where the code of a script or of a trial in Determined's own form decides it.
        accelerator: What the ranks compute on.
        context_dir: The folder with the code.
        run_dir: Where everything is written.
        start: Where it starts.
        variables: For the environment of its ranks.
        warnings: What is possible, but probably a mistake; keys that have no effect here.
        placed: This process's place, where another launcher has started the ranks.
        configured_slots: The experiment's own ``slots_per_trial``, None where absent.
        restarted: Why it is started again, after a crash; "" where it is not.
    """

    options: RunOptions
    experiment: Experiment
    resolved: ResolvedConfig | None
    accelerator: Accelerator
    context_dir: Path
    run_dir: Path
    start: Start = field(default_factory=Start)
    variables: Mapping[str, str | None] = field(default_factory=dict)
    warnings: tuple[Problem, ...] = ()
    placed: Placement | None = None
    configured_slots: int | None = None
    restarted: str = ""

    # ------------------------------------------------------------------------------------------ for people

    @property
    def own_warnings(self) -> tuple[Problem, ...]:
        """The warnings about its own point."""
        return self.resolved.warnings if self.resolved is not None else ()

    def header(self) -> list[str]:
        """What will run, in a few lines."""
        experiment, placed = self.experiment, self.placed
        name, runs = experiment.name, str(experiment.entrypoint)
        if self.resolved is not None:
            lines = decided(name, runs, self.resolved, by_script=experiment.script is not None)
        else:
            by = "the script" if experiment.script else "the trial"
            lines = undecided(name, runs, experiment.slots, self.accelerator, by=by)
        origin = ""
        if experiment.hyperparameters.get((TRIAL_SEED,)) is None:
            origin = f", of experiment_seed {experiment.space.seed} as on a master"
            if experiment.document.get(("reproducibility", "experiment_seed")) is None:
                origin = ", of experiment_seed 0: none is given, and a master would take the time"
        lines.append(f"  seed       {experiment.trial_seed}{origin}")
        lines.append(f"  run dir    {short(self.run_dir)}")
        if placed is not None:
            ranks = f"{count(placed.size, 'rank')} on {count(placed.machines, 'machine')}"
            if self.configured_slots not in (None, placed.size):
                ranks += f", instead of slots_per_trial {self.configured_slots}"
            lines.append(f"  launcher   {placed.launcher}: {ranks}")
            lines.append("             restarts are the launcher's: max_restarts does not apply")
        if self._watches_script and placed is not None:
            only = "only scripts with determined_ds.session or determined_ds.transformers are watched"
            lines.append(f"  hangs      under {placed.launcher}, {only}")
        elif self._watches_script:
            after = in_words(self.hang_timeout_s)
            lines.append(
                f"  hangs      ended {after} after its last step or report; not before the first one"
            )
        if experiment.searched:  # the searched hyperparameters, with the values that were taken for them
            point = {"hyperparameters": experiment.hyperparameters.data}
            values = {key: get_path(point, tuple(key.split("."))) for key in experiment.searched}
            taken = [
                f"{key.removeprefix('hyperparameters.')} {f'{value:.4g}' if isinstance(value, float) else value}"
                for key, value in values.items()
            ]
            lines.append(f"  one point of a search: {', '.join(taken)}")
        return [*lines, *self.start.header()]

    @property
    def complete(self) -> str:
        """Words for a run that has nothing left to train, e.g. ``200 of 200 batches``; else ""."""
        checkpoint, options = self.start.checkpoint, self.options
        if options.test or options.is_measured or self.resolved is None or checkpoint is None:
            return ""
        return completed(checkpoint, self.resolved)

    def show_complete(self) -> None:
        """Say that nothing is left to train, and see that ``result.json`` does."""
        print(f"  complete   this run is complete: {self.complete}", flush=True)
        before = read_result(RunDir(self.run_dir))
        if before is None or before.status != COMPLETED:
            self._write_result(Outcome())

    @property
    def resume_command(self) -> str:
        """The command that resumes this run as it was."""
        there = RunDir(self.run_dir)
        words = ["det-ds", "run", short(there.experiment), short(self.context_dir)]
        words += ["--run-dir", short(self.run_dir), "--resume"]
        if self.options.accelerator:
            words += ["--accelerator", self.options.accelerator]
        return shlex.join(words)

    # ------------------------------------------------------------------------------------------ for ranks

    @property
    def rank_words(self) -> list[str]:
        """What each rank runs, after ``python3 -m``."""
        start, script = self.start, self.experiment.script
        own = [*self.experiment.entrypoint.options, *self.options.train_arguments]
        if start.weights and self.options.predict is not None:
            own += [
                "--predict",
                str(self.options.predict.absolute()),
                "--checkpoint",
                str(start.weights.path),
            ]
        elif start.weights:
            own += ["--evaluate", str(start.weights.path)]
        elif start.checkpoint:
            own += ["--resume", start.checkpoint.uuid]
            own += ["--resume-from", str(start.checkpoint.path)] if start.elsewhere else []
            own += ["--reset-optimizer"] if start.resets_optimizer else []
        elif start.fork:
            own += ["--fork", str(start.fork.path)]
        there = ["--run-dir", str(self.run_dir), "--accelerator", self.accelerator.name]
        if script is None:
            return ["determined_ds.train", self.experiment.trial, *there, *own]
        watched = ["--watched"] if self._watches_script else []
        return ["determined_ds.script", *there, *watched, *own, "--", *script.words]

    @property
    def hang_timeout_s(self) -> float:
        """How long nothing may move, in seconds; 0: no limit."""
        stated = self.options.hang_timeout
        environment = {**os.environ, **self.variables}
        return hang_timeout_s(environment) if stated is None else 60 * stated

    @property
    def _watches_script(self) -> bool:
        """Whether the user has stated how long a script may show nothing."""
        stated = {**os.environ, **self.variables}.get(HANG_TIMEOUT)
        is_stated = self.options.hang_timeout is not None or stated
        return bool(self.experiment.script is not None and is_stated and self.hang_timeout_s)

    def write(self) -> None:
        """Write what ranks read in the run directory; to ``next`` where they resume what is there.

        Raises:
            ConfigError: it cannot be written to.
        """
        there, checkpoint = RunDir(self.run_dir), self.start.checkpoint
        try:
            there.remove_next()
            if checkpoint is not None and not self.start.elsewhere:
                new = there.make_next()
                write_whole(new.experiment, stored_yaml(self._config))
                write_whole(new.launches, self._launches(there))
                kept = kept_until(there.metrics, checkpoint.steps_completed)
                if kept is not None:
                    write_whole(new.metrics, kept)
                if self.start.superseded:
                    there.supersede([each.uuid for each in self.start.superseded])
                return
            write_whole(there.experiment, stored_yaml(self._config))
            write_whole(there.metrics, "")
            write_whole(there.launches, self._launches(there if self.restarted else None))
            for path in (there.result, there.master, *(() if self.restarted else (there.loggers,))):
                path.unlink(missing_ok=True)
            if self.experiment.script is not None:
                there.new_trial(RunDir(checkpoint.path.parent.parent) if checkpoint else None)
        except OSError as error:
            raise ConfigError(unwritable(self.run_dir, error)) from None

    def _launches(self, before: RunDir | None) -> str:
        """``launches.jsonl`` with a line for this one, after those of the run so far."""
        start, experiment = self.start, self.experiment
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
            checkpoint=begins.uuid if begins else "",
            resume=self.resume_command,
        )
        earlier = read_launches(before.launches) if before is not None else ()
        return "".join(launch_line(each) for each in (*earlier, launch))

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

        Raises:
            ConfigError: the run directory cannot be written to, or another process writes to it.
            TrainingError: the ranks could not be started, for want of room on a disk or of open files.
        """
        # The file that ranks read has no secrets.
        os.environ.update(secrets_of(self._config))
        timeout_s, run, used, allowed = self.hang_timeout_s, self, 0, self.experiment.max_restarts
        with RunLock(self.run_dir) as lock:
            while True:
                outcome, closing = run._launch_once(lock, timeout_s)
                show_outcome(outcome, self.run_dir, self.resume_command, closes=bool(closing))
                start = run.start.again(outcome, self.run_dir) if used < allowed else None
                if start is None:
                    print(*closing, sep="\n", end="\n" if closing else "", flush=True)
                    return outcome.exit_code
                used += 1
                origin = "step 0"
                if start.checkpoint is not None:
                    origin = f"checkpoint {start.checkpoint.uuid} at batch {start.checkpoint.steps_completed}"
                line = f"restart {used} of {allowed} from {origin}; it crashed: {outcome.reason}"
                restarted = "\n".join([*(f"warning: {damage}" for damage in start.damages), line])
                print(f"{restarted}\n", file=sys.stderr)
                run = replace(run, start=start, restarted=restarted)

    def _launch_once(self, lock: RunLock, timeout_s: float) -> tuple[Outcome, list[str]]:
        """How the ranks ended, and the closing block."""
        self.write()
        try:
            outcome = run_ranks(
                self.rank_words,
                num_ranks=self.experiment.slots,
                accelerator=self.accelerator,
                context_dir=self.context_dir,
                run_dir=self.run_dir,
                variables=self.variables,
                keep_open=[lock.fileno()],
                hang_timeout_s=timeout_s,
            )
            self.conclude(outcome)
            return outcome, self.closing()
        except OSError as error:
            message = exhausted(error, self.run_dir)
            if message is None:
                raise
            raise TrainingError(message.removeprefix("error: ")) from None
        finally:
            RunDir(self.run_dir).remove_next()

    def conclude(self, outcome: Outcome) -> None:
        """Write ``result.json``.

        Not where the ranks have left the run as it was and no other command reads it.
        """
        there, options = RunDir(self.run_dir), self.options
        if not there.is_replaced and options.parent is None:
            return
        self._write_result(outcome)

    def closing(self) -> list[str]:
        """What came of the training, in a few lines printed after everything else.

        None where nothing was trained, or where the ranks left the run as it was.
        """
        options, there = self.options, RunDir(self.run_dir)
        if options.test or options.is_measured or options.only_reads or not there.is_replaced:
            return []
        return closing_block(read_run(self.run_dir))

    def _write_result(self, outcome: Outcome) -> None:
        there = RunDir(self.run_dir)
        relink(there)
        write_result(
            there,
            status=outcome.status,
            cause=outcome.cause,
            reason=outcome.reason,
            trial_seed=self.experiment.trial_seed,
            metric=self.experiment.metric,
            smaller_is_better=self.experiment.smaller_is_better,
            resume=self.resume_command,
            slots=self.experiment.slots,
        )


def as_constants(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters as the master accepts them: a mapping with a key ``type`` has to be wrapped."""

    def holds_type(value: Any) -> bool:
        return isinstance(value, dict) and ("type" in value or any(map(holds_type, value.values())))

    return {
        key: {"type": "const", "val": value} if holds_type(value) else value
        for key, value in hyperparameters.items()
    }
