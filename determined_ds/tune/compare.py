"""Strategies side by side, each measured in fresh processes: ``det-ds compare``, and what ``autotune`` does it with."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import psutil

from determined_ds.config.keys import MEASURE, ignored_keys
from determined_ds.config.strategy import FORMS
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import one_of
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.report.comparison import write_report
from determined_ds.report.numbers import count
from determined_ds.report.results import (
    CANNOT_RUN,
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    STOPPED,
    Results,
    Row,
    read_file,
)
from determined_ds.rundir.records import HOST_MEMORY, INVALID, KILLED
from determined_ds.rundir.records import OUT_OF_MEMORY as NO_MEMORY
from determined_ds.rundir.run_dir import (
    RUNS,
    RunDir,
    RunLock,
    check_run_dir,
    new_run_dir,
    short,
    slug,
)
from determined_ds.rundir.signals import Interrupts
from determined_ds.tune.variants import Base, Variant, named_variants, read_base

POLL_S = 0.25
BUSY = 0.25  # other programs' share of the cores, above which times are said to be unsure
LOOK_S = 0.2  # at what other programs take, before each start
Say = Callable[[str], None]  # prints a line for people


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that ``compare`` and ``autotune`` have."""

    config: Path  # the experiment's YAML
    context_dir: Path  # the folder with the code
    slots: int | None = None  # resources.slots_per_trial, if None
    steps: int  # optimizer steps to time in each run, >= 1
    warmup: int  # steps before them
    overrides: Sequence[str] = ()  # KEY=VALUE, as --set
    run_dir: Path | None = None  # where everything is written; runs/<name>_<command>/<time>, if None
    accelerator: str | None = None  # cpu, cuda or None for the best there is
    command: str = ""  # for the report


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """An experiment whose variants will be measured."""

    request: Request
    base: Base
    run_dir: Path  # where everything is written
    created: str  # ISO 8601
    say: Say  # prints a line as something happens
    busy: list[float] = field(default_factory=list)  # shares of the cores that others took before each start

    @property
    def machine(self) -> str:
        """The machine in one line, for the report."""
        accelerator = self.base.accelerator
        if accelerator.name == "cuda":
            import torch

            return f"{accelerator.num_devices} x {torch.cuda.get_device_name(0)}"
        cores = count(accelerator.num_devices, "CPU core")
        return f"{platform.machine()}, {cores}, Python {platform.python_version()}"

    @property
    def load(self) -> str:
        """What else ran on the machine; "" where that was little."""
        most = max(self.busy, default=0.0)
        return f"other programs took up to {most:.0%} of its cores" if most > BUSY else ""

    def measure(
        self,
        variant: Variant,
        row: Row,
        title: str,
        interrupts: Interrupts,
        *,
        most_slots: int,
        until_s: float = math.inf,
    ) -> Row:
        """Run a variant for some steps, in processes of its own. Returns the row of this start alone.

        ``row`` has its starts so far, ``title`` names its folder, and ``most_slots`` is that of all that are compared:
        the cores are shared as if all had as many.
        """
        request, base, experiment, engine = self.request, self.base, variant.experiment, variant.choice.engine
        assert experiment is not None
        where = Path(title.replace(" ", "-"), str(len(row.repetitions) + 1))
        there, environment = RunDir(self.run_dir / "runs" / where), dict[str, str]()
        if base.accelerator.name == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # With more threads where there are fewer ranks, one slot would measure all cores' work.
            environment["OMP_NUM_THREADS"] = str(max(1, base.accelerator.num_devices // most_slots))
        arguments = ["--measure", str(request.steps), "--warmup", str(request.warmup), "--engine", engine]
        process = TrialProcess(
            experiment=experiment.document,
            context_dir=base.context_dir,
            run_dir=there.path,
            accelerator=base.accelerator.name,
            arguments=arguments,
            environment=environment,
        )
        self.busy.append(psutil.cpu_percent(LOOK_S) / 100)
        there.measured.unlink(missing_ok=True)  # of an earlier command
        process.start()
        try:
            while process.poll() is None:
                if interrupts.requested:
                    return variant.row(STOPPED, "interrupted")
                if time.monotonic() > until_s:
                    return variant.row(STOPPED, "the budget's time was over")
                time.sleep(POLL_S)
        finally:
            process.kill()
        if process.poll() == 0:
            with contextlib.suppress(ConfigError):
                found = read_file(Row, there.measured)
                if found.engine == engine:
                    starts = (replace(each, run_dir=str(where)) for each in found.repetitions)
                    return replace(found, name=variant.name, repetitions=tuple(starts))
            return variant.row(FAILED, f"it ended without measuring {engine}")
        result = process.result()
        # Where the kernel ends a process for its memory, only its signal is known.
        failed = OUT_OF_MEMORY if result.cause in (NO_MEMORY, HOST_MEMORY, KILLED) else FAILED
        return variant.row(CANNOT_RUN if result.status == INVALID else failed, result.reason or "")

    def write(self, rows: Iterable[Row], *, is_last: bool = True) -> Results:
        """Write the report, whose first row is the baseline; the page, which takes a second, with the last."""
        results = Results(
            title=self.base.experiment.name,
            command=self.request.command,
            created=self.created,
            machine=", ".join(filter(None, [self.machine, self.load])),
            accelerator=self.base.accelerator.name,
            steps=self.request.steps,
            rows=tuple(rows),
        )
        write_report(results, self.run_dir, page=is_last)
        return results


def open_workbench(request: Request, found: Problems, command: str, *, say: Say) -> Workbench:
    """Read the experiment and check the run directory. Warnings are printed; nothing is written."""
    config, context_dir = request.config, request.context_dir
    document = found.of(
        lambda: read_document(config, context_dir, slots=request.slots, overrides=request.overrides)
    )
    found.raise_any()
    assert document is not None
    name, now = parse_experiment(document).name, datetime.now()
    run_dir = request.run_dir or new_run_dir(RUNS / f"{slug(name)}_{command}", now)
    say(f"{name}: {command} in {short(run_dir)}")  # before anything is loaded that takes seconds
    devices = found.of(lambda: detect_accelerator(request.accelerator))
    found.raise_any()
    assert devices is not None
    found.warn(ignored_keys(document, MEASURE))
    base = found.of(lambda: read_base(document, context_dir, devices))
    found.of(lambda: check_run_dir(run_dir))
    found.raise_any()
    assert base is not None
    found.warn(base.resolved.warnings)
    for warning in found.warnings:
        say(f"warning: {warning}")
    created = now.isoformat(timespec="seconds")
    return Workbench(request=request, base=base, run_dir=run_dir.resolve(), created=created, say=say)


def check_names(option: str, names: Sequence[str], known: Sequence[str], code: str) -> None:
    """Refuse names given to an option that are not known, or none at all."""
    problems = [] if names else [Problem(key=option, message="is empty", fix=one_of(known), code=code)]
    for name in names:
        if name not in known:
            fix = one_of(known, name)
            problems.append(Problem(key=option, value=name, message="unknown name", fix=fix, code=code))
    if problems:
        raise ConfigError(problems)


def in_words(row: Row) -> str:
    """A measurement in a line."""
    if row.status != MEASURED or row.median_step_seconds is None:
        return f"{row.status}: {row.reason}"
    return f"{1000 * row.median_step_seconds:,.0f} ms a step, {row.samples_per_second:,.1f} samples/s"


# ------------------------------------------------------------------------------------------- compare


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
        rows = [each.row(STOPPED, "not measured yet") for each in variants]
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
