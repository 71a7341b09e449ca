"""One variant measured in fresh processes: a row of numbers, or the reason why there are none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import model_states
from determined_ds.profile.record import traces_in
from determined_ds.report.results import (
    CANNOT_RUN,
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    STOPPED,
    Repetition,
    Row,
    read_row,
    write_row,
)
from determined_ds.rundir.records import INVALID, RunResult
from determined_ds.rundir.run_dir import STEP_GROUP, RunDir
from determined_ds.tune.variants import Variant

POLL_S = 0.25
# From the seconds of the steps so far: why to go no further, or None.
Watch = Callable[[Sequence[float]], str | None]


def measure(
    variant: Variant,
    *,
    context_dir: Path,
    run_dir: Path,
    accelerator: str,
    steps: int,
    warmup: int,
    interrupts: Interrupts,
    threads: int | None = None,
    watch: Watch | None = None,
    parts: int = 0,
) -> Row:
    """Run a variant for some steps, in processes of its own, and read what it measured.

    Args:
        variant: One that can run.
        context_dir: The folder with the code.
        run_dir: Where it writes; a measurement of the same experiment that is there already is taken instead.
        accelerator: ``cpu`` or ``cuda``.
        steps: Steps to measure.
        warmup: Steps before them.
        interrupts: Ends it.
        threads: Of each rank, on a CPU; as ``det-ds run`` has it, if None.
        watch: Looks at the steps as they come, and may cut it short as long as one is to come.
        parts: Further steps, not timed, that are taken apart.
    """
    assert variant.document is not None
    document = variant.document
    if (there := _known(variant, document, run_dir, steps, warmup)) is not None:
        return there
    arguments = ["--measure", str(steps), "--warmup", str(warmup), "--engine", variant.choice.engine]
    process = TrialProcess(
        experiment=document,
        context_dir=context_dir,
        run_dir=run_dir,
        accelerator=accelerator,
        arguments=[*arguments, *(["--parts", str(parts)] if parts else [])],
        environment={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
    )
    seconds, cut = _run(process, interrupts, watch, num_steps=warmup + steps)
    if cut:
        return _cut_short(variant, cut, seconds[warmup:])
    if process.poll() == 0:
        _take_apart(run_dir, parts)
        row = _known(variant, document, run_dir, steps, warmup)
        return row or unmeasured(variant, FAILED, f"it ended without measuring {variant.choice.engine}")
    if parts and len(seconds) >= warmup + steps:  # it was the profiler that it failed for
        return measure(
            variant,
            context_dir=context_dir,
            run_dir=run_dir,
            accelerator=accelerator,
            steps=steps,
            warmup=warmup,
            interrupts=interrupts,
            threads=threads,
            watch=watch,
        )
    return _failed(variant, process.result())


def _failed(variant: Variant, result: RunResult) -> Row:
    status = CANNOT_RUN if result.status == INVALID else OUT_OF_MEMORY if result.ran_out_of_memory else FAILED
    return unmeasured(variant, status, result.reason or "")


def _run(
    process: TrialProcess, interrupts: Interrupts, watch: Watch | None, *, num_steps: int
) -> tuple[list[float], str]:
    """Run a process to its end. Returns the seconds of its steps, and why it was cut short; "" where it was not."""
    process.start()
    seconds: list[float] = []
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            seconds += _new_steps(process)
            watched = watch is not None and len(seconds) < num_steps
            cut = "interrupted" if interrupts.requested else watch(seconds) if watch and watched else None
            if cut:
                return seconds, cut
        return [*seconds, *_new_steps(process)], ""
    finally:
        process.kill()


def _new_steps(process: TrialProcess) -> list[float]:
    records = (each for each in process.new_metrics() if each.get("group") == STEP_GROUP)
    return [record["metrics"]["step_seconds"] for record in records]


def _take_apart(run_dir: Path, parts: int) -> None:
    """Add to a measurement where the time of its steps went, by the traces beside it; nothing where there are none."""
    if not parts:
        return
    from determined_ds.profile.findings import analyse

    path = RunDir(run_dir).measured
    try:
        row, traces = read_row(path), traces_in(run_dir)
        profile = analyse(traces) if traces else None
    except ConfigError:  # of what was measured, it is what matters least
        return
    if profile is not None and profile.step_s > 0:
        repetitions = tuple(replace(each, parts=profile.seconds) for each in row.repetitions)
        write_row(replace(row, repetitions=repetitions), path)


def _cut_short(variant: Variant, reason: str, seconds: Sequence[float]) -> Row:
    """The row of a variant of which only the first steps are known."""
    row = unmeasured(variant, STOPPED, reason)
    if not seconds:
        return row
    known = Repetition(
        run_dir="",
        step_seconds=tuple(seconds),
        losses=(),
        warmup=0,
        start_seconds=0.0,
        peak_memory_bytes_by_rank=(),
        model_state_bytes_by_rank=(),
    )
    return replace(row, repetitions=(known,))


def unmeasured(variant: Variant, status: str, reason: str) -> Row:
    """The row of a variant without numbers."""
    resolved = variant.resolved
    row = Row(
        name=variant.name,
        slots=variant.choice.slots,
        status=status,
        reason=reason,
        zero_stage=variant.choice.zero_stage,
        pipe_parallel_size=variant.choice.pipe_parallel_size,
    )
    if resolved is None:
        return row
    return replace(
        row,
        micro_batch_size=resolved.batch.micro_batch_size,
        accumulation=resolved.batch.accumulation,
        replicas=resolved.batch.replicas,
        precision=resolved.strategy.precision,
        samples_per_step=resolved.batch.global_batch_size,
    )


def _known(variant: Variant, document: Document, run_dir: Path, steps: int, warmup: int) -> Row | None:
    """The measurement that is in a run directory, if it is whole, of this very experiment and by this very engine."""
    try:
        there = RunDir(run_dir)
        given = there.given.read_text(encoding="utf-8")
        row = read_row(there.measured)
    except (OSError, ConfigError):
        return None
    if given != stored_yaml(document.data) or row.status != MEASURED or not row.repetitions:
        return None
    if row.engine != variant.choice.engine:
        return None
    [repetition] = row.repetitions
    if (len(repetition.step_seconds), repetition.warmup) != (steps, warmup):
        return None
    where = os.path.join(*run_dir.parts[-2:])
    return replace(row, name=variant.name, repetitions=(replace(repetition, run_dir=where),))


def in_words(row: Row) -> str:
    """A measurement in a line."""
    if row.status != MEASURED or row.median_step_seconds is None:
        return f"{row.status}: {row.reason}"
    return f"{1000 * row.median_step_seconds:,.0f} ms a step, {row.samples_per_second:,.1f} samples/s"


def merged(rows: Sequence[Row]) -> Row:
    """The repetitions of a variant as one row: those measured; or else its first failure.

    Args:
        rows: One or more.
    """
    good = [row for row in rows if row.status == MEASURED]
    bad = [row for row in rows if row.status not in (MEASURED, STOPPED)]
    if bad:  # what fails once in three times is not to be relied upon
        return (
            bad[0] if not good else replace(bad[0], reason=f"in one of {len(rows)} starts: {bad[0].reason}")
        )
    if not good:
        return rows[0]
    return replace(good[0], repetitions=_one_step_kept([each for row in good for each in row.repetitions]))


def _one_step_kept(repetitions: Sequence[Repetition]) -> tuple[Repetition, ...]:
    """With one pipeline's step that was recorded: of the repetition whose step is the median one."""
    steps = [each.pipeline_step for each in repetitions if each.pipeline_step is not None]
    kept = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2 :][:1]
    return tuple(
        each if any(each.pipeline_step is step for step in kept) else replace(each, pipeline_step=None)
        for each in repetitions
    )


def estimated_state_bytes(variant: Variant, shape: ModelShape) -> int | None:
    """Model states of a rank by the memory model, as a walk through the engine would count them.

    On a CPU what is offloaded lies in the same memory as what is not, and both are counted.
    """
    if variant.resolved is None:
        return None
    states = model_states(shape, variant.resolved.strategy)
    on_host = states.host_bytes if variant.resolved.accelerator.name == "cpu" else 0
    return states.parameters_bytes + states.gradients_bytes + states.optimizer_states_bytes + on_host
