"""From the options of ``det-ds search`` to a search that can start; every problem known before is reported here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from determined_ds.check.experiment import check_experiment
from determined_ds.check.output import ERROR
from determined_ds.config.keys import SEARCH
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import TRIAL_SEED
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document, differences, in_words, words
from determined_ds.documents.files import read_yaml
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.experiment.experiment import SLOTS, Experiment, parse_experiment
from determined_ds.experiment.secrets import masked
from determined_ds.experiment.space import HALVING
from determined_ds.launch.resume import SOURCE, fork_of
from determined_ds.launch.run import as_constants
from determined_ds.rundir.run_dir import (
    EXPERIMENT,
    RUNS,
    RunDir,
    check_run_dir,
    new_run_dir,
    run_dir_problem,
    short,
    slug,
)
from determined_ds.search.events import EVENTS
from determined_ds.search.methods import Create, brackets_of, with_defaults

# Parts of an experiment's configuration that may change when its search is resumed.
NOT_THE_SEARCH = words("""description integrations labels log_policies max_restarts name notes project retention_policy
    workspace""")
LEFT_OPEN = "left-open"
MAX_LENGTH = ("searcher", "max_length")
MAX_RESTARTS = 5  # Determined's default
NO_LIMIT = 2**31


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the trials of a search share."""

    accelerator: Accelerator
    slots: int  # its devices that the trials may take
    slots_per_trial: int
    at_once: int  # trials that run side by side, 1 or more; one that is larger than the machine runs alone
    gpus: tuple[str, ...] = ()  # names of these devices in CUDA_VISIBLE_DEVICES; none on CPUs

    @property
    def threads(self) -> int | None:
        """Threads of each rank where several trials share the cores; None to leave it to ``det-ds run``."""
        if self.accelerator.name == "cuda" or self.at_once == 1 or os.environ.get("OMP_NUM_THREADS"):
            return None
        return max(1, self.accelerator.num_devices // (self.at_once * self.slots_per_trial))


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """A search that can start."""

    experiment: Experiment  # overrides included
    context_dir: Path
    run_dir: Path
    machine: Machine
    resume: bool  # the search in run_dir
    warnings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # options beside the configuration, for the command that resumes it

    @cached_property
    def searcher(self) -> dict[str, Any]:
        """The ``searcher`` section, defaults filled in."""
        return with_defaults(self.experiment.config.get("searcher") or {})

    def trial_document(self, create: Create) -> Document:
        """The experiment of one trial: its point and its seed as constants, and no search."""
        experiment = self.experiment
        data = as_plain(experiment.config)
        data["hyperparameters"] = {TRIAL_SEED: create.seed, **as_constants(as_plain(create.hparams))}
        if data.get("max_restarts") is None:
            data["max_restarts"] = MAX_RESTARTS
        better = experiment.smaller_is_better
        data["searcher"] = {"name": "single", "metric": experiment.metric, "smaller_is_better": better}
        kept = [SOURCE] if experiment.states_all else [SOURCE, MAX_LENGTH]  # which the code reads
        for path in kept:
            if (value := experiment.document.get(path)) is not None:
                data["searcher"][path[-1]] = value
        return Document(name=experiment.document.name, data=data)


def prepare_search(
    config: Path,
    context_dir: Path,
    *,
    slots: int | None = None,
    overrides: Iterable[str] = (),
    run_dir: Path | None = None,
    resume: bool = False,
    accelerator: str | None = None,
) -> SearchPlan:
    """Decide a search from the options of ``det-ds search``. Nothing is written, and no process of a trial started.

    Raises:
        ConfigError: it cannot run; every reason that is known before a trial is started.
    """
    document = read_document(config, context_dir, slots=slots, overrides=overrides)
    found, warnings = Problems(), []
    devices = found.of(lambda: detect_accelerator(accelerator))
    kind = devices.name if devices else "cpu"
    for each in check_experiment(document, context_dir=context_dir, accelerator=kind, place=SEARCH).findings:
        problem = each.problem
        # A package that every trial needs is missing on this machine, where they run.
        here = problem.code == "missing-package" and each.share is None
        if each.severity == ERROR or problem.code == "search-nothing" or here:
            found.problems += [problem] if problem not in found.problems else []
        elif problem.code != LEFT_OPEN:  # a script may decide what is not stated
            found.warn([problem])
            warnings.append(f"{problem}\n  points: {each.share}" if each.share else str(problem))
    found.raise_any()
    experiment = parse_experiment(document)
    assert devices is not None
    machine = found.of(lambda: machine_of(experiment, devices))
    where = run_dir or new_run_dir(RUNS / slug(experiment.name), datetime.now())
    fork, damages = found.of(lambda: fork_of(experiment, where)) or (None, ())
    if fork is not None:  # the same for all trials, whenever they start
        experiment = parse_experiment(document.overwritten((SOURCE, str(fork.path), document.origin(SOURCE))))
    found.of(lambda: _check_start(where, experiment, resume=resume, stated=run_dir is not None))
    found.raise_any()
    assert machine is not None
    return SearchPlan(
        experiment=experiment,
        context_dir=context_dir.resolve(),
        run_dir=where.resolve(),
        machine=machine,
        resume=resume,
        warnings=(*warnings, *damages),
        words=("--accelerator", accelerator) if accelerator else (),
    )


def machine_of(experiment: Experiment, devices: Accelerator) -> Machine:
    """The slots that trials share, and how many trials run at once on them. Refuses a trial with too many ranks."""
    slots, is_gpu, most = devices.num_devices, devices.name == "cuda", devices.max_ranks
    if experiment.slots > most:  # else each point would be found to be impossible
        message = f"this machine carries {most} ranks of a trial on {devices.name}"
        fix = f"use --slots {most} or fewer{', or --accelerator cpu' * is_gpu}"
        raise ConfigError(experiment.document.problem(SLOTS, message, fix, "slots", value=experiment.slots))
    searcher = with_defaults(experiment.config.get("searcher") or {})
    sections = brackets_of(searcher) if searcher["name"] in HALVING else [searcher]
    wanted = sum(int(each["max_concurrent_trials"]) for each in sections) or NO_LIMIT
    max_slots = experiment.document.get(("resources", "max_slots"))
    if isinstance(max_slots, int):
        wanted = min(wanted, max(1, max_slots // experiment.slots))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else list(map(str, range(slots)))
    return Machine(
        accelerator=devices,
        slots=slots,
        slots_per_trial=experiment.slots,
        at_once=1 if searcher["name"] == "single" else min(max(1, slots // experiment.slots), wanted),
        gpus=tuple(names[:slots]) if is_gpu else (),
    )


def _check_start(run_dir: Path, experiment: Experiment, *, resume: bool, stated: bool) -> None:
    """Check that a search can begin in a folder, or resume the one in it."""
    check_run_dir(run_dir)
    there, begun = RunDir(run_dir), run_dir / EVENTS
    if resume and not stated:
        runs = sorted(run_dir.parent.glob(f"*/{EVENTS}"), reverse=True)
        fix = f"add --run-dir {short(runs[0].parent) if runs else 'of the search to resume'}"
        raise ConfigError(Problem(key="--resume", message="needs the --run-dir to resume from", fix=fix))
    message = fix = ""
    if there.metrics.exists():
        message, fix = "contains a run of one trial, not a search", "give another --run-dir"
    elif not resume and begun.is_file() and begun.stat().st_size > 0:
        message, fix = "already contains a search", "add --resume to resume it, or use another --run-dir"
    elif resume and not there.experiment.is_file():
        message = f"contains no search: there is no {EXPERIMENT} in it"
        fix = "use the --run-dir of a search, or leave out --resume"
    if message:
        raise ConfigError(run_dir_problem(run_dir, message, fix))
    if not resume:
        return
    before = read_yaml(there.experiment)
    now = experiment.document.holding(masked(experiment.config))  # as what was written has no secrets
    problems = []
    for each in differences(before.data, now.data):
        if each.path[0] not in NOT_THE_SEARCH:
            message = f"was {in_words(each.was)} when the search in {before.origin(each.path)} began"
            fix = "restore the earlier value, or use another --run-dir without --resume"
            problems.append(now.problem(each.path, message, fix, "another-search", value=each.now))
    if problems:
        raise ConfigError(problems)
