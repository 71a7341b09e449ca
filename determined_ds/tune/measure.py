"""Variants of an experiment measured in fresh processes: the request, the run directory, a row of numbers each."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from determined_ds.config.keys import MEASURE, ignored_keys
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import one_of
from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.profile.record import traces_in
from determined_ds.report.comparison import write_report
from determined_ds.report.results import (
    CANNOT_RUN,
    FAILED,
    MEASURED,
    OUT_OF_MEMORY,
    STOPPED,
    Results,
    Row,
    read_row,
    write_row,
)
from determined_ds.rundir.records import INVALID
from determined_ds.rundir.run_dir import RUNS, STEP_GROUP, RunDir, check_run_dir, new_run_dir, short, slug
from determined_ds.rundir.signals import Interrupts
from determined_ds.tune.variants import Base, Variant, read_base

POLL_S = 0.25
MADE_BY = "measured_with.json"  # beside a measurement: all that its numbers depend on
PACKAGES = ("determined", "deepspeed", "torch", "transformers")
BUSY = 0.25  # other programs' share of the cores, above which times are said to be unsure
LOOK_S = 0.2  # at what other programs take, before each start
Say = Callable[[str], None]  # prints a line for people
# From the seconds of the steps so far: why to go no further, or None.
Watch = Callable[[Sequence[float]], str | None]


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


@dataclass(kw_only=True)
class Measurement:
    """A variant, and a row of each of its starts."""

    variant: Variant
    rows: list[Row] = field(default_factory=list)  # in order
    rejected: str = ""  # why it is never selected although it ran
    estimate: int | None = (
        None  # bytes of a rank's model states, by the memory model; None where that is unknown
    )

    @property
    def row(self) -> Row:
        """All starts as one row: those that were measured, or the first failure; STOPPED without any."""
        row = unmeasured(self.variant, STOPPED, "not measured yet")
        good = [each for each in self.rows if each.status == MEASURED]
        bad = [each for each in self.rows if each.status not in (MEASURED, STOPPED)]
        if bad:  # what fails once in three times is not to be relied upon
            reason = f"in one of {len(self.rows)} starts: {bad[0].reason}" if good else bad[0].reason
            row = replace(bad[0], reason=reason)
        elif good:  # one recorded step of a pipeline is enough
            first, *others = (each for one in good for each in one.repetitions)
            row = replace(
                good[0], repetitions=(first, *(replace(each, pipeline_step=None) for each in others))
            )
        elif self.rows:
            row = self.rows[0]
        if self.rejected:
            row = replace(row, status=FAILED, reason=f"rejected: {self.rejected}")
        return replace(row, estimated_model_state_bytes=self.estimate)

    @property
    def interval(self) -> tuple[float, float] | None:
        """What the median step time lies between, in seconds; None where nothing was timed.

        Of several starts their lowest and highest median, of a single one the quartiles of its steps.
        """
        row = self.row
        timed = [each.step_seconds for each in row.repetitions if each.step_seconds]
        if len(timed) == 1 and len(timed[0]) > 1:
            low, _, high = statistics.quantiles(timed[0], n=4)
            return low, high
        return row.spread


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
        cores = f"{accelerator.num_devices} CPU core{'s' if accelerator.num_devices != 1 else ''}"
        return f"{platform.machine()}, {cores}, Python {platform.python_version()}"

    @property
    def load(self) -> str:
        """What else ran on the machine; "" where that was little."""
        most = max(self.busy, default=0.0)
        return f"other programs took up to {most:.0%} of its cores" if most > BUSY else ""

    def measure(
        self,
        one: Measurement,
        name: str,
        interrupts: Interrupts,
        *,
        most_slots: int,
        watch: Watch | None = None,
        parts: int = 0,
    ) -> Row:
        """Run a variant for some steps, in processes of its own, and read what it measured; the caller keeps the row.

        A measurement that is in the run directory already is taken instead, where it was made of the same experiment
        and code, by the same versions, on the same accelerator and with as many threads; that is said.

        Args:
            one: Of a variant that can run.
            name: Of its folder.
            interrupts: Ends it.
            most_slots: Of all that are compared: the cores are shared as if all had as many.
            watch: May cut it short as long as a step is to come.
            parts: Further steps, not timed, that are taken apart by torch's profiler.
        """
        variant, request, base = one.variant, self.request, self.base
        assert variant.experiment is not None
        run_dir = self.run_dir / "runs" / name.replace(" ", "-") / str(len(one.rows) + 1)
        there, num_steps = RunDir(run_dir), request.warmup + request.steps
        threads = os.environ.get("OMP_NUM_THREADS")
        if base.accelerator.name == "cpu" and threads is None:
            # With more threads where there are fewer ranks, one slot would measure all cores' work.
            threads = str(max(1, base.accelerator.num_devices // most_slots))
        depends_on = self._depends_on(variant, threads)

        def known() -> Row | None:
            try:
                row = read_row(there.measured)
                made_by = json.loads((run_dir / MADE_BY).read_text(encoding="utf-8"))
            except (OSError, ValueError, ConfigError):
                return None
            if made_by != depends_on or row.engine != variant.choice.engine or len(row.repetitions) != 1:
                return None
            where = os.path.join(*run_dir.parts[-2:])
            return replace(row, name=variant.name, repetitions=(replace(row.repetitions[0], run_dir=where),))

        if (row := known()) is not None:
            self.say(
                f"     {name}: measured before, in {os.path.join(*run_dir.parts[-3:])}; taken from there"
            )
            return row
        arguments = ["--measure", str(request.steps), "--warmup", str(request.warmup)]
        arguments += ["--engine", variant.choice.engine, *(["--parts", str(parts)] if parts else [])]
        process = TrialProcess(
            experiment=variant.experiment.document,
            context_dir=base.context_dir,
            run_dir=run_dir,
            accelerator=base.accelerator.name,
            arguments=arguments,
            environment={} if threads is None else {"OMP_NUM_THREADS": threads},
        )

        def new_steps() -> list[float]:
            records = (each for each in process.new_metrics() if each.get("group") == STEP_GROUP)
            return [record["metrics"]["step_seconds"] for record in records]

        self.busy.append(psutil.cpu_percent(LOOK_S) / 100)
        there.measured.unlink(missing_ok=True)  # of other code, or of another version
        process.start()
        write_whole(run_dir / MADE_BY, json.dumps(depends_on, indent=2) + "\n")
        seconds: list[float] = []
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                seconds += new_steps()
                watched = watch is not None and len(seconds) < num_steps
                cut = "interrupted" if interrupts.requested else watch(seconds) if watch and watched else None
                if cut:
                    return unmeasured(variant, STOPPED, cut)
            seconds += new_steps()
        finally:
            process.kill()
        if process.poll() == 0:
            if parts:
                _take_apart(run_dir)
            missing = f"it ended without measuring {variant.choice.engine}"
            return known() or unmeasured(variant, FAILED, missing)
        if parts and len(seconds) >= num_steps:  # it was the profiler that it failed for
            return self.measure(one, name, interrupts, most_slots=most_slots, watch=watch)
        result = process.result()
        failed = OUT_OF_MEMORY if result.ran_out_of_memory else FAILED
        return unmeasured(variant, CANNOT_RUN if result.status == INVALID else failed, result.reason or "")

    def _depends_on(self, variant: Variant, threads: str | None) -> dict[str, str | int | None]:
        """All that a measurement depends on."""
        assert variant.experiment is not None
        found: dict[str, str | int | None] = {
            "experiment": hashlib.sha256(stored_yaml(variant.experiment.config).encode()).hexdigest(),
            "code": _digest(self.base.context_dir),
            "determined_ds": _digest(Path(__file__).parents[1]),
            "accelerator": f"{self.machine} ({self.base.accelerator.name})",
            "threads": threads,
            "steps": self.request.steps,
            "warmup": self.request.warmup,
        }
        for name in PACKAGES:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found

    def write(self, measurements: Sequence[Measurement], *, is_last: bool = True) -> Results:
        """Write the report, whose first row is the baseline; the page, which takes a second, with the last."""
        results = Results(
            title=self.base.experiment.name,
            command=self.request.command,
            created=self.created,
            machine=", ".join(filter(None, [self.machine, self.load])),
            accelerator=self.base.accelerator.name,
            steps=self.request.steps,
            rows=tuple(each.row for each in measurements),
        )
        write_report(results, self.run_dir, page=is_last)
        return results


def open_workbench(request: Request, found: Problems, command: str, *, say: Say) -> Workbench:
    """Read the experiment and check the run directory. Warnings are printed; nothing is written.

    Raises:
        ConfigError: every problem, those of the command's own options too.
    """
    document = found.of(
        lambda: read_document(
            request.config, request.context_dir, slots=request.slots, overrides=request.overrides
        )
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
    base = found.of(lambda: read_base(document, request.context_dir, devices))
    found.of(lambda: check_run_dir(run_dir))
    found.raise_any()
    assert base is not None
    found.warn(base.resolved.warnings)
    for warning in found.warnings:
        say(f"warning: {warning}")
    created = now.isoformat(timespec="seconds")
    return Workbench(request=request, base=base, run_dir=run_dir.resolve(), created=created, say=say)


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
        for file in sorted(Path(parent, name) for name in files if name.endswith(".py")):
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


def unmeasured(variant: Variant, status: str, reason: str) -> Row:
    """The row of a variant without numbers."""
    known: dict[str, Any] = {}
    if variant.resolved is not None:
        batch = variant.resolved.batch
        known = {name: getattr(batch, name) for name in ("micro_batch_size", "accumulation", "replicas")}
        known["samples_per_step"] = batch.global_batch_size
        known["precision"] = variant.resolved.strategy.precision
    stage, stages = variant.choice.zero_stage, variant.choice.pipe_parallel_size
    row = Row(name=variant.name, slots=variant.choice.slots, status=status, reason=reason)
    return replace(row, zero_stage=stage, pipe_parallel_size=stages, **known)


def in_words(row: Row) -> str:
    """A measurement in a line."""
    if row.status != MEASURED or row.median_step_seconds is None:
        return f"{row.status}: {row.reason}"
    return f"{1000 * row.median_step_seconds:,.0f} ms a step, {row.samples_per_second:,.1f} samples/s"
