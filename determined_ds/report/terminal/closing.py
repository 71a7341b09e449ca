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
from determined_ds.report.terminal.panel import fields_of
from determined_ds.report.terminal.run_state import LOSS, TRAINING, VALIDATION, RunState
from determined_ds.report.terminal.short_numbers import in_time, joined, number, rate, span
from determined_ds.rundir.metrics_file import Record
from determined_ds.rundir.records import COMPLETED, Launch, RecordedRun
from determined_ds.rundir.run_dir import short

COLUMNS, LABEL = 80, 12
UNITS = ("samples", "tokens")


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
        if words:
            lines += _wrapped(label, words, columns)
    return [*lines, *(f"  {label:<{LABEL}}{command}" for label, command in _commands(run))]


def _wrapped(label: str, words: str, columns: int) -> list[str]:
    first, after = f"  {label:<{LABEL}}", " " * (LABEL + 2)
    return textwrap.wrap(
        words,
        columns,
        initial_indent=first,
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _title(run: RecordedRun) -> str:
    total = fields_of(run.config)["total"]
    result = run.result
    steps = [record["steps_completed"] for record in run.records] + [
        0 if result is None else result.steps_completed
    ]
    batches, of = max(steps), f" of {total:,}" if total else ""
    status = "training" if result is None and run.is_running else "ended" if result is None else result.status
    title = f"{run.name}: {status}, {batches:,}{of} batches"
    if result is not None and result.reason:
        title += f"; {joined([result.cause or '', result.reason], ': ')}"
    return title


def _facts(run: RecordedRun) -> Iterator[tuple[str, str]]:
    training, launch = run.of_group(TRAINING), run.launches[-1] if run.launches else None
    yield "damaged", "; ".join(run.damaged)
    yield "loss", _loss(training)
    yield "validation", _validation(run)
    yield "time", _time(run)
    yield "memory", _memory(run, training)
    yield "bubble", _bubble(training)
    if launch is not None:
        yield "strategy", _strategy(launch)
        yield "offload", _offload(launch)
        yield "seed", str(launch.trial_seed)
    yield "run dir", short(run.path)
    if run.checkpoints:
        newest = run.checkpoints[0]
        yield "checkpoint", f"batch {newest.steps_completed:,}, {newest.uuid}"


def _loss(training: list[Record]) -> str:
    values = [value for record in training if (value := _metric(record, LOSS)) is not None]
    if not values:
        return ""
    return f"{number(values[0])} -> {number(values[-1])}" if len(values) > 1 else number(values[0])


def _validation(run: RecordedRun) -> str:
    """The best one, or the last where nothing says which is."""
    known = fields_of(run.config)
    state = RunState(metric=known["metric"], smaller_is_better=known["smaller_is_better"])
    for record in run.of_group(VALIDATION):
        state.take(VALIDATION, record["steps_completed"], record["metrics"])
    last, best = state.validation, state.best
    if last is None:
        return ""
    if best is None:
        return f"{last.name} {number(last.value)} at batch {last.batch:,}"
    later = "" if best is last else f"; {number(last.value)} at batch {last.batch:,}"
    return f"{best.name} {number(best.value)} at batch {best.batch:,}, the best{later}"


def _time(run: RecordedRun) -> str:
    """Of all launches, each from its start to its last report; throughput of the last one, its first report aside."""
    spent, starts = 0.0, [launch.time for launch in run.launches]
    times = [record["time"] for record in run.records if isinstance(record.get("time"), (int, float))]
    for start, following in itertools.pairwise([*starts, float("inf")]):
        spent += max((time - start for time in times if start <= time < following), default=0.0)
    training = run.of_group(TRAINING)
    late = [record for record in training if record.get("time", 0) >= starts[-1]] if starts else training
    words = [in_time(spent)] if spent else []
    for unit in UNITS:
        found = [value for record in late if (value := _metric(record, (f"{unit}_per_second",))) is not None]
        if found:
            words.append(rate(statistics.median(found[1:] or found), unit))
    return joined(words)


def _memory(run: RecordedRun, training: list[Record]) -> str:
    """What ranks took, beside what the memory model expects of the rank with most."""
    most = [value for record in training if (value := _metric(record, ("peak_memory_gib",))) is not None]
    least = [value for record in training if (value := _metric(record, ("peak_memory_gib_min",))) is not None]
    if not most:
        return ""
    took = f"{span(max(least or most), max(most), 'GiB')} a rank at most"
    if run.launches and run.launches[-1].accelerator == "cpu":
        return joined(
            [f"{took}, as a process", _expected(run, "model states", "model_states_bytes", "host_bytes")],
            "; ",
        )
    if run.memory.get("has_activations"):
        return joined([took, _expected(run, "all", "total_bytes")], "; ")
    return joined([took, _expected(run, "model states", "model_states_bytes")], "; ")


def _bubble(training: list[Record]) -> str:
    """What stages of a pipeline waited, beside what they wait by their schedule alone; its first report aside."""
    found = [value for record in training if (value := _metric(record, ("bubble",))) is not None]
    counted = _metric(training[-1], ("bubble_ideal",)) if training else None
    if not found or counted is None:
        return ""
    return f"{statistics.median(found[1:] or found):.1%} of the time; {counted:.1%} by the schedule alone"


def _expected(run: RecordedRun, what: str, *keys: str) -> str:
    """What the memory model expects. On a CPU not all of it: of a buffer only what was written to is resident."""
    expected = sum(as_number(run.memory.get(key)) or 0 for key in keys)
    return f"{what} estimated at {format_bytes(round(expected))}" if expected else ""


def _strategy(launch: Launch) -> str:
    slots = f"{launch.slots} slot{'s' if launch.slots != 1 else ''} on {launch.accelerator}"
    machines = f"{launch.machines} machines" if launch.machines > 1 else ""
    batch = ""
    if launch.global_batch_size:
        parts = f"{launch.micro_batch_size} x {launch.accumulation} x {launch.replicas}"
        batch = f"batch {launch.global_batch_size} = {parts}"
    return joined([launch.strategy, _precision(launch), slots, machines, batch])


def _precision(launch: Launch) -> str:
    if not launch.ds_config:
        return ""
    on = (name for name in ("bf16", "fp16") if get_path(launch.ds_config, (name, "enabled")) is True)
    return next(on, "fp32")


def _offload(launch: Launch) -> str:
    if not launch.ds_config:
        return ""
    what = {"offload_optimizer": "the optimizer", "offload_param": "the parameters"}
    found = {
        words: get_path(launch.ds_config, ("zero_optimization", key, "device")) for key, words in what.items()
    }
    moved = [f"{words} to {device}" for words, device in found.items() if device not in (None, "none")]
    return joined(moved) or "none"


def _commands(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """To continue, to export, to look at it; none that is known to fail."""
    result, there = run.result, shlex.quote(short(run.path))
    if run.resume:
        yield "resume", run.resume
    elif result is not None and result.status == COMPLETED and run.checkpoints:
        yield from _longer(run, result.continued_by)
    if run.checkpoints and any(
        run.checkpoints[0].path.glob("model0/*")
    ):  # the checkpoints of a script have none
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


def _metric(record: Record, names: tuple[str, ...]) -> float | None:
    numbers = (as_number(record["metrics"].get(name)) for name in names)
    return next((value for value in numbers if value is not None), None)
