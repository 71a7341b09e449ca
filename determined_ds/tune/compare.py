"""Strategies side by side: ``det-ds compare``, and the same in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from determined_ds.config.params import MOST_ACTIVE
from determined_ds.config.strategy import FORMS
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems
from determined_ds.launch.interrupts import Interrupts
from determined_ds.memory.rank import model_states
from determined_ds.report.results import CANNOT_RUN, MEASURED, STOPPED, Results, Row
from determined_ds.rundir.run_lock import RunLock
from determined_ds.tune.measure import (
    Request,
    Say,
    Workbench,
    check_names,
    in_words,
    merged,
    open_workbench,
    shape_of,
    unmeasured,
)
from determined_ds.tune.variants import Variant, named_variants

PARTS = 3  # steps that are taken apart: enough for a mean


@dataclass(frozen=True, kw_only=True)
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

    def run(self, interrupts: Interrupts) -> Results:
        """Measure, and write the report after each run; stop early when interrupted.

        Raises:
            ConfigError: another process writes to the run directory.
        """
        bench, rows = self.workbench, [list[Row]() for _ in self.variants]
        most_slots = max(each.choice.slots for each in self.variants)

        def so_far(estimates: Sequence[int | None]) -> list[Row]:
            return [
                replace(
                    merged(of_one or [unmeasured(variant, STOPPED, "not measured yet")]),
                    estimated_model_state_bytes=estimate,
                )
                for variant, of_one, estimate in zip(self.variants, rows, estimates, strict=True)
            ]

        with RunLock(bench.run_dir):
            estimates = self._estimates()
            for repetition in range(self.repeat):
                order = list(zip(self.variants, rows, strict=True))
                # Forwards, then backwards, so that each is early as often as late.
                for variant, of_one in order[::-1] if repetition % 2 else order:
                    if interrupts.requested:
                        break
                    if any(row.status != MEASURED for row in of_one):
                        continue  # it failed once, which is enough
                    name = f"{variant.name} x{variant.choice.slots}"
                    if variant.can_run:
                        parts = 0 if repetition else self.parts
                        row = bench.measure(
                            variant, name, repetition + 1, interrupts, most_slots=most_slots, parts=parts
                        )
                    else:
                        row = unmeasured(variant, CANNOT_RUN, variant.reason)
                    of_one.append(row)
                    bench.say(f"{repetition + 1}/{self.repeat}  {name:<24}  {in_words(row)}")
                    bench.write(so_far(estimates), page=False)
            return bench.write(so_far(estimates))

    def _estimates(self) -> list[int | None]:
        """Model states of a rank of each variant by the memory model, in bytes; None where its model is not known."""
        found: list[int | None] = []
        reasons: dict[str, list[str]] = {}
        for variant in self.variants:
            found.append(None)
            if variant.resolved is None:
                continue
            try:
                states = model_states(shape_of(self.workbench.base, variant), variant.resolved.strategy)
            except ConfigError as error:
                reasons.setdefault(error.problems[0].message, []).append(variant.name)
                continue
            # On a CPU what is offloaded lies in the same memory as what is not, and both are counted.
            on_host = states.host_bytes if variant.resolved.accelerator.name == "cpu" else 0
            held = states.parameters_bytes + states.gradients_bytes + states.optimizer_states_bytes
            found[-1] = held + on_host
        num_tried = sum(variant.can_run for variant in self.variants)
        for reason, names in reasons.items():
            whose = "" if len(names) == num_tried else f" for {', '.join(dict.fromkeys(names))}"
            self.workbench.say(f"no memory estimate{whose}: {reason}")
        return found


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
