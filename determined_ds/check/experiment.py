"""One experiment: its configuration, every point of its search space, its trial or script, and its metric."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.check.output import ERROR, Report, findings_of, in_order
from determined_ds.check.search import search_problems
from determined_ds.check.space import judge_points, point_findings
from determined_ds.check.trial import (
    code_problems,
    metric_problems,
    reported_metrics,
    stages_problem,
    trial_problems,
)
from determined_ds.cluster.log import ERROR as LOGGED
from determined_ds.cluster.log import LOG_POLICIES, NO_RESTART_HELPS, OUT_OF_MEMORY
from determined_ds.config.keys import CLUSTER
from determined_ds.config.layout import Accelerator, assumed_cuda
from determined_ds.config.params import (
    LOGGING,
    SHORTHANDS,
    limit_problem,
    lost_on_cluster,
    read_hyperparameters,
    read_loggers,
)
from determined_ds.config.resolve import ResolvedConfig, Where, missing_packages
from determined_ds.documents.document import Document
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.decide import left_open, no_length, resolve_stated
from determined_ds.experiment.entrypoint import launcher_problem
from determined_ds.experiment.experiment import Experiment, ignored_keys_of, read_experiment
from determined_ds.experiment.schema import experiment_problems
from determined_ds.experiment.secrets import secret_problems
from determined_ds.experiment.source import Script, find_code, read_trial
from determined_ds.experiment.space import odd_exponents, points_of
from determined_ds.experiment.variables import variable_problems

# Codes of problems that follow from a hyperparameter that is invalid or has another name, and so is not there.
OF_ABSENCE = ("auto-undetermined", "batch", "batch-missing", "max-length")
STRATEGY = tuple(
    f"hyperparameters.{name}" for name in ("deepspeed_config", "overwrite_deepspeed_args", *SHORTHANDS)
)
# Devices of a large machine: a trial with more slots spans machines, as far as can be known before it is there.
LARGE = 8
# The problem of a point that does not fit a GPU; it raises a ConfigError where its model cannot be built.
DoesNotFit = Callable[[Experiment, ResolvedConfig, Path, Document], Problem | None]


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What an experiment is checked against.

    Args:
        context_dir: Of its code; None to find it.
        accelerator: ``cuda`` or ``cpu``.
        place: Where it will run, by the tables of keys: on a cluster, or in a search here.
        does_not_fit: Of a slot's GPU; None: whether points fit is not checked.
    """

    context_dir: Path | None = None
    accelerator: str = "cuda"
    place: int = CLUSTER
    does_not_fit: DoesNotFit | None = None


