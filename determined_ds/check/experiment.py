"""One experiment: its configuration, every point of its search space, its trial and its metric."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.check.log_policies import missing_policies
from determined_ds.check.output import ERROR, Finding, Report, findings_of, in_order
from determined_ds.check.space import Judgement, judge_points, point_findings, search_problems
from determined_ds.check.trial import (
    check_script,
    check_trial,
    metric_problems,
    missing_imports,
    reported_metrics,
    stages_problem,
    trial_problems,
)
from determined_ds.config.keys import CLUSTER
from determined_ds.config.layout import Accelerator, assumed_cuda
from determined_ds.config.loggers import LOGGING, lost_on_cluster, read_loggers
from determined_ds.config.params import SHORTHANDS, limit_problem, read_hyperparameters
from determined_ds.config.resolve import ResolvedConfig, Where, missing_packages
from determined_ds.documents.document import Document
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.decide import left_open, no_length, resolve_stated
from determined_ds.experiment.entrypoint import launcher_problems
from determined_ds.experiment.experiment import Experiment, ignored_keys_of, read_experiment
from determined_ds.experiment.schema import OLDEST, experiment_problems
from determined_ds.experiment.secrets import secret_problems
from determined_ds.experiment.source import OWN_DRIVER, TrialClass, find_script, source_of
from determined_ds.experiment.space import odd_exponents, points_of
from determined_ds.experiment.variables import variable_problems

if TYPE_CHECKING:
    from determined_ds.check.fits_gpu import GpuMemory

# Codes of problems that follow from a hyperparameter that is invalid or has another name, and so is not there.
OF_ABSENCE = ("auto-undetermined", "batch", "batch-missing", "max-length")
STRATEGY = tuple(
    f"hyperparameters.{name}" for name in ("deepspeed_config", "overwrite_deepspeed_args", *SHORTHANDS)
)


Trials = Callable[[str], TrialClass]  # MODULE:CLASS -> what its source shows


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What an experiment is checked against.

    Args:
        context_dir: Of its code; None to find it.
        accelerator: ``cuda`` or ``cpu``.
        place: Where it will run, by the tables of keys: on a cluster, or in a search here.
        gpu_memory: To check whether points fit; None: not checked.
        determined_version: Of the master that will take it.
    """

    context_dir: Path | None = None
    accelerator: str = "cuda"
    place: int = CLUSTER
    gpu_memory: GpuMemory | None = None
    determined_version: str = OLDEST


def check_experiment(document: Document, options: CheckOptions) -> Report:
    """Everything that a master would refuse, and much that it would accept.

    Args:
        document: The experiment's YAML, overrides applied.
        options: What it is checked against.
    """
    file, on_cluster = document.name, options.place == CLUSTER
    refused, warned = experiment_problems(document, options.determined_version)
    unnamed, unused = variable_problems(document)
    refused, warned = [*refused, *unnamed], [*warned, *secret_problems(document), *unused]
    experiment, problems = read_experiment(document)
    of_entrypoint, stated = _of_key(problems, "entrypoint"), document.get(("entrypoint",))
    # Another library trains it.
    if of_entrypoint and stated is not None and "determined_ds" not in str(stated):
        others = [] if _of_key([*refused, *warned], "entrypoint") else of_entrypoint
        found = in_order(findings_of(refused, [*warned, *others]), file)
        return Report(file=file, kind="experiment", findings=found)

    # The configuration
    fit = read_hyperparameters(experiment.hyperparameters)[0].fit
    findings = findings_of(refused, warned)
    reported = {problem.key for problem in refused}
    ignored = ignored_keys_of(document, options.place)
    ignored = [each for each in ignored if not _covered(each.key, reported | {other.key for other in warned})]
    findings += findings_of((each for each in problems if not _covered(each.key, reported)), ignored)
    if on_cluster:
        variables = str(document.get(("environment", "environment_variables"), ""))
        lost = lost_on_cluster(experiment.hyperparameters, variables)
        policies = missing_policies(document) if experiment.states_all else []  # of what our trainer logs
        policies = [each for each in policies if not _covered(each.key, reported)]
        findings += findings_of([], [*launcher_problems(document), *lost], policies)
    context_dir = options.context_dir or _context_of(experiment, Path(file))
    trials = functools.cache(lambda trial: TrialClass(trial, context_dir))
    findings += _code_findings(experiment, context_dir, trials, on_cluster)
    errors = [finding.problem for finding in findings if finding.severity == ERROR]
    broken = {problem.key for problem in errors if f"{problem.key}.".startswith("hyperparameters.")}

    # The search, and the length of the training
    if not broken and not any(problem.key.startswith("searcher") for problem in errors):
        stated = experiment.hyperparameters.get(("fit",))
        stated = stated.get("max_length") if isinstance(stated, dict) else stated
        unstated = fit.max_length is None and stated is None and experiment.script is None
        missing = [no_length(experiment.hyperparameters)] if unstated else []
        metrics = None
        if experiment.trial:
            metrics = reported_metrics(trials(experiment.trial), experiment.measures)
        names = metrics.names if metrics and metrics.prefix is None else None
        wrong, odd = search_problems(experiment, fit, reported=names)
        odd += odd_exponents(experiment.document, experiment.space)
        odd += missing_packages(None, experiment.hyperparameters)  # the cluster's image may have them
        odd += filter(None, [limit_problem(document, fit.save_total_limit)])
        findings += findings_of([*missing, *wrong], odd)
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
    points = points_of(experiment.space)
    try:
        check = _check_of_points(experiment, context_dir, trials, options.gpu_memory)
        judged = judge_points(experiment, points, where, check)
    except ConfigError as error:  # its model cannot be built, so whether it fits is unknown
        findings += findings_of([], error.problems)
        judged = judge_points(
            experiment, points, where, _check_of_points(experiment, context_dir, trials, None)
        )
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
    return Report(
        file=file,
        kind="experiment",
        findings=in_order(findings, file),
        num_points=len(points.values),
        num_runnable=sum(len(each.points) for each in judged if not each.problems),
        size=experiment.space.size,
        context_dir=context_dir,
        experiment=experiment,
        resolved=_resolved(experiment, judged, where),
    )


