"""One experiment: its configuration, every point of its search space, its trial and its metric."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.check.log_policies import missing_policies
from determined_ds.check.output import ERROR, WARNING, Finding, Share, findings_of
from determined_ds.check.space.consistency import search_problems
from determined_ds.check.space.judging import Judgement, judge_points
from determined_ds.check.space.reasons import Reason, reasons_to_fail, reasons_to_warn
from determined_ds.check.trial_class import (
    has_stages,
    metric_problem,
    metric_unknown,
    optimizer_problem,
    reported_metrics,
    scheduler_problem,
    slices_problem,
    stages_problem,
)
from determined_ds.config.accelerator import Accelerator, assumed_cuda
from determined_ds.config.deepspeed.packages import missing_packages
from determined_ds.config.hyperparameters import SHORTHANDS, read_hyperparameters
from determined_ds.config.keys import CLUSTER
from determined_ds.config.loggers import LOGGING, lost_on_cluster, missing_loggers, read_loggers
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where
from determined_ds.documents.document import Document
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.additions import OLDEST
from determined_ds.experiment.code_check import OWN_DRIVER, Script, check_script, find_script
from determined_ds.experiment.decide import left_open, no_length
from determined_ds.experiment.experiment import Experiment, read_experiment
from determined_ds.experiment.launcher import launcher_problems
from determined_ds.experiment.legacy import ignored_keys_of
from determined_ds.experiment.save_policy import limit_problem
from determined_ds.experiment.schema import experiment_problems
from determined_ds.experiment.secrets import secret_problems
from determined_ds.experiment.space.exponents import exponents
from determined_ds.experiment.space.points import Points, points_of
from determined_ds.experiment.trial_file import check_trial_file, source_of

if TYPE_CHECKING:
    from determined_ds.check.fits_gpu import GpuMemory

SPACE = "hyperparameters."
# Codes of problems that follow from an invalid hyperparameter, which is treated as absent.
OF_ABSENCE = ("auto-undetermined", "batch", "batch-missing", "max-length")
STRATEGY = tuple(f"{SPACE}{name}" for name in ("deepspeed_config", "overwrite_deepspeed_args", *SHORTHANDS))


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

    def devices(self, slots: int) -> Accelerator:
        """One device a slot: whether the cluster has so many is unknown here."""
        if self.accelerator == "cuda":
            return assumed_cuda(slots)
        return Accelerator(name="cpu", num_devices=slots, bf16=False, fp16=False)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found in an experiment.

    Args:
        findings: All of them, in no order.
        context_dir: That of the check; None where it does not matter.
        num_points: Points of the search space that were checked.
        num_runnable: Those of them that can run.
        size: Points in all; None where the space is not finite.
    """

    findings: list[Finding]
    context_dir: Path | None = None
    num_points: int = 0
    num_runnable: int = 0
    size: int | None = None


def check_experiment(document: Document, options: CheckOptions) -> Checked:
    """Everything that the master would reject, and much that it would accept."""
    refused, warned = experiment_problems(document, options.determined_version)
    warned = [*warned, *secret_problems(document)]
    experiment, problems = read_experiment(document)
    if _is_foreign(experiment, problems):  # another library trains it
        others = [] if _of_key(warned, "entrypoint") else _of_key(problems, "entrypoint")
        return Checked(findings=findings_of(refused, [*warned, *others]))
    reported = {problem.key for problem in refused}
    findings = findings_of(refused, warned)
    covered = reported | {problem.key for problem in warned}
    ignored = [each for each in ignored_keys_of(document, options.place) if not _covered(each.key, covered)]
    findings += findings_of((each for each in problems if not _covered(each.key, reported)), ignored)
    if options.place == CLUSTER:
        policies = missing_policies(document) if experiment.states_all else []  # of what our trainer logs
        variables = str(document.get(("environment", "environment_variables"), ""))
        lost = lost_on_cluster(experiment.hyperparameters, variables)
        findings += findings_of([], [*policies, *launcher_problems(document), *lost])
    context_dir = options.context_dir or _context_of(experiment, Path(document.name))
    findings += _entrypoint_findings(experiment, context_dir, options.place)
    wrong = {finding.problem.key for finding in findings if finding.severity == ERROR}
    broken = {key for key in wrong if key.startswith(SPACE)}
    if not broken and not any(key.startswith("searcher") for key in wrong):
        findings += _search_findings(experiment, context_dir)
    reported = {finding.problem.key for finding in findings}
    if any(key.startswith(STRATEGY) for key in broken):  # the configuration of the points is unknown
        return Checked(findings=findings, context_dir=context_dir)
    points = points_of(experiment.space)
    try:
        verdicts = _judged(experiment, points, context_dir, options)
    except ConfigError as error:  # its model cannot be built, so whether it fits is unknown
        findings += findings_of([], error.problems)
        verdicts = _judged(experiment, points, context_dir, dataclasses.replace(options, gpu_memory=None))
    if not any(verdict.problems or verdict.resolved for verdict in verdicts):
        findings += findings_of([], notes=[left_open(experiment)])
    findings += [
        finding
        for finding in _point_findings(experiment, points, verdicts)
        if finding.problem.key not in reported and not (broken and finding.problem.code in OF_ABSENCE)
    ]
    return Checked(
        findings=findings,
        context_dir=context_dir,
        num_points=len(points),
        num_runnable=sum(len(verdict.points) for verdict in verdicts if not verdict.problems),
        size=experiment.space.size,
    )


