"""What a search leaves behind: the best point as an experiment that reruns it, a table, and pictures."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from determined_ds.documents.files import write_files
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.rundir.run_dir import RunDir, short
from determined_ds.search.course import Course
from determined_ds.search.display import in_words
from determined_ds.search.setup import SearchPlan
from determined_ds.search.study import DROPPED, FAILED, StudyTrial

BEST, RESULTS = "best.yaml", "results.csv"
HISTORY, PARALLEL = "history.png", "parallel_coordinates.png"
MOST_REASONS = 8


def best_trial(trials: Sequence[StudyTrial], smaller_is_better: bool) -> StudyTrial | None:
    """The trial with the best validation, the first of equals; None where none has validated."""
    sign = 1 if smaller_is_better else -1
    rated = [(best[1], trial) for trial in trials if (best := trial.best(smaller_is_better)) is not None]
    return min(rated, key=lambda item: (sign * item[0], item[1].number))[1] if rated else None


def write_results(plan: SearchPlan, course: Course, trials: Sequence[StudyTrial]) -> None:
    """Write ``best.yaml`` and ``results.csv``, whole or not at all, over those of an earlier time."""
    texts = {plan.run_dir / RESULTS: table_of(plan, trials)}
    best = best_trial(trials, plan.experiment.smaller_is_better)
    if best is not None:
        texts[plan.run_dir / BEST] = best_yaml(plan, course, best)
    write_files(texts, overwrite=True)


def best_yaml(plan: SearchPlan, course: Course, trial: StudyTrial) -> str:
    """An experiment that trains the best point again, with its seed, and reaches its metric."""
    found = trial.best(plan.experiment.smaller_is_better)
    assert found is not None
    steps, value = found
    document = plan.trial_document(course.trials[trial.number].create)
    head = (
        f"# The best of {len(course.trials)} trials of {plan.experiment.name}: trial {trial.number},"
        f" {plan.experiment.metric} {value!r} after {steps} batches.\n"
        f"# {in_words(trial.point) or 'Nothing was searched.'}\n"
        f"# To train it again: {run_command(plan)}\n"
    )
    return head + stored_yaml(document.data)


def run_command(plan: SearchPlan) -> str:
    """The command that trains the best point again, as it was trained."""
    on_cpu = plan.machine.accelerator.name == "cpu"  # where sums depend on it
    threads = plan.machine.threads or os.environ.get("OMP_NUM_THREADS")
    words = [f"OMP_NUM_THREADS={threads}"] if threads and on_cpu else []
    words += ["det-ds", "run", short(plan.run_dir / BEST), short(plan.context_dir)]
    return shlex.join([*words, "--accelerator", plan.machine.accelerator.name])


def resume_command(plan: SearchPlan) -> str:
    """The command that resumes a search."""
    words = ["det-ds", "search", short(RunDir(plan.run_dir).experiment), short(plan.context_dir)]
    return shlex.join([*words, "--run-dir", short(plan.run_dir), "--resume", *plan.words])


def table_of(plan: SearchPlan, trials: Sequence[StudyTrial]) -> str:
    """All trials as CSV: what became of each, its best metric, and its point."""
    names = [axis.name for axis in plan.experiment.space.axes]
    metric = plan.experiment.metric
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["trial", "status", metric, "batches", "last_batch", "restarts", "seed", "started", "ended"]
    writer.writerow([*head, *names, "reason"])
    for trial in trials:
        steps, value = trial.best(plan.experiment.smaller_is_better) or ("", "")
        times = [
            moment.isoformat(timespec="seconds") if moment else "" for moment in (trial.started, trial.ended)
        ]
        last = max(trial.values, default="")
        row = [trial.number, trial.status, repr(value) if value != "" else "", steps, last]
        row += [trial.restarts, trial.seed, *times]
        writer.writerow([*row, *(trial.point.get(name) for name in names), trial.why])
    return text.getvalue()


def draw_results(plan: SearchPlan, trials: Sequence[StudyTrial]) -> list[Path]:
    """Draw the pictures. Returns those that there are: nothing is drawn of no metric, or of no hyperparameter."""
    experiment = plan.experiment
    if best_trial(trials, experiment.smaller_is_better) is None:
        return []
    from determined_ds.search import plots  # matplotlib takes a second to load

    subject = plots.Subject(
        title=experiment.name,
        metric=experiment.metric,
        smaller_is_better=experiment.smaller_is_better,
        trials=tuple(trials),
        axes=experiment.space.axes,
    )
    paths = [plan.run_dir / HISTORY]
    plots.draw_history(subject, paths[0])
    if experiment.space.axes:
        paths.append(plan.run_dir / PARALLEL)
        plots.draw_parallel_coordinates(subject, paths[1])
    return paths


def summary(plan: SearchPlan, trials: Sequence[StudyTrial], pictures: Sequence[Path]) -> list[str]:
    """How a search has ended, in a few lines for people."""
    counts = Counter(trial.status for trial in trials)
    lines = [
        "",
        f"{len(trials)} trials: " + ", ".join(f"{count} {status}" for status, count in counts.items()),
    ]
    best = best_trial(trials, plan.experiment.smaller_is_better)
    found = best.best(plan.experiment.smaller_is_better) if best else None
    if best is not None and found is not None:
        lines.append(
            f"best   trial {best.number}: {plan.experiment.metric} {found[1]:.6g} after {found[0]} batches"
        )
        if best.point:
            lines.append(f"       {in_words(best.point)}")
        lines.append(f"again  {run_command(plan)}")
    written = [plan.run_dir / RESULTS, *pictures]
    lines.append("see    " + ", ".join(short(path) for path in written))
    return lines


def reasons(trials: Sequence[StudyTrial]) -> list[str]:
    """Why trials were dropped or failed, each reason with the number of its trials, the most frequent first."""
    found = Counter((trial.status, trial.why) for trial in trials if trial.status in (DROPPED, FAILED))
    lines = [f"{count} {status}: {why}" for (status, why), count in found.most_common(MOST_REASONS)]
    if len(found) > MOST_REASONS:
        lines.append(f"and {len(found) - MOST_REASONS} other reasons, which {RESULTS} has")
    return lines
