"""Files to check -> Reports: an experiment's YAML, a DeepSpeed JSON or code each, and the context directories once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from determined_ds.check.output import Report, findings_of, in_order
from determined_ds.config.create import problems_alone
from determined_ds.config.resolve import missing_packages
from determined_ds.documents.files import read_json, read_yaml
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import OF_EXPERIMENTS, with_flags

if TYPE_CHECKING:
    from determined_ds.check.experiment import CheckOptions, DoesNotFit


def apart(paths: Sequence[Path], context_dir: Path | None) -> tuple[Sequence[Path], Path | None]:
    """The files and the context directory, None where neither ``CONFIG ... [CONTEXT_DIR]`` nor ``--context`` has it.

    Raises:
        ConfigError: two folders are given, or one that does not come last.
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
    does_not_fit: DoesNotFit | None = None,
) -> list[Report]:
    """Check files, each by itself.

    Args:
        files: Experiments, DeepSpeed JSONs, or scripts and trials to be brought here.
        context_dir: Of the experiments' code; None to find it for each.
        slots: Instead of ``resources.slots_per_trial``.
        overrides: ``KEY=VALUE``, which overwrite values of every experiment.
        accelerator: ``cuda`` or ``cpu``.
        does_not_fit: As in :class:`~determined_ds.check.experiment.CheckOptions`.

    Returns:
        A report for each file, then one for each context directory in which something was found.

    Raises:
        ConfigError: the context directory is not a folder.
    """
    from determined_ds.check.experiment import CheckOptions
    from determined_ds.check.sent_files import context_problems

    if context_dir is not None and not context_dir.is_dir():
        message = "is a file, not a folder" if context_dir.exists() else "no such folder"
        fix = "give the folder that holds the model's code, e.g. `.`"
        raise ConfigError(Problem(key="--context", value=str(context_dir), message=message, fix=fix))
    options = CheckOptions(context_dir=context_dir, accelerator=accelerator, does_not_fit=does_not_fit)
    reports = [_check_file(file, options, slots, overrides) for file in files]
    folders = {each.context_dir.resolve(): each.context_dir for each in reversed(reports) if each.context_dir}
    for folder in reversed(folders.values()):
        if found := in_order(findings_of(*context_problems(folder)), str(folder)):
            reports.append(Report(file=str(folder), kind="context", findings=found))
    return reports


def _check_file(file: Path, options: CheckOptions, slots: int | None, overrides: Sequence[str]) -> Report:
    name = str(file)
    if file.suffix == ".py":
        from determined_ds.check.advice import advice

        changes, command = advice(file)
        return Report(file=name, kind="code", findings=in_order(changes, name), run=command)
    try:
        document = read_json(file) if file.suffix == ".json" else read_yaml(file)
        if file.suffix == ".json" and not OF_EXPERIMENTS & document.data.keys():
            errors, warnings = problems_alone(document)
            found = in_order(findings_of(errors, [*warnings, *missing_packages(document)]), name)
            return Report(file=name, kind="deepspeed", findings=found)
        document = with_flags(document, slots=slots, overrides=overrides)
    except ConfigError as error:  # it cannot be read
        return Report(file=name, kind="experiment", findings=in_order(findings_of(error.problems), name))
    from determined_ds.check.experiment import check_experiment

    return check_experiment(document, options)
