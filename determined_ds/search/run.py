"""A search run here: trials started as slots become free, followed, stopped and restarted as the method says."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.documents.files import write_files
from determined_ds.errors import EXIT_TRAINING_FAILED, ConfigError
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.experiment.space import HALVING
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.report.run_page import save_page
from determined_ds.report.runs import find_runs
from determined_ds.rundir.metrics_file import Record, read_records
from determined_ds.rundir.records import COMPLETED as RUN_COMPLETED
from determined_ds.rundir.records import INVALID
from determined_ds.rundir.run_dir import RunDir, RunLock, check_run_dir, is_held, short
from determined_ds.rundir.signals import Interrupts
from determined_ds.search.events import (
    COMPLETED,
    DROPPED,
    EVENTS,
    FAILED,
    STOPPED,
    WAITING,
    SearchEvents,
    Trial,
)
from determined_ds.search.methods import brackets_of, rungs
from determined_ds.search.plan import SearchPlan

TRIALS, BEST, RESULTS, PAGE = "trials", "best.yaml", "results.csv", "report.html"
POLL_S = 0.5
REFRESH_S = 1.0  # a drawing takes some milliseconds
LEFT_S = 10.0  # processes of a killed search end with it; the system may take a moment
# Most methods replace an impossible point by another, endlessly if need be; after so many in a row the search gives up.
MOST_DROPPED = 1000
MOST_REFUSED = 20  # by ranks, which take seconds to start
MOST_REASONS = 8
BAR_CELLS = 12


def run_search(plan: SearchPlan) -> int:
    """Run a search, report it on the terminal, and write its results.

    Returns:
        The exit code: 0, also when interrupted once; 1 where no trial has trained; 128 + the signal's number
        after a second interrupt.

    Raises:
        ConfigError: the search in the run directory cannot be resumed, or a trial reports no such metric.
    """
    with Interrupts("the trials that run finish their batch and write a checkpoint") as interrupts:
        for line in _header(plan):
            print(line)
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        sys.stdout.flush()
        with RunLock(plan.run_dir):
            path, text = RunDir(plan.run_dir).experiment, stored_yaml(plan.experiment.config)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_files({path: text}, overwrite=True)
            events = SearchEvents(plan.run_dir / EVENTS, plan.searcher, plan.experiment.space)
            search = LocalSearch(plan, events, interrupts)
            search.run()
            return search.conclude()


class LocalSearch:
    """A search and its trials' processes."""

    def __init__(self, plan: SearchPlan, events: SearchEvents, interrupts: Interrupts) -> None:
        self.plan, self.events, self.interrupts = plan, events, interrupts
        self._gave_up = ""  # why it ended before its end
        self._free_gpus = list(plan.machine.gpus)
        self._refused_in_a_row = 0
        name = plan.searcher["name"]
        self._replaces = name not in ("grid", "single")
        self._time_metric = str(plan.searcher["time_metric"]) if name in HALVING else ""
        self._rungs = rungs(brackets_of(plan.searcher)[0]) if name in HALVING else ()
        # A table on a terminal, and what has happened above it; the latter alone elsewhere.
        self._live = Live(auto_refresh=False, transient=True)

    @property
    def _open(self) -> list[Trial]:
        """The trials that have not ended, the oldest first."""
        return [trial for trial in self.events.trials if trial.is_open]

    @property
    def _running(self) -> dict[Trial, TrialProcess]:
        return {trial: trial.process for trial in self.events.trials if trial.process is not None}

    def run(self) -> None:
        """Run it to its end, or until it is interrupted. No process is left, however this ends.

        Raises:
            ConfigError: the run directory holds another search, or a trial reports no such metric.
        """
        drawn_s = 0.0
        try:
            with self._live:
                if self.plan.resume:
                    self._restore()
                while self._turn():
                    time.sleep(POLL_S)
                    self._follow()
                    if time.monotonic() >= drawn_s + REFRESH_S:
                        drawn_s = time.monotonic()
                        self._live.update(self._drawing(), refresh=True)
        finally:
            for process in self._running.values():
                process.kill()

    def _restore(self) -> None:
        """Pass on what the trials of an interrupted search have written since."""
        until = time.monotonic() + LEFT_S
        for trial in self._open:
            run_dir = self._run_dir(trial)
            while is_held(run_dir) and time.monotonic() < until:  # its processes end with the search
                time.sleep(POLL_S)
            check_run_dir(run_dir)
        for trial in self._open:
            for record in read_records(RunDir(self._run_dir(trial)).metrics):
                self._take(trial, record)
        for trial in self._open:
            if trial.stop_asked:
                self._end_stopped(trial)

    def _turn(self) -> bool:
        """Start what can be started, stop what is to be stopped. Returns whether there is something to wait for."""
        if self.interrupts.at_once or self._gave_up:
            return False
        # A point that cannot run may be replaced by another, which is judged in turn.
        while not self.interrupts.requested and (
            trial := next((t for t in self._open if not t.is_judged), None)
        ):
            if self._replaces and self.events.dropped_in_a_row >= MOST_DROPPED:
                if not self._running:
                    self._gave_up = f"{self.events.dropped_in_a_row} points in a row cannot run"
                break
            try:
                resolved = self.plan.judge(trial.create)
            except ConfigError as error:
                why = "; ".join(str(problem).splitlines()[0] for problem in error.problems)
                self._end(trial, DROPPED, why, "INVALID_HP")
                continue
            trial.is_judged = True
            length = resolved.fit.max_length if resolved is not None else None
            if length is not None and length.unit == "batches" and isinstance(length.value, int):
                trial.length = length.value
        for trial in self._open:  # the oldest first, as on a cluster
            if self.interrupts.requested:
                trial.ask_to_stop()
            elif trial.is_judged and trial.process is None and len(self._running) < self.plan.machine.at_once:
                self._start(trial)
        return bool(self._running)

    def _run_dir(self, trial: Trial) -> Path:
        return self.plan.run_dir / TRIALS / f"{trial.number:04d}"

    def _start(self, trial: Trial) -> None:
        machine, run_dir = self.plan.machine, self._run_dir(trial)
        trial.gpus = tuple(self._free_gpus[: machine.slots_per_trial]) if machine.gpus else ()
        self._free_gpus = [gpu for gpu in self._free_gpus if gpu not in trial.gpus]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(trial.gpus)} if trial.gpus else {}
        if machine.threads is not None:
            environment["OMP_NUM_THREADS"] = str(machine.threads)
        checkpoints = checkpoints_in(RunDir(run_dir).checkpoints)
        # The search restarts crashed trials itself.
        document = self.plan.trial_document(trial.create).overwritten((("max_restarts",), 0, "the search"))
        process = TrialProcess(
            experiment=document,
            context_dir=self.plan.context_dir,
            run_dir=run_dir,
            accelerator=machine.accelerator.name,
            arguments=["--resume"] if checkpoints else [],
            environment=environment,
        )
        is_new = trial.status == WAITING
        if is_new:
            self.events.tell("started", trial)
        process.start()
        trial.process, trial.is_asked = process, False
        trial.from_checkpoint, trial.steps = bool(checkpoints), None
        if checkpoints:
            self._say(trial, "resumed", f"from batch {checkpoints[0].steps_completed}")
        elif is_new:
            self._say(trial, "started", _in_words(trial.point))
        else:
            self._say(trial, "restarted", "no checkpoint found; starting from step 0")

    # --------------------------------------------------------------------------------- what trials say

    def _follow(self) -> None:
        """Take in what the trials have written, and who has ended."""
        for trial, process in self._running.items():
            code = process.poll()  # first: its last records are read after that
            for record in process.new_metrics():
                trial.steps = record["steps_completed"]
                self._take(trial, record)
            if code is not None:
                trial.process = None
                self._free_gpus += trial.gpus
                self._ended(trial, process)
            elif trial.stop_asked:
                trial.ask_to_stop()

    def _take(self, trial: Trial, record: Record) -> None:
        """A record of a trial: the method receives each validation once, and none after it has stopped the trial."""
        steps, metrics, values = record["steps_completed"], record["metrics"], dict[str, float]()
        if record["group"] != "validation" or trial.stop_asked or steps <= trial.last:
            return
        needed = {"metric": self.plan.experiment.metric, "time_metric": self._time_metric}
        for key, name in needed.items():
            value = metrics.get(name)
            if isinstance(value, (int, float)) and (key == "metric" or math.isfinite(value)):
                values[name] = float(value)
            elif name:
                known = ", ".join(sorted(metrics))
                message = (
                    f"trial {trial.number} does not report it as a number at validation; it reports {known}"
                )
                path, document = ("searcher", key), self.plan.experiment.document
                fix = f"name one of them: {known}"
                raise ConfigError(document.problem(path, message, fix, "metric", value=name))
        before = trial.time
        self.events.tell("validated", trial, metrics=values, steps=steps)
        self._refused_in_a_row = 0
        if any(before < rung <= trial.time for rung in self._rungs):
            self._say(trial, "validated", self._last_of(trial))

    def _ended(self, trial: Trial, process: TrialProcess) -> None:
        """A process has ended: its trial is over, is restarted, or continues when the search is resumed."""
        result = process.result()
        why = result.reason or ""
        if trial.stop_asked:
            self._end_stopped(trial)
        elif result.status == RUN_COMPLETED:
            self._end(trial, COMPLETED)
        elif self.interrupts.requested:
            self._say(trial, "paused", f"at batch {trial.steps or 0}")
        elif result.status == INVALID and not trial.from_checkpoint:
            self._refused_in_a_row += 1
            self._end(trial, DROPPED, why, "INVALID_HP")
            if self._replaces and self._refused_in_a_row >= MOST_REFUSED:
                self._gave_up = f"the ranks of {self._refused_in_a_row} points in a row refused to train"
        else:
            if result.status == INVALID:  # what ran before cannot be impossible: its checkpoints are not good
                folder, number = RunDir(process.run_dir).checkpoints, 1
                while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
                    number += 1
                folder.rename(aside)
            why, most = why or "it was stopped from outside", self.plan.max_restarts
            if trial.restarts >= most:
                self._end(trial, FAILED, why, "ERRORED")
            else:
                self.events.tell("restarted", trial, why=why)
                self._say(trial, "crashed", f"{why} (restart {trial.restarts} of {most})")

    def _end_stopped(self, trial: Trial) -> None:
        """The method has stopped a trial: early, or because it has reached ``max_time``."""
        reached_the_top = trial.time >= float(self.plan.searcher["max_time"])
        self._end(trial, COMPLETED if reached_the_top else STOPPED)

    def _end(self, trial: Trial, status: str, why: str = "", reason: str | None = None) -> None:
        self.events.tell("ended", trial, reason=reason, status=status, why=why)
        self._say(trial, status, why or self._last_of(trial))

    # ------------------------------------------------------------------------------------------- what is shown

    def _last_of(self, trial: Trial) -> str:
        if not trial.values:
            return ""
        return f"batch {trial.last}  {self.plan.experiment.metric} {trial.values[trial.last]:.5g}"

    def _say(self, trial: Trial, what: str, more: str = "") -> None:
        line = f"trial {trial.number:<4} {what:<10} {more}".rstrip()
        self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _best(self) -> tuple[Trial, int, float] | None:
        """The trial with the best validation, the first of equals, its batches and its metric."""
        is_smaller = self.plan.experiment.smaller_is_better
        rated = [(trial, *found) for trial in self.events.trials if (found := trial.best(is_smaller))]
        sign = 1 if is_smaller else -1
        return min(rated, key=lambda each: (sign * each[2], each[0].number), default=None)

    def _drawing(self) -> Group:
        """The trials that run, the best so far, and how many have become what."""
        table = Table(box=None, pad_edge=False)
        for head in ("trial", "progress", "batches", self.plan.experiment.metric):
            table.add_column(head, justify="left" if head == "progress" else "right", no_wrap=True)
        table.add_column("point", overflow="ellipsis", no_wrap=True)
        for trial in self._running:
            steps, length = trial.steps or 0, trial.length
            is_stopping = trial.stop_asked or self.interrupts.requested
            word = "stopping" if is_stopping else "starting" if trial.steps is None else "running"
            progress = ProgressBar(length, steps, BAR_CELLS) if word == "running" and length else word
            batches = f"{steps}/{length}" if length else str(steps)
            value = f"{trial.values[trial.last]:.5g}" if trial.values else ""
            table.add_row(str(trial.number), progress, batches, value, _in_words(trial.point))
        return Group(table, "", *self._summary())

    def _summary(self) -> list[str]:
        """How many trials have become what, and the best."""
        counts = Counter(trial.status for trial in self.events.trials)
        numbers = ", ".join(f"{count} {status}" for status, count in counts.items())
        lines = [f"{len(self.events.trials)} trials: {numbers}"]
        if best := self._best():
            trial, steps, value = best
            lines.append(
                f"best   trial {trial.number}: {self.plan.experiment.metric} {value:.6g} after {steps} batches"
            )
            lines += [f"       {_in_words(trial.point)}"] if trial.point else []
        return lines

    # --------------------------------------------------------------------------------------------- at the end

    def conclude(self) -> int:
        """Write the results, and say how it ended. Returns the exit code."""
        plan, trials, best = self.plan, self.events.trials, self._best()
        machine, metric = plan.machine, plan.experiment.metric
        threads = machine.threads or os.environ.get("OMP_NUM_THREADS")
        again = [f"OMP_NUM_THREADS={threads}"] if threads and machine.accelerator.name == "cpu" else []
        again += ["det-ds", "run", short(plan.run_dir / BEST), short(plan.context_dir)]
        command = shlex.join([*again, "--accelerator", machine.accelerator.name])
        texts = {plan.run_dir / RESULTS: _results(plan, trials)}
        if best is not None:
            trial, steps, value = best
            head = (
                f"# The best of {len(trials)} trials of {plan.experiment.name}: trial {trial.number},"
                f" {metric} {value!r} after {steps} batches.\n"
                f"# {_in_words(trial.point) or 'Nothing was searched.'}\n"
                f"# To train it again: {command}\n"
            )
            texts[plan.run_dir / BEST] = head + stored_yaml(plan.trial_document(trial.create).data)
        write_files(texts, overwrite=True)
        if self._open and not self._gave_up:
            resume = ["det-ds", "search", short(RunDir(plan.run_dir).experiment), short(plan.context_dir)]
            resume += ["--run-dir", short(plan.run_dir), "--resume", *plan.words]
            print(f"resume with: {shlex.join(resume)}", file=sys.stderr)
            return self.interrupts.exit_code

        written = [plan.run_dir / RESULTS]
        if best is not None:  # curves, and what differs between the trials
            save_page(find_runs([plan.run_dir]), plan.run_dir / PAGE)
            written.append(plan.run_dir / PAGE)
        lines = ["", *self._summary(), *([f"again  {command}"] if best is not None else [])]
        lines.append("see    " + ", ".join(short(path) for path in written))
        why = Counter((trial.status, trial.why) for trial in trials if trial.status in (DROPPED, FAILED))
        lines += [
            f"  {count} {status}: {reason}" for (status, reason), count in why.most_common(MOST_REASONS)
        ]
        if len(why) > MOST_REASONS:
            lines.append(f"  and {len(why) - MOST_REASONS} other reasons, which {RESULTS} has")
        print("\n".join(lines), flush=True)
        has_trained = any(trial.status in (COMPLETED, STOPPED) for trial in trials)
        problem = f"gave up: {self._gave_up}" if self._gave_up else ""
        if not has_trained:
            problem = problem or "every trial was dropped or failed"
        elif best is None:
            problem = f"no trial has reported a finite {metric}, by which the best is chosen"
        is_good = has_trained and best is not None
        if problem:
            print(f"{'warning' if is_good else 'error'}: {problem}", file=sys.stderr)
        return 0 if is_good else EXIT_TRAINING_FAILED


