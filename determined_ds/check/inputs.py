"""Files to check -> Reports: an experiment, a DeepSpeed JSON or code each, and each context directory once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.check.output import Report, findings_of
from determined_ds.config.create import problems_alone
from determined_ds.config.resolve import missing_packages
from determined_ds.documents.files import read_json, read_yaml
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import OF_EXPERIMENTS
from determined_ds.experiment.experiment import with_flags

if TYPE_CHECKING:
    from determined_ds.check.experiment import DoesNotFit


def apart(paths: Sequence[Path], context_dir: Path | None) -> tuple[Sequence[Path], Path | None]:
    """The files and the context directory, None where neither ``CONFIG ... [CONTEXT_DIR]`` nor ``--context`` has it."""
    if context_dir is None and len(paths) > 1 and paths[-1].is_dir():
        return paths[:-1], paths[-1]
    return paths, context_dir


def check_files(
    files: Iterable[Path],
    *,
    context_dir: Path | None = None,
    slots: int | None = None,
    overrides: Sequence[str] = (),
    accelerator: str = "cuda",
    does_not_fit: DoesNotFit | None = None,
) -> list[Report]:
    """Check files, each by itself.

    Args:
        files: Experiments, DeepSpeed JSONs, or scripts and trials to be brought here.
        context_dir: Of the experiments' code; None to find it for each.
        slots: Instead of ``resources.slots_per_trial``.
        overrides: ``KEY=VALUE``, which overwrite values of every experiment.
        accelerator: ``cuda`` or ``cpu``.
        does_not_fit: As in :func:`~determined_ds.check.experiment.check_experiment`.

    Returns:
        A report for each file, then one for each context directory in which something was found.

    Raises:
        ConfigError: the context directory is not a folder.
    """
    from determined_ds.check.sent_files import context_problems

    if context_dir is not None and not context_dir.is_dir():
        message = "is a file, not a folder" if context_dir.exists() else "no such folder"
        fix = "give the folder that holds the model's code, e.g. `.`"
        raise ConfigError(Problem(key="--context", value=str(context_dir), message=message, fix=fix))
    reports, folders = list[Report](), dict[Path, Path]()
    for file in files:
        name = str(file)
        if file.suffix == ".py":
            from determined_ds.check.advice import advice

            changes, command = advice(file)
            reports.append(Report(file=name, kind="code", findings=changes, run=command))
            continue
        try:
            document = read_json(file) if file.suffix == ".json" else read_yaml(file)
            if file.suffix == ".json" and not OF_EXPERIMENTS & document.data.keys():
                errors, warnings = problems_alone(document)
                found = findings_of(errors, [*warnings, *missing_packages(document)])
                reports.append(Report(file=name, kind="deepspeed", findings=found))
                continue
            document = with_flags(document, overrides, slots=slots)
        except ConfigError as error:  # it cannot be read
            reports.append(Report(file=name, kind="experiment", findings=findings_of(error.problems)))
            continue
        from determined_ds.check.experiment import check_experiment

        report = check_experiment(
            document, context_dir=context_dir, accelerator=accelerator, does_not_fit=does_not_fit
        )
        reports.append(report)
        if report.context_dir:
            folders.setdefault(report.context_dir.resolve(), report.context_dir)
    for folder in folders.values():
        if found := findings_of(*context_problems(folder)):
            reports.append(Report(file=str(folder), kind="context", findings=found))
    return reports
