"""The block at the end of a run, to be pasted into a message: what came of it, and what can be done with it."""

from __future__ import annotations

import itertools
import shlex
import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path

from determined_ds.documents.document import get_path
from determined_ds.report.numbers import count, duration, percent, rate, short_number, short_span
from determined_ds.report.state import LOSS, TRAINING, VALIDATION, RunState, metric_of
from determined_ds.rundir.records import COMPLETED, RecordedRun
from determined_ds.rundir.run_dir import short

COLUMNS, LABEL = 80, 12
UNEVEN = 0.15  # of the time, beyond a pipeline's own bubble, from which its stages are badly uneven


def closing_block(run: RecordedRun) -> list[str]:
    """The lines; none where nothing is known of a training. Commands are not wrapped, so that they can be pasted.

    Args:
        run: As its directory records it.
    """
    if not run.of_group(TRAINING) and not run.of_group(VALIDATION):
        return []
    state, result = RunState.of_config(run.config), run.result
    for record in run.records:
        state.take(record["group"], record["steps_completed"], record["metrics"])
    batches = max(state.batch, 0 if result is None else result.steps_completed)
    status = "training" if result is None and run.is_running else "ended" if result is None else result.status
    title = f"{run.name}: {status}, {batches:,}{f' of {state.total:,}' if state.total else ''} batches"
    if result is not None and result.reason:
        title += f"; {result.cause}: {result.reason}" if result.cause else f"; {result.reason}"
    lines = textwrap.wrap(title, COLUMNS, subsequent_indent="  ", break_long_words=False)
    for label, words in _facts(run, state):
        lines += textwrap.wrap(
            words,
            COLUMNS,
            initial_indent=f"  {label:<{LABEL}}",
            subsequent_indent=" " * (LABEL + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [*lines, *(f"  {label:<{LABEL}}{command}" for label, command in _commands(run))]


def _facts(run: RecordedRun, state: RunState) -> Iterator[tuple[str, str]]:
    """Label and words; those without words take no line."""
    training, launch = run.of_group(TRAINING), run.launches[-1] if run.launches else None

    def reported(*names: str) -> list[float]:
        values = (metric_of(record["metrics"], *names) for record in training)
        return [value for value in values if value is not None]

    yield "damaged", "; ".join(run.damaged)
    losses = [short_number(loss) for loss in reported(*LOSS)]
    yield "loss", " -> ".join([losses[0], losses[-1]][-len(losses) :]) if losses else ""
    if (last := state.validation) is not None:
        shown = state.best or last  # the last one, where nothing says which is the best
        best = ", the best" if state.best else ""
        words = f"{shown.name} {short_number(shown.value)} at batch {shown.batch:,}{best}"
        later = f"; {short_number(last.value)} at batch {last.batch:,}" if shown is not last else ""
        yield "validation", words + later

    # Of all launches, each from its start to its last report; throughput of the last one, its first report aside.
    starts = [each.time for each in run.launches]
    times = [record["time"] for record in run.records if isinstance(record.get("time"), (int, float))]
    spent = sum(
        max((time - start for time in times if start <= time < following), default=0.0)
        for start, following in itertools.pairwise([*starts, float("inf")])
    )
    facts = [duration(spent if spent < 10 else round(spent))] if spent else []
    late = [each for each in training if not starts or each.get("time", 0) >= starts[-1]]
    for unit in ("samples", "tokens"):
        rates = (metric_of(record["metrics"], f"{unit}_per_second") for record in late)
        if found := [value for value in rates if value is not None]:
            facts.append(rate(statistics.median(found[1:] or found), unit))
    yield "time", ", ".join(facts)

    if most := reported("peak_memory_gib"):
        least = reported("peak_memory_gib_min") or most
        yield "memory", f"{short_span(max(least), max(most))} GiB a rank at most"
    counted = metric_of(training[-1]["metrics"], "bubble_ideal") if training else None
    if (bubbles := reported("bubble")) and counted is not None:
        waits = statistics.median(bubbles[1:] or bubbles)  # the first report aside
        words = f"{percent(waits)} of the time; {percent(counted)} by the schedule alone"
        measured = get_path(run.config, ("hyperparameters", "partition_method")) == "measured"
        if waits > counted + UNEVEN and not measured:
            words += "; the stages are uneven: try hyperparameters.partition_method: measured"
        yield "bubble", words
    if launch is not None:
        names = [launch.strategy]
        if launch.ds_config:
            on = (name for name in ("bf16", "fp16") if get_path(launch.ds_config, (name, "enabled")) is True)
            names.append(next(on, "fp32"))
        names.append(f"{count(launch.slots, 'slot')} on {launch.accelerator}")
        names += [f"{launch.machines} machines"] if launch.machines > 1 else []
        if launch.global_batch_size:
            parts = f"{launch.micro_batch_size} x {launch.accumulation} x {launch.replicas}"
            names.append(f"batch {launch.global_batch_size} = {parts}")
        yield "strategy", ", ".join(filter(None, names))
        yield "seed", str(launch.trial_seed)
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
                yield (
                    "longer",
                    f"{result.continued_by} --set hyperparameters.fit.max_length.{unit}={2 * length}",
                )
    if run.checkpoints and any(run.checkpoints[0].path.glob("model0/*")):  # those of a script have none
        which = "best" if (Path(run.path) / "best").exists() else "last"
        yield "export", f"det-ds checkpoint export {which} --run-dir {there} --to safetensors"
    yield "report", f"det-ds report {there} --open"
