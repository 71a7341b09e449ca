"""A run on a terminal: what was decided above it, what came of it below it, and how it is followed meanwhile.

The first is in the log of a cluster's task, too. The last block is to be pasted into a message: what came of the run,
and what can be done with it. Loads no torch.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import statistics
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.config.layout import BATCH_KEYS, Accelerator
from determined_ds.config.params import Duration
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import dotted, get_path
from determined_ds.errors import shown as shown_value
from determined_ds.report.numbers import duration, percent, rate, short_number, short_span
from determined_ds.report.runs import RUNNING, RunView, trained_on
from determined_ds.report.state import STARTING, TRAINING, VALIDATION, RunState, report_line
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.metrics_file import MetricsReader, Record
from determined_ds.rundir.records import COMPLETED, RecordedRun, read_run, versions
from determined_ds.rundir.run_dir import RunDir, is_held, short

if TYPE_CHECKING:
    from rich.console import Console

LOOK_EVERY_S = 0.5
LABEL = 12
BY_SCRIPT = "             as the experiment states it; the script decides whether it goes by it"
_wrap = functools.partial(textwrap.wrap, width=80, break_long_words=False, break_on_hyphens=False)


def decided(name: str, runs: str, resolved: ResolvedConfig, *, by_script: bool = False) -> list[str]:
    """The lines above a run.

    Args:
        name: Of the experiment.
        runs: What it runs: ``MODULE:CLASS``, or a script.
        resolved: What was decided.
        by_script: Whether a script runs, which may go by something else than the experiment states.
    """
    topology, batch, strategy = resolved.topology, resolved.batch, resolved.strategy
    layout = count(topology.data_parallel_world_size, "replica")
    for degree, what in (
        (topology.pipe_parallel_size, "pipeline stages"),
        (topology.model_parallel_size, "model-parallel"),
        (topology.sequence_parallel_size, "sequence-parallel"),
    ):
        layout += f" x {degree} {what}" if degree > 1 else ""
    lines = [
        *_wrap(f"{name}: {runs}", subsequent_indent="    "),
        f"  slots      {topology.slots} on {resolved.accelerator.name}: {layout}, ZeRO {resolved.zero_stage}",
        f"  batch      {batch.global_batch_size} = micro-batch {batch.micro_batch_size}"
        f" x {batch.accumulation} accumulated x {count(batch.replicas, 'replica')}",
    ]
    if strategy.pipe_parallel_size > 1:  # what a pipeline's measured bubble is to be compared with
        chunks = f", {strategy.pipe_chunks} chunks a rank" if strategy.pipe_chunks > 1 else ""
        bubble = f"a bubble of {strategy.bubble:.4f} by its order alone"
        lines.append(f"  schedule   {strategy.pipe_schedule}{chunks}: {bubble}")
    filled = []  # what the DeepSpeed JSON left open, except the batch sizes, which have their own line
    for path in resolved.filled:
        if path[0] not in BATCH_KEYS or path[1:]:
            value = resolved.ds.get(path)
            filled.append(
                f"{dotted(path)} {f'{value:.6g}' if isinstance(value, float) else shown_value(value)}"
            )
    lines += _listed("filled in", filled)
    lines += [BY_SCRIPT] if by_script else []
    period = resolved.fit.checkpoint_period
    if isinstance(period, Duration):
        after = f"after the first batch that ends {period.value:g} {period.unit} after the last one"
        lines.append(f"  checkpoint {after}")
    return [*lines, *_versions()]


def undecided(name: str, runs: str, slots: int, accelerator: Accelerator, *, by: str) -> list[str]:
    """The lines above a run, where the configuration leaves the batch to the code.

    Args:
        name: Of the experiment.
        runs: What it runs.
        slots: Ranks in all.
        accelerator: What they compute on.
        by: Whose code decides it: ``the script`` or ``the trial``.
    """
    own = [f"  slots      {slots} on {accelerator.name}", f"  batch      decided by {by}"]
    return [*_wrap(f"{name}: {runs}", subsequent_indent="    "), *own, *_versions()]


def _versions() -> list[str]:
    return _listed("versions", [f"{name} {version}" for name, version in versions(more=False).items()])


def _listed(title: str, entries: list[str]) -> list[str]:
    """Entries beside a title; no line where there are none."""
    return _wrap(", ".join(entries), initial_indent=f"  {title:<10} ", subsequent_indent=" " * 13)


# ------------------------------------------------------------------------------------------- beside it and below it


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
    show("  ".join([run.name, *([trained_on(launch)] if launch else []), short(run.path)]))
    looks = _looks(path, since=launch.time if launch else 0.0)
    if console.is_terminal and not console.is_dumb_terminal:
        from determined_ds.report.panel import DrawnPanel

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
    reader, is_running = MetricsReader(there.metrics), True
    state = RunState.of_config(read_run(path).config, STARTING)
    while is_running:
        is_running = is_held(there.path)  # first: what it has written before its end is read below
        new = reader.new_records()
        if reader.began_anew:  # it went back to a checkpoint
            state, since = RunState.of_config(read_run(path).config, STARTING), time.time()
        for record in new:
            state.take(record["group"], record["steps_completed"], record["metrics"])
            at = record.get("time")
            if not isinstance(at, (int, float)):
                state.status = TRAINING
            elif at >= since:
                state.status = TRAINING
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
    is_running = (
        result is None and shown.status == RUNNING
    )  # its launcher still has it when it writes the result
    status = "training" if is_running else "ended" if result is None else result.status
    planned = f" of {shown.planned:,}" if shown.planned else ""
    title = f"{run.name}: {status}, {shown.steps:,}{planned} batches"
    if result is not None and result.reason:
        title += f"; {result.cause}: {result.reason}" if result.cause else f"; {result.reason}"
    lines = _wrap(title, subsequent_indent="  ")
    for label, words in _facts(shown):
        first, further = f"  {label:<{LABEL}}", " " * (LABEL + 2)
        lines += _wrap(words, initial_indent=first, subsequent_indent=further)
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
