"""The options of ``det-ds run`` -> a run that was decided. Whatever is wrong is reported before a rank starts."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from determined_ds.check.trial import (
    check_entrypoint,
    metric_problems,
    trial_problems,
)
from determined_ds.config.keys import RUN
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import AUTO, missing_keys
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.devices import detect_accelerator, kind_of_device
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, decide_stated, read_document
from determined_ds.experiment.entrypoint import ScriptEntrypoint
from determined_ds.experiment.experiment import Experiment, ignored_keys_of, parse_experiment
from determined_ds.experiment.source import read_trial
from determined_ds.experiment.variables import Variables, variables_for
from determined_ds.launch.auto_slots import fitting_slots
from determined_ds.launch.local_run import LocalRun
from determined_ds.launch.options import RunOptions
from determined_ds.launch.placement import Placement
from determined_ds.launch.resuming import Start, keeping_seed, start_in
from determined_ds.launch.which_weights import check_options, folder_of_results, weights_to_read
from determined_ds.rundir.handed_on import BEST, LAST, count
from determined_ds.rundir.run_dir import RUNS, RunDir, new_run_dir, slug
from determined_ds.rundir.run_lock import check_run_dir

SLOTS = ("resources", "slots_per_trial")
NOTHING_YET = "--resume: nothing in the run directory to resume; starting from step 0"


def prepare_run(
    options: RunOptions, *, placed: Placement | None = None, now: datetime | None = None
) -> LocalRun:
    """Decide a run.

    Args:
        options: The command's.
        placed: This process's place, where another launcher has started the ranks: they are the slots then, and
            ``--resume`` in an empty run directory starts the run.
        now: For the name of the run directory.

    Raises:
        ConfigError: it cannot run; every reason that is known before a rank starts.
    """
    found = Problems()
    experiment, configured_slots = _stated(options, placed, found)
    experiment, resolved, devices, variables = _decided(experiment, options, placed, found)
    run_dir = options.run_dir or new_run_dir(RUNS / slug(experiment.name), now or datetime.now())
    # A scheduler's script is the same at each launch of its job, the first one included.
    stated = options.run_dir is not None
    of_this_run = options.resume in (BEST, LAST)
    is_first = of_this_run and placed is not None and stated and RunDir(run_dir).is_empty()
    resume, forks = None if is_first else options.resume, not (options.is_measured or experiment.measures)
    found.problems += check_options(options, experiment, resolved)
    if options.reset_optimizer and not options.resume:
        fix = "add --resume; to start with the weights of another run, see searcher.source_checkpoint_uuid"
        found.problems.append(
            Problem(key="--reset-optimizer", message="is for --resume", fix=fix, code="reset-optimizer")
        )
    if options.only_reads:
        start, run_dir = found.of(lambda: _reading(options, run_dir)) or (None, run_dir)
    else:
        how: dict[str, Any] = {"stated": stated, "forks": forks, "repeated": placed is not None}
        how["resets_optimizer"] = options.reset_optimizer
        start = found.of(lambda: start_in(run_dir, experiment, resolved, resume=resume, **how))
    if start is not None and start.checkpoint is not None:
        checkpoint = start.checkpoint
        experiment = keeping_seed(checkpoint, experiment)
    found.raise_any()
    assert devices is not None
    assert start is not None
    return LocalRun(
        options=options,
        experiment=experiment,
        resolved=resolved,
        accelerator=devices,
        context_dir=options.context_dir.resolve(),
        run_dir=run_dir.resolve(),
        start=replace(start, damages=(*start.damages, NOTHING_YET)) if is_first else start,
        variables=variables,
        warnings=tuple(found.warnings),
        placed=placed,
        configured_slots=configured_slots if isinstance(configured_slots, int) else None,
    )


def _stated(options: RunOptions, placed: Placement | None, found: Problems) -> tuple[Experiment, Any]:
    """The experiment, overrides included, and its own ``slots_per_trial``."""
    slots = options.stated_slots if placed is None else None
    document = read_document(options.config, options.context_dir, slots=slots, overrides=options.overrides)
    configured_slots = document.get(SLOTS)
    if placed is not None:
        document = _with_ranks(document, placed, options.stated_slots)
    found.warn(ignored_keys_of(document, RUN))
    experiment = found.need(lambda: parse_experiment(document))
    option = "--test" if options.test else "--measure" if options.is_measured else ""
    found.of(lambda: check_entrypoint(experiment, options.context_dir, option=option))
    if experiment.script is not None and options.engine != "deepspeed":
        found.problems.append(_no_engine(options.engine, experiment.script))
    return experiment, configured_slots


def _no_engine(engine: str, script: ScriptEntrypoint) -> Problem:
    """The problem of ``--engine ddp`` with a script, which makes its engines itself."""
    message = f"{script.name} makes its engines itself; only that of a trial class can be another"
    fix = f"leave {engine} out"
    return Problem(key="--engine", value=engine, message=message, fix=fix, code="engine")


def _reading(options: RunOptions, run_dir: Path) -> tuple[Start, Path]:
    """The start of a run that trains nothing, and where its results go."""
    weights = weights_to_read(options)
    there = folder_of_results(run_dir, options, weights)
    check_run_dir(there)
    return Start(weights=weights), there


def _decided(
    experiment: Experiment, options: RunOptions, placed: Placement | None, found: Problems
) -> tuple[Experiment, ResolvedConfig | None, Accelerator | None, Variables]:
    """What will run on this machine's devices; None where that is unknown."""
    devices = found.of(lambda: detect_accelerator(options.accelerator))
    if devices is None:
        return experiment, None, None, Variables()
    context_dir = options.context_dir
    if options.slots == AUTO and placed is None:
        experiment, fewer = fitting_slots(experiment, context_dir=context_dir, accelerator=devices)
        found.warn(fewer)
    there = Where(context_dir=context_dir, accelerator=devices, machines=placed.machines if placed else 1)
    resolved = found.of(lambda: decide_stated(experiment, experiment.hyperparameters, there, here=True))
    variables = found.of(lambda: variables_for(experiment.document, kind_of_device(devices))) or Variables()
    if resolved is not None:
        found.warn(resolved.warnings)
    if resolved is not None and experiment.trial:
        trained = read_trial(experiment.trained(resolved.topology.pipe_parallel_size), context_dir)
        problems = trial_problems(trained, experiment.hyperparameters, resolved)
        if not options.is_measured:
            problems += metric_problems(experiment.document, trained, experiment.measures)[0]
        found.problems += problems
    found.warn(variables.warnings)
    if not (options.is_measured or options.only_reads):
        environ = {**os.environ, **{name: value or "" for name, value in variables.values.items()}}
        found.warn(missing_keys(experiment.hyperparameters, environ))
    return experiment, resolved, devices, variables


def _with_ranks(document: Document, placed: Placement, stated: int | None) -> Document:
    """An experiment whose slots are the ranks that a launcher has started.

    Raises:
        ConfigError: ``--slots`` states another number.
    """
    if stated not in (None, placed.size):
        message = f"{placed.launcher} started {count(placed.size, 'rank')}"
        fix = f"leave --slots out, or have {placed.launcher} start {stated}"
        raise ConfigError(
            Problem(key="--slots", value=stated, message=message, fix=fix, code="launcher-slots")
        )
    return document.overwritten(SLOTS, placed.size, placed.launcher)
