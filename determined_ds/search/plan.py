"""From the options of ``det-ds search`` to a search that can start; every problem known before is reported here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from determined_ds.check.experiment import check_experiment
from determined_ds.check.output import ERROR, Finding
from determined_ds.check.trial import stages_problem
from determined_ds.config.keys import SEARCH
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.devices import GPU_NODES, detect_accelerator
from determined_ds.documents.document import Document, differences, words
from determined_ds.documents.files import read_yaml
from determined_ds.documents.text import as_plain
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.decide import Problems, decide_stated, read_document
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.secrets import masked
from determined_ds.experiment.source import read_trial
from determined_ds.launch.resume import SOURCE, fork_of
from determined_ds.launch.run import as_constants
from determined_ds.rundir.run_dir import EXPERIMENT, RUNS, RunDir, new_run_dir, run_dir_problem, short, slug
from determined_ds.rundir.run_lock import check_run_dir
from determined_ds.search.events import EVENTS
from determined_ds.search.methods import Create, brackets_of, with_defaults

# Parts of an experiment's configuration that may change when its search is resumed.
NOT_THE_SEARCH = words("""description integrations labels log_policies max_restarts name notes project retention_policy
    workspace""")
LEFT_OPEN = "left-open"
MAX_LENGTH = ("searcher", "max_length")
MAX_RESTARTS = 5  # Determined's default
MOST_DIFFERENCES = 12
NO_LIMIT = 2**31


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the trials of a search share.

    Args:
        accelerator: What they compute on.
        slots: Its devices that they may take.
        slots_per_trial: Of each of them.
        at_once: Trials that run side by side, 1 or more; one that is larger than the machine runs alone.
        gpus: Names of these devices in ``CUDA_VISIBLE_DEVICES``; none on CPUs.
    """

    accelerator: Accelerator
    slots: int
    slots_per_trial: int
    at_once: int
    gpus: tuple[str, ...] = ()

    @property
    def threads(self) -> int | None:
        """Threads of each rank where several trials share the cores; None to leave it to ``det-ds run``."""
        if self.accelerator.name == "cuda" or self.at_once == 1 or os.environ.get("OMP_NUM_THREADS"):
            return None
        return max(1, self.accelerator.num_devices // (self.at_once * self.slots_per_trial))


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """A search that can start.

    Args:
        experiment: The configuration, overrides included.
        context_dir: The folder with the code.
        run_dir: Where everything is written.
        machine: What its trials share.
        resume: Whether it resumes the search in ``run_dir``.
        warnings: What is possible, and probably not meant so.
        words: Options beside the configuration, for the command that resumes it.
    """

    experiment: Experiment
    context_dir: Path
    run_dir: Path
    machine: Machine
    resume: bool
    warnings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @cached_property
    def searcher(self) -> dict[str, Any]:
        """The ``searcher`` section, defaults filled in."""
        return with_defaults(self.experiment.config.get("searcher") or {})

    @property
    def max_restarts(self) -> int:
        """Of a trial that crashes."""
        given = self.experiment.config.get("max_restarts")
        return MAX_RESTARTS if given is None else self.experiment.max_restarts

    @property
    def digest(self) -> str:
        """Of all in the configuration that decides the search."""
        masked_config = masked(self.experiment.config)
        kept = {key: value for key, value in masked_config.items() if key not in NOT_THE_SEARCH}
        return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()

    def judge(self, create: Create) -> ResolvedConfig | None:
        """What a trial will run with; None where its code decides that.

        Raises:
            ConfigError: its point is impossible.
        """
        experiment, staged = self.experiment, self.experiment.trained(2)
        hyperparameters = experiment.hyperparameters.holding(create.hparams)
        problem = stages_problem(hyperparameters, read_trial(staged, self.context_dir)) if staged else None
        if problem is not None:
            raise ConfigError(problem)
        where = Where(context_dir=self.context_dir, accelerator=self.machine.accelerator)
        return decide_stated(experiment, hyperparameters, where)

    def trial_document(self, create: Create) -> Document:
        """The experiment of one trial: its point and its seed as constants, and no search."""
        experiment = self.experiment
        data = as_plain(experiment.config)
        data["hyperparameters"] = {TRIAL_SEED: create.seed, **as_constants(as_plain(create.hparams))}
        data["searcher"] = {
            "name": "single",
            "metric": experiment.metric,
            "smaller_is_better": experiment.smaller_is_better,
        }
        length = experiment.document.get(MAX_LENGTH)
        if length is not None and not experiment.states_all:  # the code reads it
            data["searcher"][MAX_LENGTH[-1]] = length
        source = experiment.document.get(SOURCE)
        if source is not None:
            data["searcher"][SOURCE[-1]] = source
        return Document(name=experiment.document.name, data=data)


def prepare_search(
    config: Path,
    context_dir: Path,
    *,
    slots: int | None = None,
    machine_slots: int | None = None,
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
    found = Problems()
    devices = found.of(lambda: _devices(accelerator))
    report = check_experiment(
        document, context_dir=context_dir, accelerator=devices.name if devices else "cpu", place=SEARCH
    )

    def is_error(finding: Finding) -> bool:
        # A package that every trial needs is missing on this machine, where they run.
        here = finding.problem.code == "missing-package" and finding.share is None
        return finding.severity == ERROR or finding.problem.code == "search-nothing" or here

    # A script may decide what is not stated.
    findings = [each for each in report.findings if each.problem.code != LEFT_OPEN]
    warnings = [each for each in findings if not is_error(each)]
    found.warn(finding.problem for finding in warnings)
    errors = [finding.problem for finding in findings if is_error(finding)]
    found.problems += [problem for problem in errors if problem not in found.problems]
    found.raise_any()
    experiment = parse_experiment(document)
    assert devices is not None
    machine = found.of(lambda: machine_of(experiment, devices, machine_slots))
    where = run_dir or new_run_dir(RUNS / slug(experiment.name), datetime.now())
    fork, damages = found.of(lambda: fork_of(experiment, where)) or (None, ())
    if fork is not None:  # the same for all trials, whenever they start
        experiment = parse_experiment(document.overwritten((SOURCE, str(fork.path), document.origin(SOURCE))))
    found.of(lambda: _check_start(where, experiment, resume=resume, stated=run_dir is not None))
    found.raise_any()
    assert machine is not None
    options = ["--machine-slots", str(machine_slots)] if machine_slots else []
    options += ["--accelerator", accelerator] if accelerator else []
    shares = (
        f"{each.problem}\n  points: {each.share}" if each.share else str(each.problem) for each in warnings
    )
    return SearchPlan(
        experiment=experiment,
        context_dir=context_dir.resolve(),
        run_dir=where.resolve(),
        machine=machine,
        resume=resume,
        warnings=(*shares, *damages, *_machine_warnings(experiment, machine)),
        words=tuple(options),
    )


# ----------------------------------------------------------------------------------------- the machine


def _devices(name: str | None) -> Accelerator:
    """As :func:`detect_accelerator`, which a process of its own is asked where that loads torch.

    Raises:
        ConfigError: the accelerator does not exist here.
    """
    if name == "cpu" or not any(Path(node).exists() for node in GPU_NODES):
        return detect_accelerator(name)
    code = (
        "import dataclasses, json, sys; from determined_ds.devices import detect_accelerator;"
        "print(json.dumps(dataclasses.asdict(detect_accelerator(sys.argv[1] or None))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name or ""], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return detect_accelerator(name)  # to say what is wrong
    return Accelerator(**json.loads(done.stdout.splitlines()[-1]))


def machine_of(experiment: Experiment, devices: Accelerator, machine_slots: int | None) -> Machine:
    """The slots that trials share, and how many trials run at once on them.

    Args:
        experiment: With a search.
        devices: Of this machine.
        machine_slots: How many of them the trials may take; None: all.

    Raises:
        ConfigError: there are not as many GPUs, or more ranks than the CPUs carry.
    """
    slots = devices.num_devices if machine_slots is None else machine_slots
    if slots < 1:
        fix = "give the number of devices that the trials may take, or leave it out for all of them"
        raise ConfigError(Problem(key="--machine-slots", value=slots, message="must be 1 or more", fix=fix))
    if devices.name == "cuda" and slots > devices.num_devices:
        message = f"there {'is' if devices.num_devices == 1 else 'are'} {devices.num_devices} on this machine"
        fix = f"give at most {devices.num_devices}"
        raise ConfigError(Problem(key="--machine-slots", value=slots, message=message, fix=fix))
    message = fix = ""
    if devices.name == "cuda" and experiment.slots > slots:
        message = f"a trial takes more GPUs than the {slots} that the trials of this machine share"
        fix = f"use --slots {slots}, or --accelerator cpu"
    elif experiment.slots > devices.max_ranks:  # else each point would be found to be impossible
        message = f"this machine carries {devices.max_ranks} ranks ({devices.num_devices} CPU cores)"
        fix = f"use --slots {devices.max_ranks} or fewer"
    if message:
        path, document = ("resources", "slots_per_trial"), experiment.document
        key, origin = document.key(path), document.origin(path)
        raise ConfigError(
            Problem(key=key, value=experiment.slots, origin=origin, message=message, fix=fix, code="slots")
        )

    searcher = with_defaults(experiment.config.get("searcher") or {})
    if searcher["name"] == "single":
        wanted = 1
    else:
        stated = int(searcher["max_concurrent_trials"])
        if searcher["name"] == "adaptive_asha":
            stated = sum(bracket["max_concurrent_trials"] for bracket in brackets_of(searcher))
        max_slots = experiment.document.get(("resources", "max_slots"))
        in_slots = max(1, max_slots // experiment.slots) if isinstance(max_slots, int) else NO_LIMIT
        wanted = min(stated or NO_LIMIT, in_slots)
    gpus: tuple[str, ...] = ()
    if devices.name == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = (
            tuple(name.strip() for name in visible.split(",")) if visible else tuple(map(str, range(slots)))
        )
    return Machine(
        accelerator=devices,
        slots=slots,
        slots_per_trial=experiment.slots,
        at_once=min(max(1, slots // experiment.slots), wanted),
        gpus=gpus[:slots],
    )


def _machine_warnings(experiment: Experiment, machine: Machine) -> Iterator[str]:
    """What of the searcher is probably not meant so on this machine."""
    are = "is" if machine.slots == 1 else "are"
    where = f"there {are} {machine.slots} on this machine ({machine.accelerator.name})"
    takes = f"a trial takes {machine.slots_per_trial} slot{'s' * (machine.slots_per_trial > 1)}, and {where}"
    if machine.slots_per_trial > machine.slots:
        yield f"resources.slots_per_trial: {takes}: one trial runs at a time, and its ranks share them"
    path, fits = ("searcher", "max_concurrent_trials"), max(1, machine.slots // machine.slots_per_trial)
    stated = experiment.document.get(path)
    if isinstance(stated, int) and stated > fits and experiment.space.searcher != "single":
        at_once = "1 trial runs" if fits == 1 else f"{fits} trials run"
        yield (
            f"searcher.max_concurrent_trials = {stated} ({experiment.document.origin(path)}): {takes}:"
            f" {at_once} at a time, the others wait"
        )


# ---------------------------------------------------------------------------------------- the run directory


def _check_start(run_dir: Path, experiment: Experiment, *, resume: bool, stated: bool) -> None:
    """Check that a search can begin in a folder, or resume the one in it.

    Raises:
        ConfigError: it cannot.
    """
    check_run_dir(run_dir)

    def refuse(message: str, fix: str) -> None:
        raise ConfigError(run_dir_problem(run_dir, message, fix))

    if resume and not stated:
        runs = sorted(run_dir.parent.glob(f"*/{EVENTS}"), reverse=True)
        fix = (
            f"add --run-dir {short(runs[0].parent)}" if runs else "add the --run-dir of the search to resume"
        )
        raise ConfigError(Problem(key="--resume", message="needs the --run-dir to resume from", fix=fix))
    if RunDir(run_dir).metrics.exists():
        refuse("contains a run of one trial, not a search", "give another --run-dir")
    there = run_dir / EVENTS
    if not resume:
        if there.is_file() and there.stat().st_size > 0:
            refuse("already contains a search", "add --resume to resume it, or use another --run-dir")
        return
    path = RunDir(run_dir).experiment
    if not path.is_file():
        fix = "use the --run-dir of a search, or leave out --resume"
        refuse(f"contains no search: there is no {EXPERIMENT} in it", fix)
    before = read_yaml(path)
    now = experiment.document.holding(masked(experiment.config))  # as what was written has no secrets
    was_deciding, now_deciding = (
        {key: value for key, value in one.data.items() if key not in NOT_THE_SEARCH} for one in (before, now)
    )
    problems = []
    for each in differences(was_deciding, now_deciding):
        was = "was not given" if each.was is NOT_GIVEN else f"was {json.dumps(each.was, default=str)}"
        problems.append(
            Problem(
                key=now.key(each.path),
                value=each.now,
                origin=now.origin(each.path),
                message=f"{was} when the search in {before.origin(each.path)} began",
                fix="restore the earlier value, or use another --run-dir without --resume",
                code="another-search",
            )
        )
    if len(problems) > MOST_DIFFERENCES:
        fix = f"resume with {path}, or use another --run-dir"
        refuse(f"contains another search: {len(problems)} values differ", fix)
    if problems:
        raise ConfigError(problems)