def _check_of_points(
    experiment: Experiment, context_dir: Path, trials: Trials, gpu_memory: GpuMemory | None
) -> Callable[[Document, ResolvedConfig | None], tuple[list[Problem], list[Problem]]]:
    """What is checked of a point beside its configuration: what the trial's source shows, and whether it fits."""
    staged = experiment.pipeline_trial

    def check(
        hyperparameters: Document, resolved: ResolvedConfig | None
    ) -> tuple[list[Problem], list[Problem]]:
        problem = stages_problem(hyperparameters, trials(staged)) if staged else None
        if resolved is None:
            return [problem] if problem else [], []
        if problem is None and experiment.trial:
            trained = trials(experiment.trained(resolved.topology.pipe_parallel_size))
            problem = next(iter(trial_problems(trained, hyperparameters, resolved)), None)
        if problem is None and gpu_memory is not None:
            problem = gpu_memory.problem_of(experiment, resolved, context_dir, hyperparameters)
        # A package that is missing here may be in the cluster's image.
        return [problem] if problem else [], missing_packages(resolved.ds)

    return check


def _resolved(experiment: Experiment, judged: list[Judgement], where: Where) -> ResolvedConfig | None:
    """What the middle point runs with, or else the first point that can run."""
    first = next((each.resolved for each in judged if each.resolved), None)
    if first is None or not experiment.searched:
        return first
    try:
        return resolve_stated(experiment, experiment.hyperparameters, where)
    except ConfigError:
        return first


def _of_key(problems: Iterable[Problem], key: str) -> list[Problem]:
    return [problem for problem in problems if problem.key == key]


def _covered(key: str, keys: set[str]) -> bool:
    """Whether a problem of this key, or of one within or around it, is in ``keys``."""
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


# --- The code ---------------------------------------------------------------------------------------------


def _context_of(experiment: Experiment, config: Path) -> Path:
    """The folder of its code: the current one or the nearest above the configuration, with the trial in it.

    A folder that has the DeepSpeed JSON, too, is preferred.
    """
    here, module = Path(), experiment.trial.partition(":")[0]

    def has_code(folder: Path) -> bool:
        if experiment.script is not None:
            return find_script(experiment.script, folder) is not None
        return source_of(module, folder) is not None

    ds_config = experiment.hyperparameters.get(("deepspeed_config",))
    with_code = [folder for folder in (here, *config.absolute().parents) if has_code(folder)]
    whole = (folder for folder in with_code if isinstance(ds_config, str) and (folder / ds_config).is_file())
    return next(whole, with_code[0] if with_code else here)


def _code_findings(
    experiment: Experiment, context_dir: Path, trials: Trials, on_cluster: bool
) -> list[Finding]:
    """What is wrong with the trial or the script, and with the metric that it is to report."""
    document = experiment.document
    if experiment.trial:
        try:
            check_trial(experiment.trial, context_dir, document)
        except ConfigError as error:
            return findings_of(error.problems)
        problems, notes = metric_problems(document, trials(experiment.trial), experiment.measures)
        return findings_of(problems, notes=notes)
    if experiment.script is None:
        return []
    try:
        script = check_script(experiment.script, context_dir, document)
    except ConfigError as error:
        own = [each for each in error.problems if each.code == OWN_DRIVER and on_cluster]
        return findings_of((each for each in error.problems if each not in own), own)
    if script is None:
        return []
    missing = missing_imports(script, experiment)  # the cluster's image may have them
    findings = findings_of([], missing) if on_cluster else findings_of(missing)
    metric = experiment.metric
    if metric and not script.names_metric(metric):
        message = f"could not find where {script.file.name} reports it at validation: its source does not have the name"
        fix = f'report it: core_context.train.report_validation_metrics(steps, {{"{metric}": value}})'
        unknown = document.problem(("searcher", "metric"), message, fix, "metric-unknown")
        findings += findings_of([], notes=[unknown])
    if on_cluster and not script.may_use_library and read_loggers(experiment.hyperparameters, []):
        message = (
            f"{script.file.name} does not import determined_ds: on a cluster nothing is sent to these tools"
        )
        fix = "train within `with determined_ds.report_to_tools(core_context):`"
        unsent = experiment.hyperparameters.problem(
            (LOGGING,), message, fix, "logger-script", value=NOT_GIVEN
        )
        findings += findings_of([], [unsent])
    return findings
