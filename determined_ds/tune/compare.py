"""Strategies side by side: ``det-ds compare``, and the same in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from determined_ds.config.params import MOST_ACTIVE
from determined_ds.config.strategy import FORMS
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems
from determined_ds.launch.interrupts import Interrupts
from determined_ds.memory.model import ModelShape
from determined_ds.report.results import CANNOT_RUN, MEASURED, STOPPED, Results, Row
from determined_ds.rundir.run_lock import RunLock
from determined_ds.tune.measurement import estimated_state_bytes, in_words, merged, unmeasured
from determined_ds.tune.variants import Variant, named_variants
from determined_ds.tune.workbench import Request, Say, Workbench, check_names, open_workbench, shape_of

PARTS = 3  # steps that are taken apart: enough for a mean


@dataclass(kw_only=True)
class Comparison:
    """Measures variants of an experiment. Runs are interleaved, so slow drift of the machine does not bias them.

    Args:
        workbench: The experiment, and where runs go.
        variants: What to compare; the first is the baseline.
        repeat: Runs of each.
        parts: Steps that are taken apart after those of the first run of each; 0 for none.
    """

    workbench: Workbench
    variants: Sequence[Variant]
    repeat: int
    parts: int = 0
    _rows: dict[int, list[Row]] = field(default_factory=dict)

    def run(self, interrupts: Interrupts) -> Results:
        """Measure, and write the report after each run; stop early when interrupted.

        Raises:
            ConfigError: another process writes to the run directory.
        """
        with RunLock(self.workbench.run_dir):
            estimates = [
                None if shape is None else estimated_state_bytes(variant, shape)
                for variant, shape in zip(self.variants, self._shapes(), strict=True)
            ]
            self._rows = {index: [] for index in range(len(self.variants))}
            for repetition in range(self.repeat):
                for index in in_turn(len(self.variants), repetition):
                    if interrupts.requested:
                        break
                    self._measure(index, repetition, interrupts)
                    self.workbench.write(self._merged(estimates), page=False)
            return self.workbench.write(self._merged(estimates))

    def _measure(self, index: int, repetition: int, interrupts: Interrupts) -> None:
        variant, rows = self.variants[index], self._rows[index]
        if any(row.status != MEASURED for row in rows):
            return  # it failed once, which is enough
        name = f"{variant.name} x{variant.choice.slots}"
        if variant.can_run:
            slots = max(each.choice.slots for each in self.variants)
            parts = 0 if repetition else self.parts
            rows.append(
                self.workbench.measure(
                    variant, name, repetition + 1, interrupts, most_slots=slots, parts=parts
                )
            )
        else:
            rows.append(unmeasured(variant, CANNOT_RUN, variant.reason))
        self.workbench.say(f"{repetition + 1}/{self.repeat}  {name:<24}  {in_words(rows[-1])}")

    def _merged(self, estimates: Sequence[int | None]) -> list[Row]:
        known = [
            self._rows[index] or [unmeasured(variant, STOPPED, "not measured yet")]
            for index, variant in enumerate(self.variants)
        ]
        return [
            replace(merged(rows), estimated_model_state_bytes=estimate)
            for rows, estimate in zip(known, estimates, strict=True)
        ]

    def _shapes(self) -> list[ModelShape | None]:
        """The sizes of each variant's model; None where it cannot be built."""
        found: list[ModelShape | None] = []
        reasons: dict[str, list[str]] = {}
        for variant in self.variants:
            found.append(None)
            if not variant.can_run:
                continue
            try:
                found[-1] = shape_of(self.workbench.base, variant)
            except ConfigError as error:
                reasons.setdefault(error.problems[0].message, []).append(variant.name)
        num_tried = sum(variant.can_run for variant in self.variants)
        for reason, names in reasons.items():
            whose = "" if len(names) == num_tried else f" for {', '.join(dict.fromkeys(names))}"
            self.workbench.say(f"no memory estimate{whose}: {reason}")
        return found


def in_turn(count: int, repetition: int) -> list[int]:
    """The order of a repetition: forwards, then backwards, so that each is early as often as late."""
    order = list(range(count))
    return order[::-1] if repetition % 2 else order


def prepare_comparison(
    request: Request,
    *,
    strategies: Sequence[str],
    slots: Sequence[int] | None = None,
    repeat: int,
    parts: int = PARTS,
    say: Say = print,
) -> Comparison:
    """Decide a comparison from the options of ``det-ds compare``.

    Raises:
        ConfigError: a name is unknown, the experiment cannot run as it is, or the folder cannot be written to.
    """
    found = Problems()
    found.of(lambda: check_names("--strategies", strategies, tuple(FORMS), "strategy"))
    if "ddp" in strategies:
        message = "the strategy ddp is torch's alone: DeepSpeed's own options have no effect in its rows"
        found.warn([Problem(key="", message=message, code="ddp-only")])
    workbench = open_workbench(request, found, "compare", say=say)
    variants = named_variants(workbench.base, strategies, slots or [workbench.base.experiment.slots])
    return Comparison(workbench=workbench, variants=variants, repeat=repeat, parts=parts)


def compare(
    config: str | os.PathLike[str],
    context_dir: str | os.PathLike[str] = ".",
    *,
    strategies: Sequence[str],
    slots: Sequence[int] | None = None,
    steps: int = 30,
    warmup: int = 5,
    repeat: int = 3,
    parts: int = PARTS,
    overrides: Iterable[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    accelerator: str | None = None,
) -> Results:
    """Measure strategies for an experiment, as ``det-ds compare`` does.

    Each strategy runs in fresh processes on this machine, with the same model, data, seed and global batch; runs are
    interleaved. From a script, call it under ``if __name__ == "__main__":``.

    Args:
        config: The experiment's YAML.
        context_dir: The folder with the code.
        strategies: E.g. ``["zero0", "zero3", "pipeline"]``; the first is the baseline.
        slots: Numbers of ranks, each >= 1; the experiment's own, if None.
        steps: Optimizer steps to time in each run, >= 1.
        warmup: Steps before them.
        repeat: Runs of each strategy, >= 1.
        parts: Steps to take apart after those of the first run of each, by torch's profiler, >= 0.
        overrides: ``KEY=VALUE`` overrides of the YAML, as ``--set``.
        run_dir: Where the report and the runs go; ``runs/<name>_compare/<time>``, if None.
        accelerator: ``cpu``, ``cuda`` or None for the best there is.

    Returns:
        One row for each strategy and number of slots; a failure is a row with its reason.

    Raises:
        ConfigError: every reason why it cannot be done.
    """
    numbers = {"steps": steps, "repeat": repeat, **{f"slots {count}": count for count in slots or ()}}
    wrong = [name for name, value in numbers.items() if value < 1]
    problems = [Problem(key=name, message="must be 1 or more", fix="e.g. 1") for name in wrong]
    if not 0 <= parts <= MOST_ACTIVE:
        message = f"must be 0 to {MOST_ACTIVE}"
        problems.append(Problem(key="parts", value=parts, message=message, fix="3 is enough for a mean"))
    if problems:
        raise ConfigError(problems)
    request = Request(
        config=Path(config),
        context_dir=Path(context_dir),
        steps=steps,
        warmup=warmup,
        overrides=tuple(overrides),
        run_dir=None if run_dir is None else Path(run_dir),
        accelerator=accelerator,
        command="determined_ds.compare(...)",
    )
    comparison = prepare_comparison(request, strategies=strategies, slots=slots, repeat=repeat, parts=parts)
    with Interrupts("ending the measurement") as interrupts:
        return comparison.run(interrupts)
