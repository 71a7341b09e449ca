"""Strategies side by side: ``det-ds compare``, and the same in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from determined_ds.config.strategy import FORMS
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems
from determined_ds.memory.rank import model_states
from determined_ds.report.results import CANNOT_RUN, MEASURED, STOPPED, Results, Row
from determined_ds.rundir.run_dir import RunLock
from determined_ds.rundir.signals import Interrupts
from determined_ds.tune.measure import Request, Say, Workbench, check_names, in_words, open_workbench
from determined_ds.tune.variants import Variant, named_variants


def compare(
    config: str | os.PathLike[str],
    context_dir: str | os.PathLike[str] = ".",
    *,
    strategies: Sequence[str],
    slots: Sequence[int] | None = None,
    steps: int = 30,
    warmup: int = 5,
    repeat: int = 3,
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
        overrides: ``KEY=VALUE`` overrides of the YAML, as ``--set``.
        run_dir: Where the report and the runs go; ``runs/<name>_compare/<time>``, if None.
        accelerator: ``cpu``, ``cuda`` or None for the best there is.

    Returns:
        One row for each strategy and number of slots; a failure is a row with its reason.

    Raises:
        ConfigError: every reason why it cannot be done.
    """
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
    with Interrupts("ending the measurement") as interrupts:
        results, _ = measure_strategies(
            request, interrupts, print, strategies=strategies, slots=slots, repeat=repeat
        )
        return results


def measure_strategies(
    request: Request,
    interrupts: Interrupts,
    say: Say,
    *,
    strategies: Sequence[str],
    slots: Sequence[int] | None,
    repeat: int,
) -> tuple[Results, Path]:
    """Measure strategies as :func:`compare` does, and write the report after each run; stop early when interrupted.

    Returns:
        The results, and the folder that they were written to.

    Raises:
        ConfigError: a name is unknown, the experiment cannot run as it is, or the folder cannot be written to.
    """
    found = Problems()
    found.of(lambda: check_names("--strategies", strategies, tuple(FORMS), "strategy"))
    if "ddp" in strategies:
        message = "the strategy ddp is torch's alone: DeepSpeed's own options have no effect in its rows"
        found.warn([Problem(key="", message=message, code="ddp-only")])
    bench = open_workbench(request, found, "compare", say=say)
    variants = named_variants(bench.base, strategies, slots or [bench.base.experiment.slots])
    most_slots = max(each.choice.slots for each in variants)
    with RunLock(bench.run_dir):
        rows = _rows(bench, variants)
        for repetition in range(repeat):
            # Forwards, then backwards, so that each is early as often as late.
            order = range(len(variants))
            for number in reversed(order) if repetition % 2 else order:
                variant, row = variants[number], rows[number]
                if interrupts.requested:
                    break
                if repetition and row.status != MEASURED:
                    continue  # it failed once, which is enough
                name = f"{variant.name} x{variant.choice.slots}"
                if variant.resolved is None:
                    start = variant.row(CANNOT_RUN, variant.reason)
                else:
                    start = bench.measure(variant, row, name, interrupts, most_slots=most_slots)
                rows[number] = row.joined(start)
                say(f"{repetition + 1}/{repeat}  {name:<24}  {in_words(start)}")
                bench.write(rows, is_last=False)
        if bench.load:
            say(f"warning: while it was measured, {bench.load}: compare times by their spread")
        return bench.write(rows), bench.run_dir


def _rows(bench: Workbench, variants: Sequence[Variant]) -> list[Row]:
    """The rows of variants that are not measured yet, with the model states of a rank by the memory model, if known."""
    rows, said = [], set[str]()
    for each in variants:
        row = each.row(STOPPED, "not measured yet")
        if each.resolved is not None:
            try:
                states = model_states(each.shape(bench.base.context_dir), each.resolved.strategy)
                # On a CPU what is offloaded lies in the same memory as what is not, and both are counted.
                on_host = states.host_bytes if bench.base.accelerator.name == "cpu" else 0
                held = states.parameters_bytes + states.gradients_bytes + states.optimizer_states_bytes
                row = replace(row, estimated_model_state_bytes=held + on_host)
            except ConfigError as error:
                if (reason := error.problems[0].message) not in said:
                    bench.say(f"no memory estimate: {reason}")
                said.add(reason)
        rows.append(row)
    return rows
