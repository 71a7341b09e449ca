"""Strategies side by side: every one measured several times, in turns, so that a drifting machine favours none."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from determined_ds.errors import ConfigError
from determined_ds.launch.interrupts import Interrupts
from determined_ds.memory import ModelShape
from determined_ds.protocol.run_lock import RunLock
from determined_ds.report.files import write_report
from determined_ds.report.measurements import CANNOT_RUN, MEASURED, STOPPED, Results, Row
from determined_ds.tune.choice import Base
from determined_ds.tune.measurement import estimated_state_bytes, measure, merged, unmeasured
from determined_ds.tune.variants import Variant

Told = Callable[[str], None]


@dataclass(kw_only=True)
class Comparison:
    """Measures variants of an experiment.

    Args:
        base: The experiment.
        variants: What to compare; the first is what the others are held against.
        run_dir: Where everything is written; measurements that are there already are taken from there.
        steps: Steps to measure each time.
        warmup: Steps before them.
        repeat: Times that each is measured.
        title: Of the report.
        command: What was typed.
        created: When, ISO 8601.
        tell: Gets a line for people as something happens.
    """

    base: Base
    variants: Sequence[Variant]
    run_dir: Path
    steps: int
    warmup: int
    repeat: int
    title: str
    command: str
    created: str
    tell: Told = print
    _rows: dict[int, list[Row]] = field(default_factory=dict)

    def run(self, interrupts: Interrupts) -> Results:
        """Measure, writing the report anew after each time; ends early where that is asked for.

        Raises:
            ConfigError: another process writes to the run directory.
        """
        with RunLock(self.run_dir):
            return self._run(interrupts)

    def _run(self, interrupts: Interrupts) -> Results:
        estimates = estimates_of(self.base, self.variants, self.tell)
        threads = threads_a_rank(self.base, max(variant.choice.slots for variant in self.variants))
        self._rows = {index: [] for index in range(len(self.variants))}
        for repetition in range(self.repeat):
            for index in in_turn(len(self.variants), repetition):
                if interrupts.requested:
                    break
                self._measure(index, repetition, threads, interrupts)
                write_report(self.results(estimates), self.run_dir, page=False)
        results = self.results(estimates)
        write_report(results, self.run_dir)
        return results

    def _measure(self, index: int, repetition: int, threads: int | None, interrupts: Interrupts) -> None:
        variant, rows = self.variants[index], self._rows[index]
        if any(row.status != MEASURED for row in rows):
            return  # once is enough to know
        name = named(variant)
        if not variant.can_run:
            rows.append(unmeasured(variant, CANNOT_RUN, variant.reason))
        else:
            rows.append(
                measure(
                    variant,
                    context_dir=self.base.context_dir,
                    run_dir=self.run_dir / "runs" / name.replace(" ", "-") / str(repetition + 1),
                    accelerator=self.base.accelerator.name,
                    steps=self.steps,
                    warmup=self.warmup,
                    interrupts=interrupts,
                    threads=threads,
                )
            )
        count = f"{repetition + 1}/{self.repeat}  {name:<24}"
        self.tell(f"{count}  {in_words(rows[-1])}")

    def results(self, estimates: Sequence[int | None]) -> Results:
        """What is known so far."""
        rows = []
        for index, variant in enumerate(self.variants):
            found = self._rows.get(index) or [unmeasured(variant, STOPPED, "not measured yet")]
            rows.append(replace(merged(found), estimated_model_state_bytes=estimates[index]))
        return Results(
            title=self.title,
            command=self.command,
            created=self.created,
            machine=machine(self.base),
            accelerator=self.base.accelerator.name,
            steps=self.steps,
            rows=tuple(rows),
        )


def named(variant: Variant) -> str:
    """Strategy and slots."""
    return f"{variant.name} x{variant.choice.slots}"


def in_words(row: Row) -> str:
    """A measurement in a line."""
    if row.status != MEASURED or row.median_step_seconds is None:
        return f"{row.status}: {row.reason}"
    return f"{1000 * row.median_step_seconds:,.0f} ms a step, {row.samples_per_second:,.1f} samples/s"


def in_turn(count: int, repetition: int) -> list[int]:
    """The order of a repetition: forwards, then backwards, so that each is early as often as late."""
    order = list(range(count))
    return order[::-1] if repetition % 2 else order


def threads_a_rank(base: Base, most_slots: int) -> int | None:
    """Threads that every rank gets, whatever the strategy: on a CPU, so many that the largest fits its cores.

    With more of them where there are fewer ranks, one slot would have the work of all cores to show.
    """
    if base.accelerator.name != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, base.accelerator.num_devices // most_slots)


def estimates_of(base: Base, variants: Sequence[Variant], tell: Told) -> list[int | None]:
    """Bytes of model states that the memory model expects of each variant; None where it knows nothing."""
    found: list[int | None] = []
    for variant in variants:
        shape = shape_of(base, variant, tell if not any(found) else lambda _: None)
        found.append(None if shape is None else estimated_state_bytes(variant, shape))
    return found


def shape_of(base: Base, variant: Variant, tell: Told) -> ModelShape | None:
    """The sizes of a variant's model, built without weights; None where that cannot be done."""
    if variant.resolved is None or variant.experiment is None:
        return None
    from determined_ds.runtime.shapes.of_experiment import shape_of_experiment

    try:
        return shape_of_experiment(variant.experiment, variant.resolved, base.context_dir)
    except ConfigError as error:
        tell(f"no estimate of {variant.name}'s memory: {error.problems[0].message}")
        return None


def machine(base: Base) -> str:
    """What it was measured on, in a line."""
    accelerator = base.accelerator
    if accelerator.name == "cuda":
        import torch

        return f"{accelerator.num_devices} x {torch.cuda.get_device_name(0)}"
    cores = f"{accelerator.num_devices} CPU core{'s' if accelerator.num_devices != 1 else ''}"
    return f"{platform.machine()}, {cores}, Python {platform.python_version()}"
