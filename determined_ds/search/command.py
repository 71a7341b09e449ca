"""A search from its plan to its results, and to the exit code of the command."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from determined_ds.documents.files import write_files
from determined_ds.errors import EXIT_TRAINING_FAILED
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.experiment.space import HALVING, brackets, rungs
from determined_ds.launch.interrupts import Interrupts
from determined_ds.rundir.run_dir import RunDir, short
from determined_ds.rundir.run_lock import RunLock
from determined_ds.search.display import make_display
from determined_ds.search.local_search import LocalSearch
from determined_ds.search.outcome import (
    best_trial,
    draw_results,
    reasons,
    resume_command,
    summary,
    write_results,
)
from determined_ds.search.setup import SearchPlan, digest_of
from determined_ds.search.study import COMPLETED, STOPPED, STUDY, SearchStudy

ON_INTERRUPT = "the trials that run finish their batch and write a checkpoint"


def run_search(plan: SearchPlan) -> int:
    """Run a search, report it on the terminal, and write its results.

    Returns:
        The exit code: 0, also when interrupted once; 1 where no trial has trained; 128 + the signal's number
        after a second interrupt.

    Raises:
        ConfigError: the search in the run directory cannot be resumed.
    """
    with Interrupts(ON_INTERRUPT) as interrupts:
        for line in header(plan):
            print(line)
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        sys.stdout.flush()
        with RunLock(plan.run_dir):
            path = RunDir(plan.run_dir).experiment
            text = stored_yaml(plan.experiment.config)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_files({path: text}, overwrite=True)
            study = SearchStudy(
                plan.run_dir / STUDY, metric=plan.experiment.metric, search=digest_of(plan.experiment.config)
            )
            return _run(plan, study, interrupts)


def _run(plan: SearchPlan, study: SearchStudy, interrupts: Interrupts) -> int:
    display = make_display()
    search = LocalSearch(plan=plan, study=study, display=display, interrupts=interrupts)
    try:
        search.run()
    finally:
        display.close()
    trials = study.trials
    write_results(plan, search.course, trials)
    if not search.is_over:
        print(f"resume with: {resume_command(plan)}", file=sys.stderr)
        return interrupts.exit_code
    pictures = draw_results(plan, trials)
    for line in summary(plan, trials, pictures):
        print(line)
    why = reasons(trials)
    for line in why:
        print(f"  {line}")
    sys.stdout.flush()
    has_trained = any(trial.status in (COMPLETED, STOPPED) for trial in trials)
    has_metric = best_trial(trials, plan.experiment.smaller_is_better) is not None
    if search.gave_up:
        print(f"{'warning' if has_trained else 'error'}: gave up: {search.gave_up}", file=sys.stderr)
    elif not has_trained:
        print("error: every trial was dropped or failed", file=sys.stderr)
    elif not has_metric:
        name = plan.experiment.metric
        print(f"error: no trial has reported a finite {name}, by which the best is chosen", file=sys.stderr)
    return 0 if has_trained and has_metric else EXIT_TRAINING_FAILED


def header(plan: SearchPlan) -> Iterator[str]:
    """What will be searched, in a few lines for people."""
    experiment, machine, searcher = plan.experiment, plan.machine, plan.searcher
    axes = experiment.space.axes
    over = f" over {_count(len(axes), 'hyperparameter')}" if axes else ""
    yield f"{experiment.name}: {searcher['name']}{over}, {experiment.entrypoint}"
    better = "the smaller the better" if experiment.smaller_is_better else "the larger the better"
    yield f"  search     {_trials(plan)} by {experiment.metric}, {better}"
    at_once = "one trial at a time" if machine.at_once == 1 else f"{machine.at_once} trials at a time"
    yield (
        f"  slots      {machine.slots_per_trial} a trial, {machine.slots} on this machine"
        f" ({machine.accelerator.name}): {at_once}"
    )
    yield f"  run dir    {short(plan.run_dir)}"


def _trials(plan: SearchPlan) -> str:
    searcher = plan.searcher
    if searcher["name"] == "single":
        return "1 trial"
    if searcher["name"] == "grid":
        return _count(plan.experiment.space.size or 0, "point")
    trials = _count(int(searcher["max_trials"]), "trial")
    if searcher["name"] not in HALVING:
        return trials
    judged = ", ".join(map(str, rungs(searcher)))
    num_brackets = len(brackets(searcher))
    several = f" in {num_brackets} brackets" if num_brackets > 1 else ""
    return f"{trials}{several}, judged at {judged} {searcher['time_metric']}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
