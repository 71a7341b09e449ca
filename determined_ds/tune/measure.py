"""Variants of an experiment measured in fresh processes: the request, the run directory, a row of numbers each."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path

from determined_ds.config.keys import MEASURE, ignored_keys
from determined_ds.config.layout import Accelerator
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import one_of
from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.memory.model import ModelShape
from determined_ds.profile.record import traces_in
from determined_ds.report.comparison import write_report
from determined_ds.report.results import (
    CANNOT_RUN,
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    STOPPED,
    Repetition,
    Results,
    Row,
    read_row,
    write_row,
)
from determined_ds.rundir.records import INVALID
from determined_ds.rundir.run_dir import RUNS, STEP_GROUP, RunDir, new_run_dir, slug
from determined_ds.rundir.run_lock import check_run_dir
from determined_ds.tune.variants import Base, Variant, read_base

POLL_S = 0.25
MADE_BY = "measured_with.json"  # beside a measurement: all that its numbers depend on
PACKAGES = ("determined", "deepspeed", "torch", "transformers")
BUSY = 0.25  # other processes' share of the cores, above which times are said to be unsure
Say = Callable[[str], None]  # prints a line for people
# From the seconds of the steps so far: why to go no further, or None.
Watch = Callable[[Sequence[float]], str | None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options that ``compare`` and ``autotune`` have.

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
        run_dir: Where everything is written.
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
        """Run a variant for some steps, in processes of its own, and read what it measured.

        A measurement that is in the run directory already is taken instead, where it was made of the same experiment
        and code, by the same versions, on the same accelerator and with as many threads; that is said.

        Args:
            variant: One that can run.
            name: Of its folder.
            repetition: Which of its measurements, from 1.
            interrupts: Ends it.
            most_slots: Of all that are compared: the cores are shared as if all had as many.
            watch: Looks at the steps as they come, and may cut it short as long as one is to come.
            parts: Further steps, not timed, that are taken apart by torch's profiler.
        """
        assert variant.document is not None
        request, run_dir = self.request, self.run_dir / "runs" / name.replace(" ", "-") / str(repetition)
        there, num_steps = RunDir(run_dir), request.warmup + request.steps
        threads = (
            None  # with more threads where there are fewer ranks, one slot would measure all cores' work
        )
        if self.base.accelerator.name == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, self.base.accelerator.num_devices // most_slots)
        with_ = {**self._depends_on(), "threads": threads or os.environ.get("OMP_NUM_THREADS")}

        def known() -> Row | None:
            try:
                row = read_row(there.measured)
                given = there.given.read_text(encoding="utf-8")
                made_by = json.loads((run_dir / MADE_BY).read_text(encoding="utf-8"))
            except (OSError, ValueError, ConfigError):
                return None
            is_same = given == stored_yaml(variant.document.data) and made_by == with_  # type: ignore[union-attr]
            if not is_same or row.status != MEASURED or row.engine != variant.choice.engine:
                return None
            [one] = row.repetitions or (None,)
            if one is None or (len(one.step_seconds), one.warmup) != (request.steps, request.warmup):
                return None
            where = os.path.join(*run_dir.parts[-2:])
            return replace(row, name=variant.name, repetitions=(replace(one, run_dir=where),))

        if (row := known()) is not None:
            self.say(
                f"     {name}: measured before, in {os.path.join(*run_dir.parts[-3:])}; taken from there"
            )
            return row
        arguments = ["--measure", str(request.steps), "--warmup", str(request.warmup)]
        arguments += ["--engine", variant.choice.engine, *(["--parts", str(parts)] if parts else [])]
        process = TrialProcess(
            experiment=variant.document,
            context_dir=self.base.context_dir,
            run_dir=run_dir,
            accelerator=self.base.accelerator.name,
            arguments=arguments,
            environment={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
        )

        def new_steps() -> list[float]:
            records = (each for each in process.new_metrics() if each.get("group") == STEP_GROUP)
            return [record["metrics"]["step_seconds"] for record in records]

        process.start()
        write_whole(run_dir / MADE_BY, json.dumps(with_, indent=2) + "\n")
        seconds: list[float] = []
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                seconds += new_steps()
                watched = watch is not None and len(seconds) < num_steps
                cut = "interrupted" if interrupts.requested else watch(seconds) if watch and watched else None
                if cut:
                    return _cut_short(variant, cut, seconds[request.warmup :])
            seconds += new_steps()
        finally:
            process.kill()
        if process.poll() == 0:
            if parts:
                _take_apart(run_dir)
            return known() or unmeasured(
                variant, FAILED, f"it ended without measuring {variant.choice.engine}"
            )
        if parts and len(seconds) >= num_steps:  # it was the profiler that it failed for
            return self.measure(variant, name, repetition, interrupts, most_slots=most_slots, watch=watch)
        result = process.result()
        failed = OUT_OF_MEMORY if result.ran_out_of_memory else FAILED
        return unmeasured(variant, CANNOT_RUN if result.status == INVALID else failed, result.reason or "")

    def _depends_on(self) -> dict[str, str | int]:
        """What a measurement depends on beside its experiment."""
        versions = {}
        for name in PACKAGES:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        accelerator = self.base.accelerator
        return {
            "accelerator": f"{machine(accelerator)} ({accelerator.name})",
            "python": platform.python_version(),
            **versions,
            "code": _digest(self.base.context_dir),
            "determined_ds": _digest(Path(__file__).parents[1]),
        }

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


def open_workbench(request: Request, found: Problems, command: str, *, say: Say = print) -> Workbench:
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
        )
    )
    devices = found.of(lambda: detect_accelerator(request.accelerator))
    found.raise_any()
    assert document is not None
    assert devices is not None
    found.warn(ignored_keys(document, MEASURE))
    base = found.of(lambda: read_base(document, request.context_dir, devices))
    found.raise_any()
    assert base is not None
    found.warn(base.resolved.warnings)
    now = datetime.now()
    run_dir = request.run_dir or new_run_dir(RUNS / f"{slug(base.experiment.name)}_{command}", now)
    found.of(lambda: check_run_dir(run_dir))
    found.raise_any()
    for warning in found.warnings:
        say(f"warning: {warning}")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        say(
            f"warning: this machine is busy (load {load:.1f} on {cores} cores): times vary with what else runs;"
            " compare them by their spread"
        )
    created = now.isoformat(timespec="seconds")
    return Workbench(request=request, base=base, run_dir=run_dir.resolve(), created=created, say=say)


def machine(accelerator: Accelerator) -> str:
    """The machine in one line, for the report."""
    if accelerator.name == "cuda":
        import torch

        return f"{accelerator.num_devices} x {torch.cuda.get_device_name(0)}"
    cores = f"{accelerator.num_devices} CPU core{'s' if accelerator.num_devices != 1 else ''}"
    return f"{platform.machine()}, {cores}, Python {platform.python_version()}"


def shape_of(base: Base, variant: Variant) -> ModelShape:
    """The sizes of a variant's model, built without weights.

    Raises:
        ConfigError: it cannot be built, or is that of a script that does not state it.
    """
    from determined_ds.train.shape import shape_of_experiment

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


def _digest(folder: Path) -> str:
    """A digest of the Python files of a folder, hidden folders and ``runs`` left out."""
    digest = hashlib.sha256()
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")) and name != "runs")
        for name in sorted(files):
            if name.endswith(".py"):
                file = Path(parent, name)
                digest.update(str(file.relative_to(folder)).encode() + b"\0")
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _take_apart(run_dir: Path) -> None:
    """Add to a measurement where the time of its steps went, by the traces beside it; nothing where there are none."""
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


# ------------------------------------------------------------------------------------------------- rows


def unmeasured(variant: Variant, status: str, reason: str) -> Row:
    """The row of a variant without numbers."""
    resolved, choice = variant.resolved, variant.choice
    row = Row(
        name=variant.name,
        slots=choice.slots,
        status=status,
        reason=reason,
        zero_stage=choice.zero_stage,
        pipe_parallel_size=choice.pipe_parallel_size,
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


def merged(rows: Sequence[Row]) -> Row:
    """The repetitions of a variant, one or more, as one row: those measured; or else its first failure.

    One pipeline's step that was recorded is kept: of the repetition whose step is the median one.
    """
    good = [row for row in rows if row.status == MEASURED]
    bad = [row for row in rows if row.status not in (MEASURED, STOPPED)]
    if bad:  # what fails once in three times is not to be relied upon
        reason = bad[0].reason if not good else f"in one of {len(rows)} starts: {bad[0].reason}"
        return replace(bad[0], reason=reason)
    if not good:
        return rows[0]
    repetitions = [each for row in good for each in row.repetitions]
    recorded = [each.pipeline_step for each in repetitions if each.pipeline_step is not None]
    kept = sorted(recorded, key=lambda step: step.seconds)[(len(recorded) - 1) // 2 :][:1]
    one_step = (
        each if any(each.pipeline_step is step for step in kept) else replace(each, pipeline_step=None)
        for each in repetitions
    )
    return replace(good[0], repetitions=tuple(one_step))


def interval(row: Row) -> tuple[float, float] | None:
    """What the median step time lies between, in seconds: of several repetitions their lowest and highest median.

    Of a single one, the quartiles of its steps; None where nothing was timed.
    """
    timed = [each.step_seconds for each in row.repetitions if each.step_seconds]
    if len(timed) == 1 and len(timed[0]) > 1:
        low, _, high = statistics.quantiles(timed[0], n=4)
        return low, high
    return row.spread


def in_words(row: Row) -> str:
    """A measurement in a line."""
    if row.status != MEASURED or row.median_step_seconds is None:
        return f"{row.status}: {row.reason}"
    return f"{1000 * row.median_step_seconds:,.0f} ms a step, {row.samples_per_second:,.1f} samples/s"
