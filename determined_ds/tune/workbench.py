"""What ``det-ds compare`` and ``det-ds autotune`` share: the experiment, its run directory, measuring a variant."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from determined_ds.config.keys import MEASURE, ignored_keys
from determined_ds.config.layout import Accelerator
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import one_of
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.launch.interrupts import Interrupts
from determined_ds.memory.model import ModelShape
from determined_ds.report.comparison import write_report
from determined_ds.report.results import Results, Row
from determined_ds.rundir.run_dir import RUNS, new_run_dir, slug
from determined_ds.rundir.run_lock import check_run_dir
from determined_ds.tune.choice import Base, read_base
from determined_ds.tune.measurement import Watch, measure
from determined_ds.tune.variants import Variant

Say = Callable[[str], None]  # prints a line for people


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that both commands have.

    Args:
        config: The experiment's YAML.
        context_dir: The folder with the code.
        slots: Ranks; ``resources.slots_per_trial``, if None.
        steps: Optimizer steps to time in each run, >= 1.
        warmup: Steps before them.
        overrides: ``KEY=VALUE``, as ``--set``.
        run_dir: Where everything is written; ``runs/<name>_<command>/<time>``, if None.
        accelerator: ``cpu``, ``cuda`` or None for the best there is.
        command: The command line, for the report.
    """

    config: Path
    context_dir: Path
    slots: int | None = None
    steps: int
    warmup: int
    overrides: Sequence[str] = ()
    run_dir: Path | None = None
    accelerator: str | None = None
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """An experiment whose variants will be measured.

    Args:
        request: What was typed.
        base: The experiment.
        run_dir: Where everything is written; a measurement that is there already is not repeated.
        created: When, ISO 8601.
        say: Prints a line as something happens.
    """

    request: Request
    base: Base
    run_dir: Path
    created: str = ""
    say: Say = print

    def measure(
        self,
        variant: Variant,
        name: str,
        repetition: int,
        interrupts: Interrupts,
        *,
        most_slots: int,
        watch: Watch | None = None,
        parts: int = 0,
    ) -> Row:
        """Measure a variant for the n-th time, from 1, in processes of its own; ``parts`` further steps by part."""
        return measure(
            variant,
            context_dir=self.base.context_dir,
            run_dir=self.run_dir / "runs" / name.replace(" ", "-") / str(repetition),
            accelerator=self.base.accelerator.name,
            steps=self.request.steps,
            warmup=self.request.warmup,
            interrupts=interrupts,
            threads=threads_per_rank(self.base, most_slots),
            watch=watch,
            parts=parts,
        )

    def results(self, rows: Sequence[Row]) -> Results:
        """Rows as results; the first is the baseline."""
        return Results(
            title=self.base.experiment.name,
            command=self.request.command,
            created=self.created,
            machine=machine(self.base.accelerator),
            accelerator=self.base.accelerator.name,
            steps=self.request.steps,
            rows=tuple(rows),
        )

    def write(self, rows: Sequence[Row], *, page: bool = True) -> Results:
        """Write the report of these rows over the one before."""
        results = self.results(rows)
        write_report(results, self.run_dir, page=page)
        return results


def open_workbench(
    request: Request,
    found: Problems,
    command: str,
    *,
    say: Say = print,
) -> Workbench:
    """Read the experiment and check the run directory. Warnings are printed; nothing is written.

    Args:
        request: The options.
        found: The problems of the command's own options.
        command: ``compare`` or ``autotune``.
        say: Prints a line.

    Raises:
        ConfigError: every problem.
    """
    document = found.of(
        lambda: read_document(
            request.config,
            request.context_dir,
            slots=request.slots,
            overrides=request.overrides,
            command=command,
        )
    )
    devices = found.of(lambda: detect_accelerator(request.accelerator))
    found.raise_any()
    assert document is not None
    assert devices is not None
    found.warn(ignored_keys(document, MEASURE))
    base = found.need(lambda: read_base(document, request.context_dir, devices))
    found.warn(base.resolved.warnings)
    now = datetime.now()
    run_dir = request.run_dir or new_run_dir(RUNS / f"{slug(base.experiment.name)}_{command}", now)
    found.of(lambda: check_run_dir(run_dir))
    found.raise_any()
    for warning in found.warnings:
        say(f"warning: {warning}")
    created = now.isoformat(timespec="seconds")
    return Workbench(request=request, base=base, run_dir=run_dir.resolve(), created=created, say=say)


def threads_per_rank(base: Base, most_slots: int) -> int | None:
    """OMP threads of every rank on a CPU, the same for all strategies; None leaves it to ``det-ds run``.

    With more threads where there are fewer ranks, one slot would measure the work of all cores.
    """
    if base.accelerator.name != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, base.accelerator.num_devices // most_slots)


def machine(accelerator: Accelerator) -> str:
    """The machine in one line, for the report."""
    if accelerator.name == "cuda":
        import torch

        return f"{accelerator.num_devices} x {torch.cuda.get_device_name(0)}"
    cores = f"{accelerator.num_devices} CPU core{'s' if accelerator.num_devices != 1 else ''}"
    return f"{platform.machine()}, {cores}, Python {platform.python_version()}"


@dataclass(kw_only=True)
class Sizes:
    """Gives the sizes of a variant's model, for a tuning; None for a script that does not state its model.

    Args:
        base: The experiment.
        unknown: Why they are not known; "" where they are.
    """

    base: Base
    unknown: str = ""

    def __call__(self, variant: Variant) -> ModelShape | None:
        """The sizes.

        Raises:
            ConfigError: the model of a trial cannot be built.
        """
        if self.unknown:
            return None
        try:
            return shape_of(self.base, variant)
        except ConfigError as error:
            if self.base.experiment.script is None:
                raise
            self.unknown = error.problems[0].message
            return None


def shape_of(base: Base, variant: Variant) -> ModelShape:
    """The sizes of a variant's model, built without weights.

    Raises:
        ConfigError: it cannot be built, or is that of a script that does not state it.
    """
    from determined_ds.train.shapes.of_experiment import shape_of_experiment

    assert variant.experiment is not None
    assert variant.resolved is not None
    return shape_of_experiment(variant.experiment, variant.resolved, base.context_dir)


def check_names(option: str, names: Sequence[str], known: Sequence[str], code: str) -> None:
    """Check the names given to an option.

    Raises:
        ConfigError: all that are not known, or none is given.
    """
    problems = [] if names else [Problem(key=option, message="is empty", fix=one_of(known), code=code)]
    for name in names:
        if name not in known:
            fix = one_of(known, name)
            problems.append(Problem(key=option, value=name, message="unknown name", fix=fix, code=code))
    if problems:
        raise ConfigError(problems)
