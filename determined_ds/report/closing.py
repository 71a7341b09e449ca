"""The block at the end of a run, to be pasted into a message: what came of it, and what can be done with it."""

from __future__ import annotations

import itertools
import shlex
import statistics
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.files import written_by
from determined_ds.checkpoints.retention import as_number
from determined_ds.documents.document import get_path
from determined_ds.memory.units import format_bytes
from determined_ds.report.numbers import count, duration, percent, rate, short_number, short_span
from determined_ds.report.state import LOSS, TRAINING, VALIDATION, RunState, metric_of
from determined_ds.rundir.records import COMPLETED, Launch, RecordedRun
from determined_ds.rundir.run_dir import short

COLUMNS, LABEL = 80, 12
UNEVEN = 0.15  # of the time, beyond a pipeline's own bubble, from which its stages are badly uneven


def closing_block(run: RecordedRun, *, columns: int = COLUMNS) -> list[str]:
    """The lines; none where nothing is known of a training.

    Args:
        run: As its directory records it.
        columns: To wrap at; commands are not wrapped, so that they can be pasted.
    """
    if not run.of_group(TRAINING) and not run.of_group(VALIDATION):
        return []
    lines = textwrap.wrap(_title(run), columns, subsequent_indent="  ", break_long_words=False)
    for label, words in _facts(run):
        lines += textwrap.wrap(
            words,
            columns,
            initial_indent=f"  {label:<{LABEL}}",
            subsequent_indent=" " * (LABEL + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [*lines, *(f"  {label:<{LABEL}}{command}" for label, command in _commands(run))]


def _title(run: RecordedRun) -> str:
    total, result = RunState.of_config(run.config).total, run.result
    steps = [record["steps_completed"] for record in run.records]
    batches = max([*steps, 0 if result is None else result.steps_completed])
    status = "training" if result is None and run.is_running else "ended" if result is None else result.status
    title = f"{run.name}: {status}, {batches:,}{f' of {total:,}' if total else ''} batches"
    if result is not None and result.reason:
        title += f"; {result.cause}: {result.reason}" if result.cause else f"; {result.reason}"
    return title


def _facts(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Label and words; those without words take no line."""
    training, launch = run.of_group(TRAINING), run.launches[-1] if run.launches else None

    def reported(*names: str) -> list[float]:
        values = (metric_of(record["metrics"], *names) for record in training)
        return [value for value in values if value is not None]

    yield "damaged", "; ".join(run.damaged)
    losses = [short_number(loss) for loss in reported(*LOSS)]
    yield "loss", " -> ".join([losses[0], losses[-1]][-len(losses) :]) if losses else ""

    state = RunState.of_config(run.config)
    for record in run.of_group(VALIDATION):
        state.take(VALIDATION, record["steps_completed"], record["metrics"])
    last, best = state.validation, state.best
    if last is not None:
        shown = best or last  # the last one, where nothing says which is the best
        words = (
            f"{shown.name} {short_number(shown.value)} at batch {shown.batch:,}{', the best' if best else ''}"
        )
        later = f"; {short_number(last.value)} at batch {last.batch:,}" if shown is not last else ""
        yield "validation", words + later
    yield "time", _time(run)

    most, least = reported("peak_memory_gib"), reported("peak_memory_gib_min")
    if most:
        took = f"{short_span(max(least or most), max(most))} GiB a rank at most"
        on_cpu = launch is not None and launch.accelerator == "cpu"
        what, *keys = "model states", "model_states_bytes"
        if on_cpu:  # not all of it: of a buffer only what was written to is resident
            took, keys = f"{took}, as a process", [*keys, "host_bytes"]
        elif run.memory.get("has_activations"):
            what, *keys = "all", "total_bytes"
        expected = round(sum(as_number(run.memory.get(key)) or 0 for key in keys))
        yield "memory", took + (f"; {what} estimated at {format_bytes(expected)}" if expected else "")

    bubbles, counted = (
        reported("bubble"),
        metric_of(training[-1]["metrics"], "bubble_ideal") if training else None,
    )
    if bubbles and counted is not None:
        waits = statistics.median(bubbles[1:] or bubbles)  # the first report aside
        words = f"{percent(waits)} of the time; {percent(counted)} by the schedule alone"
        measured = get_path(run.config, ("hyperparameters", "partition_method")) == "measured"
        if waits > counted + UNEVEN and not measured:
            words += "; the stages are uneven: try hyperparameters.partition_method: measured"
        yield "bubble", words
    if launch is not None:
        yield "strategy", _strategy(launch)
        yield "offload", _offload(launch)
        yield "seed", str(launch.trial_seed)
    yield "run dir", short(run.path)
    if run.checkpoints:
        newest = run.checkpoints[0]
        yield "checkpoint", f"batch {newest.steps_completed:,}, {newest.uuid}"


def _time(run: RecordedRun) -> str:
    """Of all launches, each from its start to its last report; throughput of the last one, its first report aside."""
    spent, starts = 0.0, [launch.time for launch in run.launches]
    times = [record["time"] for record in run.records if isinstance(record.get("time"), (int, float))]
    for start, following in itertools.pairwise([*starts, float("inf")]):
        spent += max((time - start for time in times if start <= time < following), default=0.0)
    words = [duration(spent if spent < 10 else round(spent))] if spent else []
    late = [each for each in run.of_group(TRAINING) if not starts or each.get("time", 0) >= starts[-1]]
    for unit in ("samples", "tokens"):
        rates = (metric_of(record["metrics"], f"{unit}_per_second") for record in late)
        found = [value for value in rates if value is not None]
        if found:
            words.append(rate(statistics.median(found[1:] or found), unit))
    return ", ".join(words)


def _strategy(launch: Launch) -> str:
    words = [launch.strategy]
    if launch.ds_config:
        on = (name for name in ("bf16", "fp16") if get_path(launch.ds_config, (name, "enabled")) is True)
        words.append(next(on, "fp32"))
    words.append(f"{count(launch.slots, 'slot')} on {launch.accelerator}")
    words += [f"{launch.machines} machines"] if launch.machines > 1 else []
    if launch.global_batch_size:
        parts = f"{launch.micro_batch_size} x {launch.accumulation} x {launch.replicas}"
        words.append(f"batch {launch.global_batch_size} = {parts}")
    return ", ".join(filter(None, words))


def _offload(launch: Launch) -> str:
    if not launch.ds_config:
        return ""
    what = {"offload_optimizer": "the optimizer", "offload_param": "the parameters"}
    found = {
        words: get_path(launch.ds_config, ("zero_optimization", key, "device")) for key, words in what.items()
    }
    return ", ".join(f"{words} to {to}" for words, to in found.items() if to not in (None, "none")) or "none"


def _commands(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """To continue, to export, to look at it; none that is known to fail."""
    result, there = run.result, shlex.quote(short(run.path))
    if run.resume:
        yield "resume", run.resume
    elif result is not None and result.status == COMPLETED and run.checkpoints:
        yield from _longer(run, result.continued_by)
    if run.checkpoints and any(run.checkpoints[0].path.glob("model0/*")):  # those of a script have none
        which = "best" if (Path(run.path) / "best").exists() else "last"
        yield "export", f"det-ds checkpoint export {which} --run-dir {there} --to safetensors"
    yield "report", f"det-ds report {there} --open"


def _longer(run: RecordedRun, command: str | None) -> Iterator[tuple[str, str]]:
    """The command that trains as long again; none where the experiment does not state its length in a number."""
    length: Any = get_path(run.config, ("hyperparameters", "fit", "max_length"))
    if not command or not command.startswith("det-ds") or not isinstance(length, Mapping):
        return
    unit = next((unit for unit in ("batches", "epochs") if isinstance(length.get(unit), int)), None)
    if unit is None:
        return
    newest = run.checkpoints[0].path
    schedule, is_fixed = written_by(newest).get("schedule_by_length") or ("", False)
    if is_fixed:
        words = shlex.split(command)  # det-ds run EXPERIMENT CONTEXT --run-dir ...
        anew = [*words[:4], "--set", f"searcher.source_checkpoint_uuid={short(newest)}"]
        yield "schedule", f"{schedule} cannot be made longer; from the weights, with its rate from the start:"
        yield "new run", shlex.join(anew)
        return
    twice = 2 * length[unit]
    if schedule:
        yield "schedule", f"{schedule} is computed anew over {twice:,} {unit}: the rate changes at once"
    yield "longer", f"{command} --set hyperparameters.fit.max_length.{unit}={twice}"
