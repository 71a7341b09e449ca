"""Files to check -> Reports. Of an experiment: its configuration, every point of its space, its code, its search."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from determined_ds.check.output import ERROR, SEVERITIES, Finding, Report, findings_of
from determined_ds.check.sent_files import context_problems
from determined_ds.check.space import judge_points, search_problems
from determined_ds.check.trial import code_problems, metric_problems
from determined_ds.config.keys import CLUSTER
from determined_ds.config.layout import Accelerator, assumed_cuda
from determined_ds.config.params import LOGGING, lost_on_cluster, read_hyperparameters
from determined_ds.config.resolve import Where, missing_packages, problems_alone
from determined_ds.documents.document import Document
from determined_ds.documents.files import read_json, read_yaml
from determined_ds.errors import ConfigError
from determined_ds.experiment.decide import OF_EXPERIMENTS, left_open, no_length, resolve_stated
from determined_ds.experiment.experiment import (
    ignored_keys_of,
    read_experiment,
    variable_problems,
    with_flags,
)
from determined_ds.experiment.schema import experiment_problems
from determined_ds.experiment.secrets import secret_problems
from determined_ds.experiment.source import OWN_DRIVER, find_code, may_use_library, read_trial
from determined_ds.experiment.space import odd_exponents, points_of

# Codes of problems that follow from a hyperparameter that is invalid or has another name, and so is not there.
OF_ABSENCE = ("auto-undetermined", "batch", "batch-missing", "max-length")
OF_NAMES = ("other-name", "unknown-key")
STRATEGY = ("hyperparameters.deepspeed_config", "hyperparameters.overwrite_deepspeed_args")


def check_files(
    files: Iterable[Path],
    *,
    context_dir: Path | None = None,
    slots: int | None = None,
    overrides: Sequence[str] = (),
    accelerator: str = "cuda",
) -> list[Report]:
    """Check files, each by itself.

    Args:
        files: Experiments, DeepSpeed JSONs, or scripts and trials to be brought here.
        context_dir: Of the experiments' code; None to find it for each.
        slots: Instead of ``resources.slots_per_trial``.
        overrides: ``KEY=VALUE``, which overwrite values of every experiment.
        accelerator: ``cuda`` or ``cpu``.

    Returns:
        A report for each file, then one for each context directory in which something was found.
    """

    def report_of(file: Path) -> Report:
        name = str(file)
        if file.suffix == ".py":
            from determined_ds.check.advice import advice

            changes, command = advice(file)
            return Report(file=name, kind="code", findings=changes, run=command)
        try:
            document = read_json(file) if file.suffix == ".json" else read_yaml(file)
            if file.suffix == ".json" and not OF_EXPERIMENTS & document.data.keys():
                errors, warnings = problems_alone(document)
                found = findings_of(errors, warnings)
                return Report(file=name, kind="deepspeed", findings=found)
            document = with_flags(document, overrides, slots=slots)
        except ConfigError as error:  # it cannot be read
            return Report(file=name, kind="experiment", findings=findings_of(error.problems))
        return check_experiment(document, context_dir=context_dir, accelerator=accelerator)

    reports = [report_of(file) for file in files]
    folders = {each.context_dir.resolve(): each.context_dir for each in reports if each.context_dir}
    for folder in folders.values():
        if found := findings_of(*context_problems(folder)):
            reports.append(Report(file=str(folder), kind="context", findings=found))
    return reports


def check_experiment(
    document: Document,
    *,
    context_dir: Path | None = None,
    accelerator: str = "cuda",
    place: int = CLUSTER,
) -> Report:
    """Everything that a master would refuse, and much that it would accept.

    Args:
        document: The experiment's YAML, overrides applied.
        context_dir: Of its code; None to find it.
        accelerator: ``cuda`` or ``cpu``.
        place: Where it will run, by the tables of keys: on a cluster, or in a search here.
    """
    file, on_cluster, findings = document.name, place == CLUSTER, list[Finding]()

    def add(more: Iterable[Finding]) -> None:
        """Add what is not said yet: by one as severe, at the key or at one within it or around it."""
        said = [(SEVERITIES.index(each.severity), f"{each.problem.key}.") for each in findings]
        for each in more:
            rank, key = SEVERITIES.index(each.severity), f"{each.problem.key}."
            if not any(top <= rank and (key.startswith(at) or at.startswith(key)) for top, at in said):
                findings.append(each)

    # What a master says, and what of the configuration is not read
    refused, deprecated = experiment_problems(document)
    unnamed, unused = variable_problems(document)
    add(findings_of([*refused, *unnamed], [*deprecated, *secret_problems(document), *unused]))
    experiment, problems = read_experiment(document)
    of_entrypoint = [problem for problem in problems if problem.key == "entrypoint"]
    stated = document.get(("entrypoint",))
    if of_entrypoint and stated is not None and "determined_ds" not in str(stated):
        # Another library trains it.
        add(findings_of([], of_entrypoint))
        return Report(file=file, kind="experiment", findings=findings)
    add(findings_of(problems, ignored_keys_of(experiment, place)))
    if on_cluster:
        variables = str(document.get(("environment", "environment_variables"), ""))
        add(findings_of([], lost_on_cluster(experiment.hyperparameters, variables)))

    # Its code, in the current folder or in the nearest above the configuration
    above = (Path(), *Path(file).absolute().parents)
    holding = (each for each in above if find_code(experiment.entrypoint, each) is not None)
    folder = context_dir or next(holding, Path())
    problems = [] if of_entrypoint else code_problems(experiment, folder)
    is_fit = on_cluster and all(problem.code == OWN_DRIVER for problem in problems)
    add(findings_of([], problems) if is_fit else findings_of(problems))
    trial = read_trial(experiment.trial, folder) if experiment.trial and not experiment.measures else None
    if trial and not problems:
        add(findings_of(metric_problems(document, trial)))
    elif experiment.script and is_fit and experiment.hyperparameters.get((LOGGING,)):
        script = find_code(experiment.entrypoint, folder)
        if script and not may_use_library(script, folder):
            message = "the script does not import determined_ds: on a cluster nothing is sent to these tools"
            fix = "train within `with determined_ds.report_to_tools(core_context):`"
            unsent = experiment.hyperparameters.problem((LOGGING,), message, fix, "logger-script")
            add(findings_of([], [unsent]))

    # Every point of the space
    errors = [finding.problem.key for finding in findings if finding.severity == ERROR]
    broken = any(f"{key}.".startswith("hyperparameters.") for key in errors)
    if any(key.startswith(STRATEGY) for key in errors):  # no point is known
        return Report(file=file, kind="experiment", findings=findings, context_dir=folder)
    devices = assumed_cuda(experiment.slots)  # one a slot: whether the cluster has so many is unknown here
    if accelerator == "cpu":
        devices = Accelerator(name="cpu", num_devices=experiment.slots, bf16=False, fp16=False)
    origin = document.origin(("resources", "slots_per_trial"))
    where = Where(context_dir=folder, accelerator=devices, slots=experiment.slots, slots_origin=origin)
    staged = read_trial(experiment.trial, folder) if experiment.trial else None
    points = points_of(experiment.space)
    of_points, num_runnable, runs = judge_points(experiment, points, where, staged)
    renamed = any(each.severity == ERROR and each.problem.code in OF_NAMES for each in of_points)
    add(each for each in of_points if not ((broken or renamed) and each.problem.code in OF_ABSENCE))
    if num_runnable and runs is None:
        add(findings_of([], notes=[left_open(experiment)]))
    if runs is not None and experiment.searched:
        with contextlib.suppress(ConfigError):  # else the point in the middle cannot run
            runs = resolve_stated(experiment, experiment.hyperparameters, where)

    # The search, and the length of the training
    if not broken and not any(key.startswith("searcher") for key in errors):
        fit = read_hyperparameters(experiment.hyperparameters)[0].fit
        wrong, odd = search_problems(experiment, fit, trial)
        wrong += [] if experiment.script else no_length(experiment.hyperparameters)
        odd += odd_exponents(experiment.space)
        odd += missing_packages(experiment.hyperparameters)  # the cluster's image may have them
        add(findings_of(wrong, odd))
    return Report(
        file=file,
        kind="experiment",
        findings=findings,
        num_points=len(points),
        num_runnable=num_runnable,
        size=experiment.space.size,
        context_dir=folder,
        experiment=experiment,
        resolved=runs,
    )
