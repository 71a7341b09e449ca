"""A run on a terminal: how it is followed, and the block below it, to be pasted into a message: what came of it, and
what can be done with it. Loads no torch.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.checkpoints.files import as_number, checkpoints_in
from determined_ds.documents.document import get_path
from determined_ds.report.header import wrap
from determined_ds.report.live import STARTING, TRAINING, VALIDATION, DrawnPanel, RunState, report_line
from determined_ds.report.numbers import duration, percent, rate, short_number, short_span
from determined_ds.report.runs import RUNNING, RunView, trained_on
from determined_ds.rundir.metrics_file import MetricsReader, Record
from determined_ds.rundir.records import COMPLETED, RecordedRun, read_run
from determined_ds.rundir.recoveries import goodput, recoveries_of
from determined_ds.rundir.run_dir import RunDir, is_held, short

if TYPE_CHECKING:
    from rich.console import Console

LOOK_EVERY_S = 0.5
LABEL = 12


def follow(path: Path, console: Console) -> None:
    """Show a run until it ends: the panel on a terminal, a line a report elsewhere; then what came of it.

    Args:
        path: The run directory.
        console: Where to.

    Raises:
        ConfigError: it is not a run directory.
    """

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    run = read_run(path)
    launch = run.launches[-1] if run.launches else None
    show("  ".join([run.name, *([trained_on(run)] if launch else []), short(run.path)]))
    looks = _looks(path, since=launch.time if launch else 0.0)
    if console.is_terminal and not console.is_dumb_terminal:
        panel = DrawnPanel(console)
        panel.start()
        try:
            for panel.state, _ in looks:
                panel.refresh()
        finally:
            panel.stop()
        panel.state = replace(panel.state, status="ended", detail="")
        console.print(panel.drawn())
    else:
        for state, records in looks:
            for record in records:
                if record["group"] in (TRAINING, VALIDATION):
                    at, digits = record["steps_completed"], len(str(state.total or 1))
                    show(report_line(record["group"], at, state.total, record["metrics"], digits=digits))
    for line in closing_block(read_run(path)):
        show(line)


def _looks(path: Path, since: float) -> Iterator[tuple[RunState, list[Record]]]:
    """What is known of a run and what is new, again and again, until all is read that an ended run has left.

    Speeds are not those of a launch earlier than ``since``.
    """
    there = RunDir(path)
    reader, is_running, state = MetricsReader(there.metrics), True, RunState.of_config(read_run(path).config)
    while is_running:
        is_running = is_held(there.path)  # first: what it has written before its end is read below
        new = reader.new_records()
        if reader.began_anew:  # it went back to a checkpoint
            state, since = RunState.of_config(read_run(path).config), time.time()
        for record in new:
            state.take(record["group"], record["steps_completed"], record["metrics"])
            at = as_number(record.get("time"))
            if at is None or at >= since:
                state.status = TRAINING
            if at is not None and at >= since:
                state.at(record["steps_completed"], at)
        state.detail = ""
        if state.status == STARTING and is_running and since:
            ago = duration(max(0, round(time.time() - since)))
            state.detail = f"since {ago}: it loads its code, model and data; nothing is reported yet"
        with contextlib.suppress(OSError):  # of a checkpoint that is deleted meanwhile
            if found := checkpoints_in(there.checkpoints):
                state.checkpoint = found[0].steps_completed
                state.checkpoint_time = found[0].path.stat().st_mtime
        yield state, new
        time.sleep(LOOK_EVERY_S if is_running else 0)


def closing_block(run: RecordedRun) -> list[str]:
    """The lines; none where nothing is known of a training. Commands are not wrapped, so that they can be pasted.

    Args:
        run: As its directory records it.
    """
    if not run.of_group(TRAINING) and not run.of_group(VALIDATION):
        return []
    shown, result = RunView(run), run.result
    figures, losses, best = shown.figures, shown.losses, shown.best
    # Its launcher still has it when it writes the result.
    status = result.status if result else "training" if shown.status == RUNNING else "ended"
    is_beyond = shown.planned is not None and shown.steps > shown.planned  # resumed with a shorter max_length
    planned = f" of {shown.planned:,}" if shown.planned and not is_beyond else ""
    title = f"{run.name}: {status}, {shown.steps:,}{planned} batches"
    title += f"; nothing left to train: max_length is {shown.planned:,}" if is_beyond else ""
    if result is not None and result.reason:
        title += f"; {result.cause}: {result.reason}" if result.cause else f"; {result.reason}"

    facts = {"loss": " -> ".join(map(short_number, losses[:1] + losses[1:][-1:]))}
    if curve := shown.curves.get(f"{VALIDATION}/{shown.metric}"):
        words = last = f"{short_number(curve.values[-1])} at batch {curve.steps[-1]:,}"
        if best is not None:
            words = f"{short_number(best.value)} at batch {best.steps:,}, the best"
            words += f"; {last}" if best.steps != curve.steps[-1] else ""
        facts["validation"] = f"{shown.metric} {words}"
    times = [duration(figures["seconds"])] if figures["seconds"] is not None else []
    speeds = {unit: figures[f"{unit}_per_second"] for unit in ("samples", "tokens")}
    facts["time"] = ", ".join([*times, *(rate(at, unit) for unit, at in speeds.items() if at is not None)])
    if (most := figures["peak_memory_gib"]) is not None:
        least = max(shown.training("peak_memory_gib_min"), default=most)
        facts["memory"] = f"{short_span(least, most)} GiB a rank at most"
    if (bubbles := shown.training("bubble")) and (counted := shown.training("bubble_ideal")):
        waits = statistics.median(bubbles[1:] or bubbles)  # the first report aside
        facts["bubble"] = f"{percent(waits)} of the time; {percent(counted[-1])} by the schedule alone"
    recoveries = recoveries_of(run)
    for number, each in enumerate(recoveries):
        lost = f"{each.steps_lost:,} batches and {duration(each.seconds_lost)} lost"
        facts["recovered" + " " * number] = f"{each.why}: {each.done}; {lost}"
    if recoveries and (share := goodput(run)) is not None:
        facts["goodput"] = f"{percent(share)} of the time was training that counted"
    if shown.launch is not None:
        facts |= {"strategy": trained_on(run), "seed": str(shown.launch.trial_seed)}
    facts["run dir"] = short(run.path)
    newest = run.checkpoints[0] if run.checkpoints else None
    facts["checkpoint"] = f"batch {newest.steps_completed:,}, {newest.uuid}" if newest else ""

    there, commands = shlex.quote(short(run.path)), dict[str, str]()
    if run.resume:
        commands["resume"] = run.resume
    elif newest and result is not None and result.status == COMPLETED and result.continued_by:
        epochs = (as_number(each["metrics"].get("epochs")) for each in run.of_group(VALIDATION))
        trained = {
            "batches": shown.steps,
            "epochs": max((math.ceil(each or 0) for each in epochs), default=0),
        }
        for unit, num in trained.items():  # to train as long again
            length = get_path(run.config, ("hyperparameters", "fit", "max_length", unit))
            if isinstance(length, int):
                longer = f"--set hyperparameters.fit.max_length.{unit}={2 * max(length, num)}"
                commands["longer"] = f"{result.continued_by} {longer}"
    if newest and any(newest.path.glob("model0/*")):  # those of a script have none
        which = "best" if (Path(run.path) / "best").exists() else "last"
        commands["export"] = f"det-ds checkpoint export {which} --run-dir {there} --to safetensors"
    commands["report"] = f"det-ds report {there}"

    lines = wrap(title, subsequent_indent="  ")
    for label, words in facts.items():
        first, further = f"  {label.rstrip():<{LABEL}}", " " * (LABEL + 2)
        lines += wrap(words, initial_indent=first, subsequent_indent=further) if words else []
    return [*lines, *(f"  {label:<{LABEL}}{words}" for label, words in commands.items())]
