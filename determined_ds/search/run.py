"""A search run here: trials started as slots become free, followed and stopped as the method says."""

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

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.config.resolve import Where
from determined_ds.documents.files import write_files
from determined_ds.errors import EXIT_TRAINING_FAILED, ConfigError
from determined_ds.experiment.decide import decide_stated
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.experiment.space import HALVING
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.report.run_page import save_page
from determined_ds.report.runs import find_runs
from determined_ds.rundir.metrics_file import Record, read_records
from determined_ds.rundir.records import COMPLETED as RUN_COMPLETED
from determined_ds.rundir.records import INVALID, RESTART, read_launches
from determined_ds.rundir.run_dir import LEFT_S, RunDir, RunLock, check_run_dir, is_held, short
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
# Most methods replace an impossible point by another, endlessly if need be; after so many in a row the search gives up.
MOST_DROPPED = 200
MOST_REASONS = 8


def run_search(plan: SearchPlan) -> int:
    """Run a search, report it on the terminal, and write its results.

    Returns:
        The exit code: 0, also when interrupted once; 1 where no trial has trained; 128 + the signal's number
        after a second interrupt.

    Raises:
        ConfigError: the search in the run directory cannot be resumed, or a trial reports no such metric.
    """
    with Interrupts("the trials that run finish their batch and write a checkpoint") as interrupts:
        print(*_header(plan), sep="\n")
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        sys.stdout.flush()
        with RunLock(plan.run_dir):
            path, text = RunDir(plan.run_dir).experiment, stored_yaml(plan.experiment.config)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_files({path: text}, overwrite=True)
            search = LocalSearch(plan, interrupts)
            search.run()
            return search.conclude()


