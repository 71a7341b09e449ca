"""From the options of ``det-ds search`` to a search that can start; every problem known before is reported here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from determined_ds.check.experiment import CheckOptions, check_experiment
from determined_ds.check.output import ERROR, Finding
from determined_ds.check.trial import stages_problem
from determined_ds.config.keys import SEARCH
from determined_ds.config.params import TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.documents.document import Difference, Document, differences, get_path, words
from determined_ds.documents.files import read_yaml
from determined_ds.documents.text import as_plain
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.decide import Problems, decide_stated, read_document
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.secrets import masked
from determined_ds.experiment.source import read_trial
from determined_ds.launch.forking import CHECKPOINT, fork_of
from determined_ds.launch.local_run import as_constants
from determined_ds.rundir.run_dir import EXPERIMENT, RUNS, RunDir, new_run_dir, run_dir_problem, short, slug
from determined_ds.rundir.run_lock import check_run_dir
from determined_ds.search.machine_slots import Machine, machine_accelerator, machine_of, machine_warnings
from determined_ds.search.methods import Create, Search, make_search, with_defaults
from determined_ds.search.study import STUDY

# Parts of an experiment's configuration that may change when its search is resumed.
NOT_THE_SEARCH = words("""description integrations labels log_policies max_restarts name notes project retention_policy
    workspace""")
LEFT_OPEN = "left-open"
MAX_LENGTH = ("searcher", "max_length")
MAX_RESTARTS = 5  # Determined's default
MOST_DIFFERENCES = 12


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
        given = self.experiment.config.get("max_restarts")
        return MAX_RESTARTS if given is None else self.experiment.max_restarts

    def search(self) -> Search:
        """Its method, from the beginning."""
        return make_search(self.searcher, self.experiment.space)

    def point(self, create: Create) -> dict[str, Any]:
        """The searched hyperparameters of a trial, by dotted name."""
        return {axis.name: get_path(create.hparams, axis.path) for axis in self.experiment.space.axes}

    def judge(self, create: Create) -> ResolvedConfig | None:
        """What a trial will run with; None where its code decides that.

        Raises:
            ConfigError: its point is impossible.
        """
        experiment, hyperparameters = self.experiment, self.experiment.at(create.hparams)
        staged = experiment.pipeline_trial
        problem = stages_problem(hyperparameters, read_trial(staged, self.context_dir)) if staged else None
        if problem is not None:
            raise ConfigError(problem)
        where = Where(context_dir=self.context_dir, accelerator=self.machine.accelerator)
        return decide_stated(experiment, hyperparameters, where, here=True)

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
        source = experiment.document.get(CHECKPOINT)
        if source is not None:
            data["searcher"][CHECKPOINT[-1]] = source
        return Document(name=experiment.document.name, data=data)


def digest_of(config: Mapping[str, Any]) -> str:
    """A digest of all in a configuration that decides its search."""
    kept = {key: value for key, value in masked(config).items() if key not in NOT_THE_SEARCH}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


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
    document = read_document(config, context_dir, slots=slots, overrides=overrides, command="search")
    found = Problems()
    devices = found.of(lambda: machine_accelerator(accelerator))
    asked = CheckOptions(
        context_dir=context_dir, accelerator=devices.name if devices else "cpu", place=SEARCH
    )
    # A script may decide what is not stated.
    findings = [each for each in check_experiment(document, asked).findings if each.problem.code != LEFT_OPEN]
    found.warn(finding.problem for finding in findings if not _is_error(finding))
    errors = [finding.problem for finding in findings if _is_error(finding)]
    found.problems += [problem for problem in errors if problem not in found.problems]
    found.raise_any()
    experiment = parse_experiment(document)
    assert devices is not None
    machine = found.of(lambda: machine_of(experiment, devices, machine_slots))
    where = run_dir or new_run_dir(RUNS / slug(experiment.name), datetime.now())
    fork, damages = found.of(lambda: fork_of(experiment, where)) or (None, ())
    if fork is not None:  # the same for all trials, whenever they start
        experiment = parse_experiment(
            document.overwritten(CHECKPOINT, str(fork.path), document.origin(CHECKPOINT))
        )
    found.of(lambda: check_start(where, experiment, resume=resume, stated=run_dir is not None))
    found.raise_any()
    assert machine is not None
    words = ["--machine-slots", str(machine_slots)] if machine_slots else []
    words += ["--accelerator", accelerator] if accelerator else []
    return SearchPlan(
        experiment=experiment,
        context_dir=context_dir.resolve(),
        run_dir=where.resolve(),
        machine=machine,
        resume=resume,
        warnings=(*_shown(findings), *damages, *machine_warnings(experiment, machine)),
        words=tuple(words),
    )


def _is_error(finding: Finding) -> bool:
    here = (
        finding.problem.code == "missing-package" and finding.share is None
    )  # its trials run on this machine
    return finding.severity == ERROR or finding.problem.code == "search-nothing" or here


def _shown(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        points = f"\n  points: {finding.share}" if finding.share else ""
        if not _is_error(finding):
            yield f"{finding.problem}{points}"


# ---------------------------------------------------------------------------------------- the run directory


def check_start(run_dir: Path, experiment: Experiment, *, resume: bool, stated: bool) -> None:
    """Check that a search can begin in a folder, or resume the one in it.

    Raises:
        ConfigError: it cannot.
    """
    check_run_dir(run_dir)
    there = run_dir / STUDY
    begun = there.is_file() and there.stat().st_size > 0
    if resume and not stated:
        runs = sorted(run_dir.parent.glob(f"*/{STUDY}"), reverse=True)
        fix = (
            f"add --run-dir {short(runs[0].parent)}" if runs else "add the --run-dir of the search to resume"
        )
        raise ConfigError(Problem(key="--resume", message="needs the --run-dir to resume from", fix=fix))
    if RunDir(run_dir).metrics.exists():
        fix = "give another --run-dir"
        raise ConfigError(run_dir_problem(run_dir, "contains a run of one trial, not a search", fix))
    if begun and not resume:
        fix = "add --resume to resume it, or use another --run-dir"
        raise ConfigError(run_dir_problem(run_dir, "already contains a search", fix))
    if resume:
        _check_same(run_dir, experiment)


def _check_same(run_dir: Path, experiment: Experiment) -> None:
    """The configuration must be the one that the search was begun with, in all that decides it."""
    path = RunDir(run_dir).experiment
    if not path.is_file():
        fix = "use the --run-dir of a search, or leave out --resume"
        raise ConfigError(
            run_dir_problem(run_dir, f"contains no search: there is no {EXPERIMENT} in it", fix)
        )
    before = read_yaml(path)
    now = experiment.document.holding(masked(experiment.config))  # as what was written has no secrets
    was, value = ({k: v for k, v in one.data.items() if k not in NOT_THE_SEARCH} for one in (before, now))
    problems = [_another_search(before, now, difference) for difference in differences(was, value)]
    if len(problems) > MOST_DIFFERENCES:
        fix = f"resume with {path}, or use another --run-dir"
        raise ConfigError(
            run_dir_problem(run_dir, f"contains another search: {len(problems)} values differ", fix)
        )
    if problems:
        raise ConfigError(problems)


def _another_search(before: Document, now: Document, difference: Difference) -> Problem:
    path, was = difference.path, difference.was
    said = "was not given" if was is NOT_GIVEN else f"was {json.dumps(was, default=str)}"
    return Problem(
        key=now.key(path),
        value=difference.now,
        origin=now.origin(path),
        message=f"{said} when the search in {before.origin(path)} began",
        fix="restore the earlier value, or use another --run-dir without --resume",
        code="another-search",
    )