def check_experiment(document: Document, options: CheckOptions) -> Report:
    """Everything that a master would refuse, and much that it would accept.

    Args:
        document: The experiment's YAML, overrides applied.
        options: What it is checked against.
    """
    file, on_cluster = document.name, options.place == CLUSTER
    refused, warned = experiment_problems(document)
    unnamed, unused = variable_problems(document)
    refused, warned = [*refused, *unnamed], [*warned, *secret_problems(document), *unused]
    experiment, problems = read_experiment(document)
    of_entrypoint = [problem for problem in problems if problem.key == "entrypoint"]
    named = document.get(("entrypoint",))
    if of_entrypoint and named is not None and "determined_ds" not in str(named):  # another library trains it
        is_said = any(problem.key == "entrypoint" for problem in (*refused, *warned))
        found = findings_of(refused, [*warned, *([] if is_said else of_entrypoint)])
        return Report(file=file, kind="experiment", findings=in_order(found, file))

    # The configuration and the code
    reported = {problem.key for problem in refused}
    own = [problem for problem in problems if not _covered(problem.key, reported)]
    said = reported | {problem.key for problem in warned}
    ignored = [each for each in ignored_keys_of(document, options.place) if not _covered(each.key, said)]
    findings = findings_of([*refused, *own], [*warned, *ignored])
    if on_cluster:
        variables = str(document.get(("environment", "environment_variables"), ""))
        odd = lost_on_cluster(experiment.hyperparameters, variables)
        slots = document.get(("resources", "slots_per_trial"))
        spans = isinstance(slots, int) and slots > LARGE
        if spans and document.get(("resources", "is_single_node")) is not True:
            odd += filter(None, [launcher_problem(named, document.origin(("entrypoint",)))])
        ours = experiment.states_all and "log_policies" not in reported  # of what our own trainer logs
        findings += findings_of([], odd, _missing_policies(document) if ours else [])
    context_dir = options.context_dir or _context_of(experiment, Path(file))
    trials = functools.cache(lambda trial: read_trial(trial, context_dir))
    if experiment.trial or experiment.script is not None:
        anywhere, here = code_problems(experiment, context_dir)
        findings += findings_of(anywhere, here) if on_cluster else findings_of([*anywhere, *here])
        if experiment.trial and not anywhere:
            wrong, unknown = metric_problems(document, trials(experiment.trial), experiment.measures)
            findings += findings_of(wrong, notes=unknown)
        elif on_cluster and not anywhere:
            findings += findings_of([], _unsent(experiment, context_dir))
    errors = [finding.problem for finding in findings if finding.severity == ERROR]
    broken = {problem.key for problem in errors if f"{problem.key}.".startswith("hyperparameters.")}

    # The search, and the length of the training
    if not broken and not any(problem.key.startswith("searcher") for problem in errors):
        fit = read_hyperparameters(experiment.hyperparameters)[0].fit
        stated = experiment.hyperparameters.get(("fit",))
        stated = stated.get("max_length") if isinstance(stated, dict) else stated
        unstated = fit.max_length is None and stated is None and experiment.script is None
        metrics = (
            reported_metrics(trials(experiment.trial), experiment.measures) if experiment.trial else None
        )
        names = metrics.names if metrics and metrics.prefix is None else None
        wrong, odd = search_problems(experiment, fit, reported=names)
        odd += odd_exponents(experiment.document, experiment.space)
        odd += missing_packages(None, experiment.hyperparameters)  # the cluster's image may have them
        odd += filter(None, [limit_problem(document, fit.save_total_limit)])
        findings += findings_of([*([no_length(experiment.hyperparameters)] if unstated else []), *wrong], odd)
    # The configuration of the points is unknown.
    if "hyperparameters" in broken or any(key.startswith(STRATEGY) for key in broken):
        return Report(
            file=file, kind="experiment", findings=in_order(findings, file), context_dir=context_dir
        )

    # The points
    devices = assumed_cuda(experiment.slots)  # one a slot: whether the cluster has so many is unknown here
    if options.accelerator == "cpu":
        devices = Accelerator(name="cpu", num_devices=experiment.slots, bf16=False, fp16=False)
    where = Where(context_dir=context_dir, accelerator=devices)
    reported = {finding.problem.key for finding in findings}
    points, does_not_fit = points_of(experiment.space), options.does_not_fit
    staged = experiment.pipeline_trial

    def check(point: Document, resolved: ResolvedConfig | None) -> tuple[list[Problem], list[Problem]]:
        """What is checked of a point beside its configuration: what the trial's source shows, whether it fits."""
        problem = stages_problem(point, trials(staged)) if staged else None
        if resolved is None:
            return [problem] if problem else [], []
        if problem is None and experiment.trial:
            trained = trials(experiment.trained(resolved.topology.pipe_parallel_size))
            problem = next(iter(trial_problems(trained, point, resolved)), None)
        if problem is None and does_not_fit is not None:
            problem = does_not_fit(experiment, resolved, context_dir, point)
        # A package that is missing here may be in the cluster's image.
        return [problem] if problem else [], missing_packages(resolved.ds)

    try:
        judged = judge_points(experiment, points, where, check)
    except ConfigError as error:  # its model cannot be built, so whether it fits is unknown
        findings += findings_of([], error.problems)
        does_not_fit = None
        judged = judge_points(experiment, points, where, check)
    if not any(each.problems or each.resolved for each in judged):
        findings += findings_of([], notes=[left_open(experiment)])
    of_points = point_findings(experiment.space.axes, points, judged)
    renamed = (each.problem for each in of_points if each.problem.code in ("other-name", "unknown-key"))
    elsewhere = " ".join(problem.fix for problem in renamed).split()  # names that are stated in another way
    for finding in of_points:
        problem = finding.problem
        follows = problem.code in OF_ABSENCE and (broken or problem.key.rpartition(".")[2] in elsewhere)
        if problem.key not in reported and not follows:
            findings.append(finding)
    runs = next((each.resolved for each in judged if each.resolved), None)
    if runs is not None and experiment.searched:
        with contextlib.suppress(ConfigError):  # else the point in the middle cannot run
            runs = resolve_stated(experiment, experiment.hyperparameters, where)
    return Report(
        file=file,
        kind="experiment",
        findings=in_order(findings, file),
        num_points=len(points.values),
        num_runnable=sum(len(each.points) for each in judged if not each.problems),
        size=experiment.space.size,
        context_dir=context_dir,
        experiment=experiment,
        resolved=runs,
    )