def _header(plan: SearchPlan) -> Iterator[str]:
    """What will be searched, in a few lines for people."""
    experiment, machine, searcher = plan.experiment, plan.machine, plan.searcher
    axes, name = experiment.space.axes, searcher["name"]
    over = f" over {', '.join(axis.name.rpartition('.')[2] for axis in axes)}" if axes else ""
    yield f"{experiment.name}: {name}{over}, {experiment.entrypoint}"
    count = {"single": 1, "grid": experiment.space.size}.get(name) or int(searcher["max_trials"])
    trials = f"{count} trial{'s' * (count != 1)}"
    if name in HALVING:
        brackets = brackets_of(searcher)
        several = f" in {len(brackets)} brackets" if len(brackets) > 1 else ""
        trials += f"{several}, judged at {', '.join(map(str, rungs(brackets[0])))} {searcher['time_metric']}"
    better = "the smaller the better" if experiment.smaller_is_better else "the larger the better"
    yield f"  search     {trials} by {experiment.metric}, {better}"
    at_once = "one trial at a time" if machine.at_once == 1 else f"{machine.at_once} trials at a time"
    yield (
        f"  slots      {machine.slots_per_trial} a trial, {machine.slots} on this machine"
        f" ({machine.accelerator.name}): {at_once}"
    )
    yield f"  run dir    {short(plan.run_dir)}"