def _covered(key: str, keys: set[str]) -> bool:
    """Whether a problem of this key, or of one within or around it, is in ``keys``."""
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in keys)


def _of_key(problems: Iterable[Problem], key: str) -> list[Problem]:
    return [problem for problem in problems if problem.key == key]


def _is_foreign(experiment: Experiment, problems: Iterable[Problem]) -> bool:
    """Whether the entrypoint runs another library."""
    stated = experiment.document.get(("entrypoint",))
    return bool(_of_key(problems, "entrypoint")) and stated is not None and "determined_ds" not in str(stated)


def _context_of(experiment: Experiment, config: Path) -> Path:
    """The folder of its code: the current one or the nearest above the configuration, with the trial in it.

    A folder that has the DeepSpeed JSON, too, is preferred.
    """
    here = Path()
    ds_config = experiment.hyperparameters.get(("deepspeed_config",))
    with_trial = [folder for folder in (here, *config.absolute().parents) if _has_code(experiment, folder)]
    whole = (folder for folder in with_trial if isinstance(ds_config, str) and (folder / ds_config).is_file())
    return next(whole, with_trial[0] if with_trial else here)


def _has_code(experiment: Experiment, folder: Path) -> bool:
    """Whether a folder has the trial or the script."""
    if experiment.script is not None:
        return find_script(experiment.script, folder) is not None
    return source_of(experiment.trial.partition(":")[0], folder) is not None


def _entrypoint_findings(experiment: Experiment, context_dir: Path, place: int) -> list[Finding]:
    if experiment.trial:
        return _trial_findings(experiment, context_dir)
    if experiment.script is None:
        return []
    try:
        found = check_script(experiment.script, context_dir, experiment.document)
        missing = found.missing_packages() if found is not None else []  # the cluster's image may have them
        notes = _metric_notes(experiment, found) if found is not None else []
        unsent = _unsent(experiment, found) if found is not None and place == CLUSTER else []
        return findings_of(*((missing, []) if place != CLUSTER else ([], [*missing, *unsent])), notes=notes)
    except ConfigError as error:
        own = [each for each in error.problems if each.code == OWN_DRIVER and place == CLUSTER]
        return findings_of((each for each in error.problems if each not in own), own)


def _unsent(experiment: Experiment, script: Script) -> list[Problem]:
    """A warning where a script that loads nothing of this library is to report to tools."""
    if script.uses_library or not read_loggers(experiment.hyperparameters, []):
        return []
    message = f"{script.file.name} does not import determined_ds: on a cluster nothing is sent to these tools"
    fix = "train within `with determined_ds.report_to_tools(core_context):`"
    return [experiment.hyperparameters.problem((LOGGING,), message, fix, "logger-script", value=NOT_GIVEN)]


