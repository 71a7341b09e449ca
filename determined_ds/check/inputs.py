"""Files to check -> Reports: an experiment's YAML, a DeepSpeed JSON or code each, and the context directories once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.check.migration.what_to_change import migration_findings
from determined_ds.check.one_experiment import Checked, CheckOptions, check_experiment
from determined_ds.check.output import Report, findings_of, in_order
from determined_ds.check.sent_files import context_problems
from determined_ds.config.deepspeed.alone import problems_alone
from determined_ds.config.deepspeed.packages import missing_packages
from determined_ds.documents.reading import read_json, read_yaml
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.additions import OLDEST
from determined_ds.experiment.decide import OF_EXPERIMENTS, Problems, with_flags

if TYPE_CHECKING:
    from determined_ds.check.fits_gpu import GpuMemory


def apart(paths: Sequence[Path], context_dir: Path | None) -> tuple[Sequence[Path], Path | None]:
    """Take the arguments ``CONFIG ... [CONTEXT_DIR]`` apart: a folder that comes last is the context directory.

    Args:
        paths: As the user gave them, >= 1.
        context_dir: Of ``--context``.

    Returns:
        The files to check, and the context directory; None where neither states it.

    Raises:
        ConfigError: two folders are given.
    """
    folders = [path for path in paths if path.is_dir()]
    if len(paths) < 2 or not folders:
        return paths, context_dir
    stated = [*folders, *([context_dir] if context_dir is not None else [])]
    if len(stated) > 1:
        named = " and ".join(map(str, stated))
        message = "are folders, and the experiments of a check have one context directory"
        fix = "give experiments, then one folder: det-ds check CONFIG ... CONTEXT_DIR"
        raise ConfigError(Problem(key="CONTEXT_DIR", value=named, message=message, fix=fix))
    if folders[0] != paths[-1]:
        fix = f"the folder comes last: det-ds check CONFIG ... {folders[0]}"
        raise ConfigError(Problem(key="CONFIG", value=str(folders[0]), message="is a folder", fix=fix))
    return paths[:-1], folders[0]


def check_files(
    files: Iterable[Path],
    *,
    context_dir: Path | None = None,
    slots: int | None = None,
    overrides: Sequence[str] = (),
    accelerator: str = "cuda",
    gpu_memory: GpuMemory | None = None,
    determined_version: str = OLDEST,
) -> list[Report]:
    """Check files, each by itself.

    Args:
        files: Experiments, DeepSpeed JSONs, or scripts and trials to be brought here.
        context_dir: Of the experiments' code; None to find it for each.
        slots: Instead of ``resources.slots_per_trial``.
        overrides: ``KEY=VALUE``, which overwrite values of every experiment.
        accelerator: ``cuda`` or ``cpu``.
        gpu_memory: Of a slot, to check whether each point fits; None: not checked.
        determined_version: Of the master that will take the experiments.

    Returns:
        A report for each file, then one for each context directory in which something was found.

    Raises:
        ConfigError: the context directory is not a folder.
    """
    if context_dir is not None and not context_dir.is_dir():
        message = "is a file, not a folder" if context_dir.exists() else "no such folder"
        fix = "give the folder that holds the model's code, e.g. `.`"
        raise ConfigError(Problem(key="--context", value=str(context_dir), message=message, fix=fix))
    options = CheckOptions(
        context_dir=context_dir,
        accelerator=accelerator,
        gpu_memory=gpu_memory,
        determined_version=determined_version,
    )
    reports: list[Report] = []
    contexts: dict[Path, Path] = {}
    for file in files:
        report, used = _check_file(file, options, slots, overrides)
        reports.append(report)
        if used is not None:
            contexts.setdefault(used.resolve(), used)
    found = (_context_report(folder) for folder in contexts.values())
    return [*reports, *(report for report in found if report.findings)]


def _check_file(
    file: Path, options: CheckOptions, slots: int | None, overrides: Sequence[str]
) -> tuple[Report, Path | None]:
    if file.suffix == ".py":
        changes, command = migration_findings(file)
        return Report(file=str(file), kind="code", findings=in_order(changes, str(file)), run=command), None
    found = Problems()
    kind, checked = "experiment", Checked(findings=[])
    document = found.of(lambda: read_json(file) if file.suffix == ".json" else read_yaml(file))
    if document is not None and file.suffix == ".json" and not OF_EXPERIMENTS & document.data.keys():
        kind = "deepspeed"
        errors, warnings = problems_alone(document)
        checked = Checked(findings=findings_of(errors, [*warnings, *missing_packages(document)]))
    elif document is not None:
        document = found.of(partial(with_flags, document, slots=slots, overrides=overrides))
        checked = check_experiment(document, options) if document is not None else checked
    report = Report(
        file=str(file),
        kind=kind,
        findings=in_order([*findings_of(found.problems), *checked.findings], str(file)),
        num_points=checked.num_points,
        num_runnable=checked.num_runnable,
        size=checked.size,
    )
    return report, checked.context_dir


def _context_report(folder: Path) -> Report:
    findings = findings_of(*context_problems(folder))
    return Report(file=str(folder), kind="context", findings=in_order(findings, str(folder)))