class LocalSearch:
    """A search and its trials' processes; of a run directory whose lock is held."""

    def __init__(self, plan: SearchPlan, interrupts: Interrupts) -> None:
        self.plan, self.interrupts = plan, interrupts
        self.events = SearchEvents(plan.run_dir / EVENTS, plan.searcher, plan.experiment.space)
        self._metric = plan.experiment.metric
        self._is_smaller = plan.experiment.smaller_is_better
        self._gave_up = ""  # why it ended before its end
        self._free_gpus = list(plan.machine.gpus)

    @property
    def _open(self) -> list[Trial]:
        """The trials that have not ended, the oldest first."""
        return [trial for trial in self.events.trials if trial.is_open]

    @property
    def _running(self) -> dict[Trial, TrialProcess]:
        return {trial: trial.process for trial in self.events.trials if trial.process is not None}

    def _run_dir(self, trial: Trial) -> Path:
        return self.plan.run_dir / TRIALS / f"{trial.number:04d}"

    def run(self) -> None:
        """Run it to its end, or until it is interrupted. No process is left, however this ends.

        Raises:
            ConfigError: a trial reports no such metric.
        """
        until = time.monotonic() + LEFT_S
        try:
            for trial in self._open if self.plan.resume else ():  # what they have written since
                while is_held(self._run_dir(trial)) and time.monotonic() < until:
                    time.sleep(POLL_S)  # its processes end with the search
                check_run_dir(self._run_dir(trial))
                for record in read_records(RunDir(self._run_dir(trial)).metrics):
                    self._take(trial, record)
                if trial.stop_asked:
                    self._end(trial, STOPPED)
            while self._turn():
                time.sleep(POLL_S)
                self._follow()
        finally:
            for process in self._running.values():
                process.kill()

    def _turn(self) -> bool:
        """Start what can be started, stop what is to be stopped. Returns whether there is something to wait for."""
        if self.interrupts.at_once:
            return False
        machine = self.plan.machine
        where = Where(context_dir=self.plan.context_dir, accelerator=machine.accelerator)
        # A point that cannot run may be replaced by another, which is judged in turn.
        while not self.interrupts.requested and (open_ := [t for t in self._open if not t.is_judged]):
            if self.events.dropped_in_a_row >= MOST_DROPPED and self.plan.searcher["name"] != "grid":
                if not self._running:
                    self._gave_up = f"gave up: {self.events.dropped_in_a_row} points in a row cannot run"
                    return False
                break
            point = self.plan.experiment.hyperparameters.holding(open_[0].create.hparams)
            try:
                decide_stated(self.plan.experiment, point, where)
            except ConfigError as error:
                why = "; ".join(str(problem).splitlines()[0] for problem in error.problems)
                self._end(open_[0], DROPPED, why, "INVALID_HP")
                continue
            open_[0].is_judged = True
        for trial, process in self._running.items():
            if (trial.stop_asked or self.interrupts.requested) and not trial.is_ending:
                trial.is_ending = True
                process.stop()
        for trial in self._open:  # the oldest first, as on a cluster
            if self.interrupts.requested or len(self._running) >= machine.at_once:
                break
            if trial.is_judged and trial.process is None:
                self._start(trial)
        return bool(self._running)

    def _start(self, trial: Trial) -> None:
        machine, run_dir = self.plan.machine, self._run_dir(trial)
        trial.gpus = tuple(self._free_gpus[: machine.slots_per_trial])
        self._free_gpus = self._free_gpus[len(trial.gpus) :]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(trial.gpus)} if trial.gpus else {}
        if machine.threads is not None:
            environment["OMP_NUM_THREADS"] = str(machine.threads)
        checkpoints = checkpoints_in(RunDir(run_dir).checkpoints)
        process = TrialProcess(
            experiment=self.plan.trial_document(trial.create),
            context_dir=self.plan.context_dir,
            run_dir=run_dir,
            accelerator=machine.accelerator.name,
            arguments=["--resume"] if checkpoints else [],
            environment=environment,
        )
        if checkpoints:
            self._say(trial, "resumed", f"from batch {checkpoints[0].steps_completed}")
        else:
            self._say(trial, "started", _in_words(trial.point))
        if trial.status == WAITING:
            self.events.tell("started", trial)
        process.start()
        trial.process, trial.is_ending, trial.steps = process, False, None

    def _follow(self) -> None:
        """Take in what the trials have written, and who has ended."""
        for trial, process in self._running.items():
            code = process.poll()  # first: its last records are read after that
            for record in process.new_metrics():
                trial.steps = record["steps_completed"]
                self._take(trial, record)
            if code is None:
                continue
            trial.process = None
            self._free_gpus += trial.gpus
            result, has_trained = process.result(), checkpoints_in(RunDir(process.run_dir).checkpoints)
            if trial.stop_asked:
                self._end(trial, STOPPED)
            elif result.status == RUN_COMPLETED:
                self._end(trial, COMPLETED)
            elif self.interrupts.requested:
                self._say(trial, "paused", f"at batch {trial.steps or 0}")
            elif result.status == INVALID and not has_trained:  # what has trained is not impossible
                self._end(trial, DROPPED, result.reason or "", "INVALID_HP")
            else:
                self._end(trial, FAILED, result.reason or "it was stopped from outside", "ERRORED")

    def _take(self, trial: Trial, record: Record) -> None:
        """A record of a trial: the method receives each validation once, and none after it has stopped the trial."""
        steps, metrics, values = record["steps_completed"], record["metrics"], dict[str, float]()
        if record["group"] != "validation" or trial.stop_asked or steps <= trial.last:
            return
        needed = {"metric": self._metric}
        if self.plan.searcher["name"] in HALVING:
            needed["time_metric"] = str(self.plan.searcher["time_metric"])
        for key, name in needed.items():
            value = metrics.get(name)
            if isinstance(value, (int, float)) and (key == "metric" or math.isfinite(value)):
                values[name] = float(value)
                continue
            known = ", ".join(sorted(metrics))
            message = f"trial {trial.number} does not report it as a number at validation; it reports {known}"
            document, fix = self.plan.experiment.document, f"name one of them: {known}"
            raise ConfigError(document.problem(("searcher", key), message, fix, "metric", value=name))
        self.events.tell("validated", trial, metrics=values, steps=steps)
        self._say(trial, "validated", self._last_of(trial))

    def _end(self, trial: Trial, status: str, why: str = "", reason: str | None = None) -> None:
        """``status``: STOPPED by the method becomes COMPLETED where ``max_time`` is reached."""
        if status == STOPPED and trial.time >= float(self.plan.searcher["max_time"]):
            status = COMPLETED
        self.events.tell("ended", trial, reason=reason, status=status, why=why)
        self._say(trial, status, why or self._last_of(trial))

    # ------------------------------------------------------------------------------------------- what is shown

    def _last_of(self, trial: Trial) -> str:
        return f"batch {trial.last}  {self._metric} {trial.values[trial.last]:.5g}" if trial.values else ""

    def _say(self, trial: Trial, what: str, more: str) -> None:
        print(f"trial {trial.number:<4} {what:<10} {more}".rstrip(), flush=True)

    def conclude(self) -> int:
        """Write the results, and say how it ended. Returns the exit code."""
        plan, trials, metric, is_smaller = self.plan, self.events.trials, self._metric, self._is_smaller
        counts = Counter(trial.status for trial in trials)
        summary = f"{len(trials)} trials: {', '.join(f'{num} {status}' for status, num in counts.items())}"
        lines, written, texts = ["", summary], [plan.run_dir / RESULTS], dict[Path, str]()
        texts[plan.run_dir / RESULTS] = self._results()
        best = min((found for trial in trials if (found := trial.best(is_smaller))), default=None)
        if best is not None:
            _, number, steps = best
            trial = trials[number - 1]
            value, point = trial.values[steps], _in_words(trial.point)
            threads = plan.machine.threads or os.environ.get("OMP_NUM_THREADS")
            again = [f"OMP_NUM_THREADS={threads}"] * bool(threads and plan.machine.accelerator.name == "cpu")
            again += ["det-ds", "run", short(plan.run_dir / BEST), short(plan.context_dir)]
            command = shlex.join([*again, "--accelerator", plan.machine.accelerator.name])
            said = f"trial {number}, {metric} {value!r} after {steps} batches."
            head = [f"The best of {len(trials)} trials of {plan.experiment.name}: {said}"]
            head += [point or "Nothing was searched.", f"To train it again: {command}"]
            text = stored_yaml(plan.trial_document(trial.create).data)
            texts[plan.run_dir / BEST] = "".join(f"# {line}\n" for line in head) + text
            lines.append(f"best   trial {number}: {metric} {value:.6g} after {steps} batches")
            lines += [f"       {point}"] if point else []
            lines.append(f"again  {command}")
            written.append(plan.run_dir / PAGE)
        write_files(texts, overwrite=True)
        if self._open and not self._gave_up:
            resume = ["det-ds", "search", short(RunDir(plan.run_dir).experiment), short(plan.context_dir)]
            resume += ["--run-dir", short(plan.run_dir), "--resume", *plan.words]
            print(f"resume with: {shlex.join(resume)}", file=sys.stderr)
            return self.interrupts.exit_code

        if best is not None:  # curves, and what differs between the trials
            save_page(find_runs([plan.run_dir]), plan.run_dir / PAGE)
        lines.append("see    " + ", ".join(map(short, written)))
        why = Counter((trial.status, trial.why) for trial in trials if trial.status in (DROPPED, FAILED))
        for (status, reason), count in why.most_common(MOST_REASONS):  # results.csv has all of them
            lines.append(f"  {count} {status}: {reason}")
        print("\n".join(lines), flush=True)
        problem = self._gave_up
        has_trained = counts[COMPLETED] + counts[STOPPED] > 0
        if not has_trained:
            problem = problem or "every trial was dropped or failed"
        elif best is None:
            problem = f"no trial has reported a finite {metric}, by which the best is chosen"
        is_good = has_trained and best is not None
        if problem:
            print(f"{'warning' if is_good else 'error'}: {problem}", file=sys.stderr)
        return 0 if is_good else EXIT_TRAINING_FAILED

    def _results(self) -> str:
        """All trials as CSV: what became of each, its best metric, and its point."""
        names = [axis.name for axis in self.plan.experiment.space.axes]
        head = ["trial", "status", self._metric, "batches", "last_batch", "restarts", "seed"]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*head, *names, "reason"])
        for trial in self.events.trials:
            best = trial.best(self._is_smaller)
            value, steps = (repr(trial.values[best[2]]), best[2]) if best else ("", "")
            launches = read_launches(RunDir(self._run_dir(trial)).launches)
            restarts = sum(launch.kind == RESTART for launch in launches)
            row = [trial.number, trial.status, value, steps, trial.last if trial.values else "", restarts]
            writer.writerow([*row, trial.create.seed, *(trial.point.get(name) for name in names), trial.why])
        return text.getvalue()


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
    slots = f"{machine.slots_per_trial} a trial, {machine.slots} on this machine"
    yield f"  slots      {slots} ({machine.accelerator.name}): {at_once}"
    yield f"  run dir    {short(plan.run_dir)}"


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