def _metric_notes(experiment: Experiment, script: Script) -> list[Problem]:
    """A note where a script does not write the name of the searcher's metric."""
    metric = experiment.metric
    if not metric or script.names_metric(metric):
        return []
    message = (
        f"could not find where {script.file.name} reports it at validation: its source does not have the name"
    )
    fix = f'report it: core_context.train.report_validation_metrics(steps, {{"{metric}": value}})'
    return [experiment.document.problem(("searcher", "metric"), message, fix, "metric-unknown")]


def _trial_findings(experiment: Experiment, context_dir: Path) -> list[Finding]:
    try:
        check_trial_file(experiment.trial, context_dir, experiment.document)
    except ConfigError as error:
        return findings_of(error.problems)
    about = (experiment.document, experiment.trial, context_dir, experiment.measures)
    problem, unknown = metric_problem(*about), metric_unknown(*about)
    return findings_of([problem] if problem else [], notes=[unknown] if unknown else [])


def _search_findings(experiment: Experiment, context_dir: Path) -> list[Finding]:
    """What is the same at every point: the length of the training, and the search itself."""
    middle, _ = read_hyperparameters(experiment.hyperparameters)
    findings = []
    own_loop = experiment.script is not None
    if (
        not own_loop
        and middle.fit.max_length is None
        and experiment.hyperparameters.get(("fit", "max_length")) is None
    ):
        findings += findings_of([no_length(experiment.hyperparameters)])
    metrics = None
    if experiment.trial:
        metrics = reported_metrics(experiment.trial, context_dir, experiment.measures)
    reported = metrics.names if metrics and metrics.prefix is None else None
    errors, warnings = search_problems(experiment, middle.fit, reported=reported)
    warnings += exponents(experiment.space.axes, experiment.document)
    warnings += missing_loggers(experiment.hyperparameters)  # the cluster's image may have them
    warnings += filter(None, [limit_problem(experiment.document, middle.fit.save_total_limit)])
    return [*findings, *findings_of(errors, warnings)]


def _judged(
    experiment: Experiment, points: Points, context_dir: Path, options: CheckOptions
) -> list[Judgement]:
    staged = experiment.pipeline_trial
    stages = has_stages(staged, context_dir) if staged else None

    def check(hyperparameters: Document, resolved: ResolvedConfig | None) -> Iterable[Problem]:
        problem = stages_problem(hyperparameters, staged) if stages is False else None
        if problem is None and resolved is not None and experiment.trial:
            trained = experiment.trained(resolved.topology.pipe_parallel_size)
            problem = optimizer_problem(trained, context_dir, resolved)
            problem = problem or scheduler_problem(trained, context_dir, resolved)
            problem = problem or slices_problem(hyperparameters, trained, context_dir, resolved)
        if problem is None and resolved is not None and options.gpu_memory is not None:
            problem = options.gpu_memory.problem_of(experiment, resolved, context_dir, hyperparameters)
        return [problem] if problem else []

    where = Where(context_dir=context_dir, accelerator=options.devices(experiment.slots))
    verdicts = judge_points(experiment, points, where, check=check)
    for index, verdict in enumerate(verdicts):  # a package that is missing here may be in the cluster's image
        missing = missing_packages(verdict.resolved.ds) if verdict.resolved else []
        verdicts[index] = dataclasses.replace(verdict, warnings=(*verdict.warnings, *missing))
    return verdicts


def _point_findings(experiment: Experiment, points: Points, verdicts: list[Judgement]) -> list[Finding]:
    """Why points cannot run: errors where none can, else warnings, as a search skips them."""
    axes = experiment.space.axes
    severity = ERROR if all(verdict.problems for verdict in verdicts) else WARNING
    reasons = [(severity, reason) for reason in reasons_to_fail(axes, verdicts)]
    reasons += [(WARNING, reason) for reason in reasons_to_warn(axes, verdicts)]
    return [_point_finding(severity, reason, points) for severity, reason in reasons]


def _point_finding(severity: str, reason: Reason, points: Points) -> Finding:
    counts = {"num_points": reason.num_points, "of": len(points)}
    share = Share(share=reason.share, exact=points.exact, where=str(reason), **counts)
    return Finding(severity=severity, problem=reason.problem, share=None if reason.everywhere else share)
