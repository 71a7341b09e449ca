"""A search run here: trials started as slots become free, followed, stopped and restarted as the method says."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.space import HALVING, rungs
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.rundir.conclusion import COMPLETED as RUN_COMPLETED
from determined_ds.rundir.conclusion import INVALID
from determined_ds.rundir.metrics_file import read_records
from determined_ds.rundir.run_dir import RunDir
from determined_ds.search.course import Course, CourseTrial, Exited, Validated
from determined_ds.search.display import LineDisplay, SearchView, TrialView, in_words
from determined_ds.search.methods import Reason
from determined_ds.search.setup import SearchPlan
from determined_ds.search.study import (
    COMPLETED,
    DROPPED,
    FAILED,
    STOPPED,
    STUDY,
    WAITING,
    SearchStudy,
    study_problem,
)
from determined_ds.search.trials import (
    TRIALS,
    RunningTrial,
    in_a_line,
    processes_below,
    run_dir_of,
    set_aside,
)

POLL_S = 0.5
LEFT_S = 10.0  # processes of a killed search end with it; the system may take a moment
# Most methods replace an impossible point by another, endlessly if need be; after so many in a row the search gives up.
MOST_DROPPED = 1000
MOST_REFUSED = 20  # by ranks, which take seconds to start


@dataclass(kw_only=True)
class LocalSearch:
    """A search and its trials' processes.

    Args:
        plan: What to search.
        study: Where it is written down.
        display: Shows what happens.
        interrupts: Ends it.
        gave_up: Why it ended before its end; "" elsewhere.
    """

    plan: SearchPlan
    study: SearchStudy
    display: LineDisplay
    interrupts: Interrupts
    gave_up: str = ""
    _running: dict[int, RunningTrial] = field(default_factory=dict)
    _lengths: dict[int, int | None] = field(default_factory=dict)  # of the trials that were judged
    _counts: Counter[str] = field(default_factory=Counter)
    _best: tuple[float, int, int] | None = None  # (metric, trial, batches)
    _refused_in_a_row: int = 0
    _num_judged: int = 0

    def __post_init__(self) -> None:
        self.course = Course(search=self.plan.search())
        self._free_gpus = list(self.plan.machine.gpus)
        searcher = self.plan.searcher
        self._replaces = searcher["name"] not in ("grid", "single")
        self._is_halving = searcher["name"] in HALVING
        self._time_metric = str(searcher["time_metric"]) if self._is_halving else ""
        self._ladder = rungs(searcher) if self._is_halving else ()

    def run(self) -> None:
        """Run it to its end, or until it is interrupted. No process is left, however this ends.

        Raises:
            ConfigError: the study holds another search, or a trial reports no such metric.
        """
        try:
            self._restore()
            while self._turn():
                time.sleep(POLL_S)
                self._follow()
                if self.display.wants_update():
                    self.display.update(self._view())
        finally:
            for running in self._running.values():
                running.process.kill()

    @property
    def is_over(self) -> bool:
        """Whether all trials have ended, or gave up."""
        return bool(self.gave_up) or not self.course.open_trials

    def _turn(self) -> bool:
        """Start what can be started, stop what is to be stopped. Returns whether there is something to wait for."""
        if self.interrupts.at_once or self.gave_up:
            return False
        if self.interrupts.requested:
            for running in self._running.values():
                running.ask_to_stop()
            return bool(self._running)
        self._judge_new()
        self._start_waiting()
        return bool(self._running)

    # ------------------------------------------------------------------------------------------ resuming

    def _restore(self) -> None:
        """Replay the stored events, then pass on what the trials have written since."""
        path = self.plan.run_dir / STUDY
        for event in tuple(self.study.events):
            trial = self.course.trials.get(event.trial_id)
            if trial is None or trial.exited or (trial.stop_asked and isinstance(event, Validated)):
                raise study_problem(path, "is damaged: its events are not those of this search")
            if isinstance(event, Validated):
                self._note_best(event)
            self.course.tell(event)
        known = tuple(self.study.trials)
        for stored in known:
            trial = self.course.trials.get(stored.number)
            if trial is None or (trial.create.seed, self._point(trial)) != (stored.seed, dict(stored.point)):
                raise study_problem(path, f"holds another trial {stored.number} than this search creates")
            if trial.exited:
                self._counts[stored.status] += 1
        if known and self.plan.resume:
            self._wait_for_left()
        self._note_new()
        for stored in known:
            trial = self.course.trials[stored.number]
            if trial.exited is None and stored.status != WAITING:
                for record in read_records(RunDir(self._run_dir(trial)).metrics):
                    self._take(trial, record)
        for trial in self.course.open_trials:
            if trial.stop_asked:
                self._end_stopped(trial)

    def _wait_for_left(self) -> None:
        """Wait until the processes of a search that was killed have ended: they would write beside the new ones."""
        until = time.monotonic() + LEFT_S
        while left := processes_below(self.plan.run_dir / TRIALS):
            if time.monotonic() > until:
                message = f"processes of an earlier search still run in it: {', '.join(map(str, left))}"
                fix = f"end them first: kill {' '.join(map(str, left))}"
                raise ConfigError(
                    Problem(key="--run-dir", value=str(self.plan.run_dir), message=message, fix=fix)
                )
            time.sleep(POLL_S)

    def _note_new(self) -> None:
        """Write down the trials that the method has created."""
        for number in range(len(self.study.trials) + 1, len(self.course.trials) + 1):
            trial = self.course.trials[number]
            self.study.add(number, trial.create, self._point(trial))

    def _point(self, trial: CourseTrial) -> dict[str, Any]:
        return self.plan.point(trial.create)

    def _run_dir(self, trial: CourseTrial) -> Path:
        return run_dir_of(self.plan.run_dir, trial.number)

    # ---------------------------------------------------------------------------------- from point to process

    def _judge_new(self) -> None:
        """Drop impossible points; each may be replaced by another, which is judged in turn."""
        while self._num_judged < len(self.course.trials) and not self.interrupts.requested:
            if self._replaces and self.course.dropped_in_a_row >= MOST_DROPPED:
                if not self._running:
                    self.gave_up = f"{self.course.dropped_in_a_row} points in a row cannot run"
                return
            self._num_judged += 1
            trial = self.course.trials[self._num_judged]
            if trial.exited is None:
                self._judge(trial)

    def _judge(self, trial: CourseTrial) -> None:
        try:
            resolved = self.plan.judge(trial.create)
        except ConfigError as error:
            self._end(trial, DROPPED, in_a_line(error), "INVALID_HP")
            return
        length = resolved.fit.max_length if resolved is not None else None
        value = length.value if length is not None and length.unit == "batches" else None
        self._lengths[trial.number] = value if isinstance(value, int) else None

    def _start_waiting(self) -> None:
        for trial in self._waiting():
            if len(self._running) >= self.plan.machine.at_once:
                return
            self._start(trial)

    def _waiting(self) -> Iterator[CourseTrial]:
        """The trials that can start, the oldest first, as on a cluster."""
        for trial in self.course.open_trials:
            if trial.number in self._lengths and trial.number not in self._running:
                yield trial

    def _start(self, trial: CourseTrial) -> None:
        machine, run_dir = self.plan.machine, self._run_dir(trial)
        gpus = tuple(self._free_gpus[: machine.slots_per_trial]) if machine.gpus else ()
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        if machine.threads is not None:
            environment["OMP_NUM_THREADS"] = str(machine.threads)
        checkpoints = checkpoints_in(RunDir(run_dir).checkpoints)
        # The search restarts crashed trials itself.
        document = self.plan.trial_document(trial.create).overwritten(("max_restarts",), 0, "the search")
        process = TrialProcess(
            experiment=document,
            context_dir=self.plan.context_dir,
            run_dir=run_dir,
            accelerator=machine.accelerator.name,
            arguments=["--resume"] if checkpoints else [],
            environment=environment,
        )
        stored = self.study.trial(trial.number)
        if stored.status == WAITING:
            self.study.started(trial.number)
        process.start()
        self._free_gpus = [gpu for gpu in self._free_gpus if gpu not in gpus]
        self._running[trial.number] = RunningTrial(
            trial=trial,
            process=process,
            length=self._lengths[trial.number],
            from_checkpoint=bool(checkpoints),
            gpus=gpus,
            steps=None,
        )
        if checkpoints:
            self._say(trial, "resumed", f"from batch {checkpoints[0].steps_completed}")
        elif stored.status == WAITING:
            self._say(trial, "started", in_words(self._point(trial)))
        else:
            self._say(trial, "restarted", "no checkpoint found; starting from step 0")

    # --------------------------------------------------------------------------------- what trials say

    def _follow(self) -> None:
        """Take in what the trials have written, and who has ended."""
        for running in list(self._running.values()):
            code = running.process.poll()  # first: its last records are read after that
            for record in running.process.new_metrics():
                steps = record.get("steps_completed")
                running.steps = steps if isinstance(steps, int) else running.steps
                self._take(running.trial, record)
            if code is not None:
                self._free(running)
                self._ended(running)
            elif running.trial.stop_asked:
                running.ask_to_stop()

    def _free(self, running: RunningTrial) -> None:
        del self._running[running.trial.number]
        self._free_gpus = [*self._free_gpus, *running.gpus]

    def _take(self, trial: CourseTrial, record: Mapping[str, Any]) -> None:
        """A record of a trial: the method receives each validation once, and none after it has stopped the trial."""
        steps = record.get("steps_completed")
        if record.get("group") != "validation" or not isinstance(steps, int):
            return
        if trial.stop_asked or trial.knows(steps):
            return
        names = [self.plan.experiment.metric, *([self._time_metric] if self._is_halving else [])]
        values = {name: self._value(trial, name, record.get("metrics") or {}) for name in names}
        event = Validated(trial_id=trial.number, metrics=values, steps=steps)
        before = trial.last
        self.study.validated(event)
        self._note_best(event)
        self._refused_in_a_row = 0
        self.course.tell(event)
        self._note_new()
        self._say_at_rung(trial, event, before)

    def _value(self, trial: CourseTrial, name: str, metrics: Mapping[str, Any]) -> float:
        try:
            value = float(metrics[name])
            if name != self._time_metric or math.isfinite(value):
                return value
        except (KeyError, TypeError, ValueError):
            pass
        key = "searcher.time_metric" if name == self._time_metric else "searcher.metric"
        known = ", ".join(sorted(metrics))
        message = f"trial {trial.number} does not report it as a number at validation; it reports {known}"
        origin = self.plan.experiment.document.origin(tuple(key.split(".")))
        fix = f"name one of them: {known}"
        raise ConfigError(
            Problem(key=key, value=name, origin=origin, message=message, fix=fix, code="metric")
        )

    def _ended(self, running: RunningTrial) -> None:
        """A process has ended: its trial is over, is restarted, or continues when the search is resumed."""
        trial, result = running.trial, running.process.result()
        why = result.reason or ""
        if trial.stop_asked:
            self._end_stopped(trial)
        elif result.status == RUN_COMPLETED:
            self._end(trial, COMPLETED)
        elif self.interrupts.requested:
            self._say(trial, "paused", f"at batch {running.steps or 0}")
        elif result.status == INVALID and not running.from_checkpoint:
            self._refused_in_a_row += 1
            self._end(trial, DROPPED, why, "INVALID_HP")
            if self._replaces and self._refused_in_a_row >= MOST_REFUSED:
                self.gave_up = f"the ranks of {self._refused_in_a_row} points in a row refused to train"
        elif result.status == INVALID:  # what ran before cannot be impossible: its checkpoints are not good
            set_aside(RunDir(running.process.run_dir).checkpoints)
            self._crashed(trial, why)
        else:
            self._crashed(trial, why or "it was stopped from outside")

    def _crashed(self, trial: CourseTrial, why: str) -> None:
        restarts = self.study.trial(trial.number).restarts + 1
        if restarts > self.plan.max_restarts:
            self._end(trial, FAILED, why, "ERRORED")
            return
        self.study.restarted(trial.number, restarts, why)
        self._say(trial, "crashed", f"{why} (restart {restarts} of {self.plan.max_restarts})")

    def _end_stopped(self, trial: CourseTrial) -> None:
        """The method has stopped a trial: early, or because it has reached ``max_time``."""
        assert trial.last is not None
        reached_the_top = trial.last.metrics[self._time_metric] >= float(self.plan.searcher["max_time"])
        self._end(trial, COMPLETED if reached_the_top else STOPPED)

    def _end(self, trial: CourseTrial, status: str, why: str = "", reason: Reason | None = None) -> None:
        event = Exited(trial_id=trial.number, reason=reason)
        self.study.ended(event, status, why)
        self._counts[status] += 1
        self.course.tell(event)
        self._note_new()
        last = f"batch {trial.last.steps}  {self._metric_of(trial.last)}" if trial.last else ""
        self._say(trial, status, why or last)

    # ------------------------------------------------------------------------------------------- what is shown

    def _metric_of(self, event: Validated) -> str:
        metric = self.plan.experiment.metric
        return f"{metric} {event.metrics[metric]:.5g}"

    def _say(self, trial: CourseTrial, what: str, more: str = "") -> None:
        self.display.line(f"trial {trial.number:<4} {what:<10} {more}".rstrip())

    def _say_at_rung(self, trial: CourseTrial, event: Validated, before: Validated | None) -> None:
        """A line where a trial has come to a rung."""
        if not self._is_halving:
            return
        since = before.metrics[self._time_metric] if before else 0.0
        if any(since < rung <= event.metrics[self._time_metric] for rung in self._ladder):
            self._say(trial, "validated", f"batch {event.steps}  {self._metric_of(event)}")

    def _note_best(self, event: Validated) -> None:
        value = event.metrics[self.plan.experiment.metric]
        sign = 1 if self.plan.experiment.smaller_is_better else -1
        if math.isfinite(value) and (self._best is None or sign * value < sign * self._best[0]):
            self._best = (value, event.trial_id, event.steps)

    def _view(self) -> SearchView:
        experiment, machine = self.plan.experiment, self.plan.machine
        best = ""
        if self._best is not None:
            value, number, steps = self._best
            best = f"{experiment.metric} {value:.5g}, trial {number} after {steps} batches"
        in_use = min(machine.slots, len(self._running) * machine.slots_per_trial)
        return SearchView(
            metric=experiment.metric,
            running=tuple(self._trial_view(running) for running in self._running.values()),
            counts={status: self._counts[status] for status in (COMPLETED, STOPPED, FAILED, DROPPED)},
            waiting=sum(1 for _ in self._waiting()),
            best=best,
            slots=f"{in_use} of {machine.slots} slots in use",
        )

    def _trial_view(self, running: RunningTrial) -> TrialView:
        trial = running.trial
        stopping = trial.stop_asked or self.interrupts.requested
        return TrialView(
            number=trial.number,
            point=in_words(self._point(trial)),
            steps=running.steps or 0,
            length=running.length,
            value=trial.last.metrics[self.plan.experiment.metric] if trial.last else None,
            state="stopping" if stopping else "starting" if running.steps is None else "running",
        )