def _covered(key: str, keys: Iterable[str]) -> bool:
    """Whether a problem of this key, or of one within or around it, is in ``keys``."""
    return any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in keys)


def _context_of(experiment: Experiment, config: Path) -> Path:
    """The folder of its code: the current one or the nearest above the configuration, with the trial in it.

    A folder that has the DeepSpeed JSON, too, is preferred.
    """
    ds_config = experiment.hyperparameters.get(("deepspeed_config",))
    folders = [Path(), *config.absolute().parents]
    with_code = [folder for folder in folders if find_code(experiment.entrypoint, folder) is not None]
    whole = (folder for folder in with_code if isinstance(ds_config, str) and (folder / ds_config).is_file())
    return next(whole, with_code[0] if with_code else Path())


def _unsent(experiment: Experiment, context_dir: Path) -> list[Problem]:
    """A warning where a script sends nothing to the tools that its experiment names."""
    file = find_code(experiment.entrypoint, context_dir)
    if file is None or not read_loggers(experiment.hyperparameters, []):
        return []
    if Script(file=file, context_dir=context_dir).may_use_library:
        return []
    message = f"{file.name} does not import determined_ds: on a cluster nothing is sent to these tools"
    fix = "train within `with determined_ds.report_to_tools(core_context):`"
    return [experiment.hyperparameters.problem((LOGGING,), message, fix, "logger-script", value=NOT_GIVEN)]


def _missing_policies(document: Document) -> list[Problem]:
    """A note where a master would restart a trial that no restart can help; its fix has the lines to paste.

    An experiment that states no ``max_restarts`` is left alone: it is a first draft, and costs minutes at worst.
    """
    allowed, stated = document.get(("max_restarts",)), document.get(("log_policies",))
    policies = stated if isinstance(stated, list) else []

    def ends_at(policy: Any, line: str) -> bool:
        """Whether a policy cancels restarts at a log line."""
        cancels = ("cancel_retries", {"type": "cancel_retries"})
        if not isinstance(policy, dict) or policy.get("action") not in cancels:
            return False
        try:
            return re.search(str(policy.get("pattern")), line) is not None
        except re.error:  # Go's syntax differs from Python's
            return False

    lines = [line.removeprefix(LOGGED) for line in (NO_RESTART_HELPS, OUT_OF_MEMORY)]
    missing = [
        f"{{{', '.join(f'{key}: {json.dumps(value)}' for key, value in ours.items())}}}"
        for ours, line in zip(LOG_POLICIES, lines, strict=True)
        if not any(ends_at(policy, line) for policy in policies)
    ]
    if not missing or not isinstance(allowed, int) or allowed < 1:
        return []
    message = f"a failure that no restart can help, e.g. missing data, runs {allowed + 1} times on a cluster"
    fix = f"add {'to it' if policies else 'log_policies'}: [{', '.join(missing)}]"
    origin = document.origin(("log_policies" if policies else "max_restarts",))
    return [Problem(key="log_policies", origin=origin, message=message, fix=fix, code="log-policies")]
