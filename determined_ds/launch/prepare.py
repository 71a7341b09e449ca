"""The options of ``det-ds run`` -> a run that was decided. Whatever is wrong is reported before a rank starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from determined_ds.check.trial import code_problems, metric_problems
from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.checkpoints.named import find_good
from determined_ds.config.keys import RUN
from determined_ds.config.params import AUTO
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.devices import detect_accelerator, kind_of_device
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, decide_stated, read_document
from determined_ds.experiment.experiment import (
    Experiment,
    ignored_keys_of,
    parse_experiment,
    variable_problems,
    variables_for,
)
from determined_ds.experiment.source import read_trial
from determined_ds.launch.options import RunOptions
from determined_ds.launch.placement import Placement
from determined_ds.launch.resume import SLOTS, Start, keeping_seed, start_in
from determined_ds.launch.run import LocalRun, shrunk
from determined_ds.report.numbers import count
from determined_ds.rundir.handed_on import LAST, hang_timeout_s
from determined_ds.rundir.records import read_faults
from determined_ds.rundir.run_dir import RUNS, RunDir, check_run_dir, new_run_dir, slug

NOTHING_YET = "--resume: nothing in the run directory to resume; starting from step 0"


def prepare_run(
    options: RunOptions,
    *,
    placed: Placement | None = None,
    document: Document | None = None,
    machines: int = 1,
) -> LocalRun:
    """Decide a run.

    Args:
        options: The command's.
        placed: This process's place, where another launcher has started the ranks: they are the slots then, and
            ``--resume`` in an empty run directory starts the run.
        document: The experiment of a session, in place of ``config``: its script has been started already.
        machines: That the ranks of the session are spread over.

    Raises:
        ConfigError: it cannot run; every reason that is known before a rank starts.
    """
    found = Problems()
    experiment = _stated(options, placed, found) if document is None else parse_experiment(document)
    resolved, variables = None, dict[str, str | None]()
    devices = found.of(lambda: detect_accelerator(options.accelerator))
    if devices is not None:
        machines = placed.machines if placed else machines
        where = Where(context_dir=options.context_dir, accelerator=devices, machines=machines)
        if options.slots == AUTO and placed is None:
            experiment, fewer = _fitting_slots(experiment, where)
            found.warn(fewer)
        states_size = any(each.startswith("hyperparameters.micro_batch_size=") for each in options.overrides)
        if options.resume == LAST and options.run_dir is not None and not states_size:
            too_large = read_faults(RunDir(options.run_dir).recoveries).too_large
            smaller = found.of(lambda: shrunk(experiment, too_large, where))
            if smaller is not None and smaller is not experiment:
                experiment, path = smaller, ("micro_batch_size",)
                message = (
                    f"micro-batches of {too_large} have not fitted the memory in an earlier start of this run"
                )
                fix = "none is needed; to take another size: --set hyperparameters.micro_batch_size=N"
                found.warn([experiment.hyperparameters.problem(path, message, fix, "recovery")])
        resolved = found.of(lambda: decide_stated(experiment, experiment.hyperparameters, where))
        variables = found.of(lambda: variables_for(experiment.document, kind_of_device(devices))) or {}
        found.of(lambda: hang_timeout_s({**os.environ, **variables}))
    if resolved is not None:
        found.warn(resolved.warnings)
        if experiment.trial and not (options.is_measured or experiment.measures):
            trial = read_trial(experiment.trial, options.context_dir)
            found.problems += metric_problems(experiment.document, trial)
    found.warn(variable_problems(experiment.document)[1])
    run_dir = options.run_dir or new_run_dir(RUNS / slug(experiment.name), datetime.now())
    found.problems += _problems_of_evaluating(options, experiment) if options.evaluate is not None else ()
    started = found.of(lambda: _start(options, placed, experiment, resolved, run_dir))
    found.raise_any()
    assert devices is not None
    assert started is not None
    start, run_dir = started
    return LocalRun(
        options=options,
        experiment=keeping_seed(start.checkpoint, experiment) if start.checkpoint else experiment,
        resolved=resolved,
        accelerator=devices,
        context_dir=options.context_dir.resolve(),
        run_dir=run_dir.resolve(),
        start=start,
        variables=variables,
        warnings=tuple(found.warnings),
        placed=placed,
    )


def _stated(options: RunOptions, placed: Placement | None, found: Problems) -> Experiment:
    """The experiment, overrides included; under a launcher its ranks are the slots."""
    stated = None if isinstance(options.slots, str) else options.slots
    slots = stated if placed is None else None
    document = read_document(options.config, options.context_dir, slots=slots, overrides=options.overrides)
    if placed is not None:
        if stated not in (None, placed.size):
            message = f"{placed.launcher} started {count(placed.size, 'rank')}"
            fix = f"leave --slots out, or have {placed.launcher} start {stated}"
            code = "launcher-slots"
            raise ConfigError(Problem(key="--slots", value=stated, message=message, fix=fix, code=code))
        document = document.overwritten((SLOTS, placed.size, placed.launcher))
    experiment = parse_experiment(document)
    found.warn(ignored_keys_of(experiment, RUN))
    option = "--test" if options.test else "--measure" if options.is_measured else ""
    found.problems += code_problems(experiment, options.context_dir, option=option)
    return experiment


def _fitting_slots(experiment: Experiment, where: Where) -> tuple[Experiment, list[Problem]]:
    """``--slots auto``: the experiment on as many of its slots as fit this machine, unchanged where no number does."""
    accelerator = where.accelerator
    for slots in range(accelerator.max_ranks, 0, -1) if experiment.slots > accelerator.max_ranks else ():
        fewer = parse_experiment(experiment.document.overwritten((SLOTS, slots, "--slots auto")))
        try:
            decide_stated(fewer, fewer.hyperparameters, where)
        except ConfigError:
            continue
        message = f"this machine can run {accelerator.max_ranks} on {accelerator.name}; using {slots}"
        fix = f"use a machine with {experiment.slots} devices, or --accelerator cpu"
        return fewer, [experiment.document.problem(SLOTS, message, fix, "fewer-slots")]
    return experiment, []


def _start(
    options: RunOptions,
    placed: Placement | None,
    experiment: Experiment,
    resolved: ResolvedConfig | None,
    run_dir: Path,
) -> tuple[Start, Path]:
    """Where the run starts, and its run directory."""
    if options.evaluate is not None:
        run = None if options.run_dir is None else RunDir(options.run_dir)
        weights, _ = find_good(options.evaluate, run, key="--evaluate")
        if checkpoints_in(RunDir(run_dir).checkpoints):  # of a training, which stays as it is
            run_dir = run_dir / "evaluated" / weights.uuid
        check_run_dir(run_dir)
        return Start(weights=weights), run_dir
    if options.resume is not None and options.run_dir is None:
        fix = "add the --run-dir of the run to resume"
        raise ConfigError(Problem(key="--resume", message="needs the --run-dir to resume from", fix=fix))
    # A scheduler's script is the same at each launch of its job, the first one included.
    is_first = placed is not None and options.resume == LAST and RunDir(run_dir).is_empty()
    start = start_in(
        run_dir,
        experiment,
        resolved,
        resume=None if is_first else options.resume,
        forks=not (options.is_measured or experiment.measures),
    )
    return replace(start, damages=(*start.damages, NOTHING_YET)) if is_first else start, run_dir


def _problems_of_evaluating(options: RunOptions, experiment: Experiment) -> Iterator[Problem]:
    """What is wrong with what stands beside ``--evaluate``."""
    names = ("test", "resume", "report_to_master", "is_measured")
    if beside := [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]:
        message, fix = f"cannot be given together with {', '.join(beside)}", "leave one of them out"
        yield Problem(key="--evaluate", message=message, fix=fix, code="evaluate")
    if experiment.script is not None:
        message, fix = "runs trials, and this experiment runs a script", "have the script load its checkpoint"
        yield Problem(key="--evaluate", message=message, fix=fix, code="evaluate")
