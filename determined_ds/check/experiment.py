"""One experiment: its configuration, every point of its search space, its trial or script, and its metric."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from determined_ds.check.output import ERROR, Report, findings_of
from determined_ds.check.search import search_problems
from determined_ds.check.space import judge_points, point_findings
from determined_ds.check.trial import (
    code_problems,
    metric_problems,
    reports,
    sequences_problem,
    stages_problem,
)
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
from determined_ds.experiment.source import OWN_DRIVER, find_code, may_use_library, read_trial
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


def check_experiment(
    document: Document,
    *,
    context_dir: Path | None = None,
    accelerator: str = "cuda",
    place: int = CLUSTER,
    does_not_fit: DoesNotFit | None = None,
) -> Report:
    """Everything that a master would refuse, and much that it would accept.

    Args:
        document: The experiment's YAML, overrides applied.
        context_dir: Of its code; None to find it.
        accelerator: ``cuda`` or ``cpu``.
        place: Where it will run, by the tables of keys: on a cluster, or in a search here.
        does_not_fit: Of a slot's GPU; None: whether points fit is not checked.
    """
    file, on_cluster = document.name, place == CLUSTER
    refused, warned = experiment_problems(document)
    unnamed, unused = variable_problems(document)
    refused, warned = [*refused, *unnamed], [*warned, *secret_problems(document), *unused]
    experiment, problems = read_experiment(document)
    of_entrypoint = [problem for problem in problems if problem.key == "entrypoint"]
    named = document.get(("entrypoint",))
    if of_entrypoint and named is not None and "determined_ds" not in str(named):  # another library trains it
        is_said = any(problem.key == "entrypoint" for problem in (*refused, *warned))
        found = findings_of(refused, warned if is_said else [*warned, *of_entrypoint])
        return Report(file=file, kind="experiment", findings=found)

    # The configuration and the code
    reported = {problem.key for problem in refused}
    refused += [problem for problem in problems if not _covered(problem.key, reported)]
    said = reported | {problem.key for problem in warned}
    warned += [each for each in ignored_keys_of(experiment, place) if not _covered(each.key, said)]
    if on_cluster:
        variables = str(document.get(("environment", "environment_variables"), ""))
        warned += lost_on_cluster(experiment.hyperparameters, variables)
        slots = document.get(("resources", "slots_per_trial"))
        on_one = document.get(("resources", "is_single_node")) is True
        if isinstance(slots, int) and slots > LARGE and not on_one:
            warned += filter(None, [launcher_problem(named, document.origin(("entrypoint",)))])
    findings = findings_of(refused, warned)
    folder = context_dir or _context_of(experiment, Path(file))
    trials = functools.cache(lambda trial: read_trial(trial, folder))
    if experiment.trial or experiment.script is not None:
        problems = code_problems(experiment, folder)
        is_fit = on_cluster and all(problem.code == OWN_DRIVER for problem in problems)
        findings += findings_of([], problems) if is_fit else findings_of(problems)
        if experiment.trial and not problems and not experiment.measures:
            wrong, unknown = metric_problems(document, trials(experiment.trial))
            findings += findings_of(wrong, notes=unknown)
        elif experiment.script and is_fit and read_loggers(experiment.hyperparameters):
            script = find_code(experiment.entrypoint, folder)
            if script and not may_use_library(script, folder):
                message = (
                    "the script does not import determined_ds: on a cluster nothing is sent to these tools"
                )
                fix = "train within `with determined_ds.report_to_tools(core_context):`"
                unsent = experiment.hyperparameters.problem(
                    (LOGGING,), message, fix, "logger-script", value=NOT_GIVEN
                )
                findings += findings_of([], [unsent])
    errors = [finding.problem for finding in findings if finding.severity == ERROR]
    broken = {problem.key for problem in errors if f"{problem.key}.".startswith("hyperparameters.")}

    # The search, and the length of the training
    if not broken and not any(problem.key.startswith("searcher") for problem in errors):
        fit = read_hyperparameters(experiment.hyperparameters)[0].fit
        is_read = experiment.trial and not experiment.measures
        own = functools.partial(reports, trials(experiment.trial)) if is_read else lambda metric: None
        wrong, odd = search_problems(experiment, fit, reports=own)
        odd += odd_exponents(experiment.space)
        odd += missing_packages(None, experiment.hyperparameters)  # the cluster's image may have them
        odd += filter(None, [limit_problem(document, fit.save_total_limit)])
        unstated = [] if experiment.script else no_length(experiment.hyperparameters)
        findings += findings_of([*unstated, *wrong], odd)
    if "hyperparameters" in broken or any(key.startswith(STRATEGY) for key in broken):  # no point is known
        return Report(file=file, kind="experiment", findings=findings, context_dir=folder)

    # The points
    devices = assumed_cuda(experiment.slots)  # one a slot: whether the cluster has so many is unknown here
    if accelerator == "cpu":
        devices = Accelerator(name="cpu", num_devices=experiment.slots, bf16=False, fp16=False)
    where = Where(context_dir=folder, accelerator=devices)
    reported = {finding.problem.key for finding in findings}
    points = points_of(experiment.space)
    staged = experiment.trained(2)

    def check(point: Document, resolved: ResolvedConfig | None) -> tuple[list[Problem], list[Problem]]:
        """What is checked of a point beside its configuration: what the trial's source shows, whether it fits."""
        problem = stages_problem(point, trials(staged)) if staged else None
        if resolved is None:
            return [problem] if problem else [], []
        if problem is None and experiment.trial:
            trained = trials(experiment.trained(resolved.topology.pipe_parallel_size))
            problem = sequences_problem(trained, resolved)
        if problem is None and does_not_fit is not None:
            problem = does_not_fit(experiment, resolved, folder, point)
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
        findings=findings,
        num_points=len(points.values),
        num_runnable=sum(len(each.points) for each in judged if not each.problems),
        size=experiment.space.size,
        context_dir=folder,
        experiment=experiment,
        resolved=runs,
    )


def _covered(key: str, keys: Iterable[str]) -> bool:
    """Whether a problem of this key, or of one within or around it, is in ``keys``."""
    return any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in keys)


def _context_of(experiment: Experiment, config: Path) -> Path:
    """The folder of its code: the current one or the nearest above the configuration, with the trial in it."""
    folders = (Path(), *config.absolute().parents)
    return next(
        (folder for folder in folders if find_code(experiment.entrypoint, folder) is not None), Path()
    )