def _results(plan: SearchPlan, trials: list[Trial]) -> str:
    """All trials as CSV: what became of each, its best metric, and its point."""
    names, metric = [axis.name for axis in plan.experiment.space.axes], plan.experiment.metric
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["trial", "status", metric, "batches", "last_batch", "restarts", "seed", "started", "ended"]
    writer.writerow([*head, *names, "reason"])
    for trial in trials:
        best = trial.best(plan.experiment.smaller_is_better)
        steps, value = (best[0], repr(best[1])) if best is not None else ("", "")
        times = [each.isoformat(timespec="seconds") if each else "" for each in (trial.started, trial.ended)]
        row = [trial.number, trial.status, value, steps, trial.last if trial.values else "", trial.restarts]
        point = (trial.point.get(name) for name in names)
        writer.writerow([*row, trial.create.seed, *times, *point, trial.why])
    return text.getvalue()


def _in_words(point: Mapping[str, Any]) -> str:
    """A point for people: of each name its last word, where that is of one hyperparameter alone."""
    last = {name: name.rpartition(".")[2] for name in point}
    times = Counter(last.values())
    shown = []
    for name, value in point.items():
        is_word = value is None or isinstance(value, bool)
        text = json.dumps(value) if is_word else f"{value:.4g}" if isinstance(value, float) else str(value)
        shown.append(f"{last[name] if times[last[name]] == 1 else name} {text}")
    return ", ".join(shown)
