"""The block at the end of a run, to be pasted into a message: what came of it, and what can be done with it."""

from __future__ import annotations

import shlex
import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path

from determined_ds.documents.document import get_path
from determined_ds.report.numbers import duration, percent, rate, short_number, short_span
from determined_ds.report.runs import RUNNING, RunView, trained_on
from determined_ds.report.state import TRAINING, VALIDATION
from determined_ds.rundir.records import COMPLETED, RecordedRun
from determined_ds.rundir.run_dir import short

COLUMNS, LABEL = 80, 12


def closing_block(run: RecordedRun) -> list[str]:
    """The lines; none where nothing is known of a training. Commands are not wrapped, so that they can be pasted.

    Args:
        run: As its directory records it.
    """
    if not run.of_group(TRAINING) and not run.of_group(VALIDATION):
        return []
    shown, result = RunView(run), run.result
    status = "training" if shown.status == RUNNING else "ended" if result is None else result.status
    planned = f" of {shown.planned:,}" if shown.planned else ""
    title = f"{run.name}: {status}, {shown.steps:,}{planned} batches"
    if result is not None and result.reason:
        title += f"; {result.cause}: {result.reason}" if result.cause else f"; {result.reason}"
    how = {"width": COLUMNS, "break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(title, subsequent_indent="  ", **how)  # type: ignore[arg-type]
    for label, words in _facts(shown):
        first, further = f"  {label:<{LABEL}}", " " * (LABEL + 2)
        lines += textwrap.wrap(words, initial_indent=first, subsequent_indent=further, **how)  # type: ignore[arg-type]
    return [*lines, *(f"  {label:<{LABEL}}{command}" for label, command in _commands(run))]


def _facts(shown: RunView) -> Iterator[tuple[str, str]]:
    """Label and words; those without words take no line."""
    run, figures = shown.run, shown.figures
    yield "loss", " -> ".join(map(short_number, shown.losses[:1] + shown.losses[1:][-1:]))
    if curve := shown.curves.get(f"{VALIDATION}/{shown.metric}"):
        last = f"{short_number(curve.values[-1])} at batch {curve.steps[-1]:,}"
        words = f"{shown.metric} {last}"
        if best := shown.best:
            words = f"{shown.metric} {short_number(best.value)} at batch {best.steps:,}, the best"
            words += f"; {last}" if best.steps != curve.steps[-1] else ""
        yield "validation", words
    times = [duration(figures["seconds"])] if figures["seconds"] is not None else []
    for unit in ("samples", "tokens"):
        if (value := figures[f"{unit}_per_second"]) is not None:
            times.append(rate(value, unit))
    yield "time", ", ".join(times)
    if (most := figures["peak_memory_gib"]) is not None:
        least = max(shown.training("peak_memory_gib_min"), default=most)
        yield "memory", f"{short_span(least, most)} GiB a rank at most"
    if (bubbles := shown.training("bubble")) and (counted := shown.training("bubble_ideal")):
        waits = statistics.median(bubbles[1:] or bubbles)  # the first report aside
        yield "bubble", f"{percent(waits)} of the time; {percent(counted[-1])} by the schedule alone"
    if shown.launch is not None:
        yield "strategy", trained_on(shown.launch)
        yield "seed", str(shown.launch.trial_seed)
    yield "run dir", short(run.path)
    if run.checkpoints:
        yield "checkpoint", f"batch {run.checkpoints[0].steps_completed:,}, {run.checkpoints[0].uuid}"


def _commands(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """To continue, to train as long again, to export, to look at it."""
    result, there = run.result, shlex.quote(short(run.path))
    if run.resume:
        yield "resume", run.resume
    elif result is not None and result.status == COMPLETED and run.checkpoints and result.continued_by:
        for unit in ("batches", "epochs"):
            length = get_path(run.config, ("hyperparameters", "fit", "max_length", unit))
            if isinstance(length, int):
                longer = f"--set hyperparameters.fit.max_length.{unit}={2 * length}"
                yield "longer", f"{result.continued_by} {longer}"
    if run.checkpoints and any(run.checkpoints[0].path.glob("model0/*")):  # those of a script have none
        which = "best" if (Path(run.path) / "best").exists() else "last"
        yield "export", f"det-ds checkpoint export {which} --run-dir {there} --to safetensors"
    yield "report", f"det-ds report {there} --open"
