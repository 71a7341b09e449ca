"""A file of Python -> what to change in it to be run by ``det-ds run``, and the command that runs it."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path

from determined_ds.check.migration import determined_trial, huggingface, plain_deepspeed
from determined_ds.check.migration.source import Source
from determined_ds.check.output import ERROR, NOTE, Finding
from determined_ds.documents.reading import read_yaml
from determined_ds.errors import ConfigError, Origin, Problem
from determined_ds.experiment.code_check import THEIRS, Script, find_script
from determined_ds.experiment.entrypoint import (
    ENTRYPOINT_FORM,
    SCRIPT_FORM,
    Entrypoint,
    ScriptEntrypoint,
    TrialEntrypoint,
    read_entrypoint,
)

FOLDERS = (".", "experiments", "configs")
DEEPSPEED_KEYS = ('"train_batch_size"', '"train_micro_batch_size_per_gpu"', '"zero_optimization"')
YAML = ("*.yaml", "*.yml")


def migration_findings(file: Path) -> tuple[list[Finding], str]:
    """What to change in a script or in the file of a trial, and the command that runs it then.

    Args:
        file: It; it is read, never imported.
    """
    try:
        source = Source(file)
    except OSError as error:
        return [_unreadable(file, 1, error.strerror or str(error), "give the path of a file")], ""
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        message = f"is not Python: {getattr(error, 'msg', None) or error}"
        return [_unreadable(file, line, message, f"fix line {line}")], ""
    found = list(_changes(source))
    if any(finding.problem.code == "unknown-script" for finding in found):
        return found, ""
    entrypoint = _entrypoint(source)
    config = _experiment_of(file, entrypoint)
    if config is None:
        config = file.with_suffix(".yaml")
        found.append(_no_experiment(source, entrypoint, config))
    return found, shlex.join(["det-ds", "run", str(config), str(file.parent)])


def _changes(source: Source) -> Iterator[Finding]:
    trials = source.derived(*determined_trial.TRIALS, *determined_trial.OURS, *determined_trial.OTHER_TRIALS)
    is_determined = (
        bool(trials) or THEIRS in source.modules or bool(source.calls_of(*determined_trial.TRAINERS))
    )
    if is_determined:
        yield from determined_trial.changes(source)
    elif huggingface.is_used(source):
        yield from huggingface.changes(source)
    elif source.calls_of(plain_deepspeed.INITIALIZE) or plain_deepspeed.is_ported(source):
        yield from plain_deepspeed.changes(source)
    elif "determined_ds" not in source.modules and not source.calls_of("determined.core.init"):
        yield from plain_deepspeed.unknown(source)


def _unreadable(file: Path, line: int, message: str, fix: str) -> Finding:
    origin = Origin(f"{file}:{line}", file=str(file), line=line, column=1)
    return Finding(
        severity=ERROR, problem=Problem(key="", origin=origin, message=message, fix=fix, code="syntax")
    )


# ------------------------------------------------------------------------------------------- its experiment


def _entrypoint(source: Source) -> Entrypoint:
    """What an experiment states to run a file that is in its context directory."""
    trials = source.derived(*determined_trial.TRIALS, *determined_trial.OURS)
    runs = any(name in ("__main__",) for name in _constants(source)) or not trials
    if runs:
        return ScriptEntrypoint(words=(source.file.name,))
    return TrialEntrypoint(trial=f"{source.file.stem}:{trials[-1].name}")


def _constants(source: Source) -> Iterator[str]:
    """The strings that the top level of a file compares with: ``__main__`` of a script."""
    for node in source.tree.body:
        if isinstance(node, ast.If):
            yield from (str(each.value) for each in ast.walk(node.test) if isinstance(each, ast.Constant))


def _experiment_of(file: Path, wanted: Entrypoint) -> Path | None:
    """An experiment beside a file that runs it."""
    for folder in FOLDERS:
        for form in YAML:
            for path in sorted((file.parent / folder).glob(form)):
                if _runs(path, file, wanted):
                    return path
    return None


def _runs(path: Path, file: Path, wanted: Entrypoint) -> bool:
    try:
        found = read_entrypoint(read_yaml(path).data.get("entrypoint"))
    except ConfigError:
        return False
    if isinstance(found, TrialEntrypoint):
        return isinstance(wanted, TrialEntrypoint) and found.trial == wanted.trial
    script = find_script(found, file.parent)
    if script is None:
        return False
    try:
        return file in Script(file=script, context_dir=file.parent).trees  # itself, or a module of it
    except (OSError, SyntaxError, ValueError):
        return script == file


def _no_experiment(source: Source, entrypoint: Entrypoint, config: Path) -> Finding:
    form = ENTRYPOINT_FORM if isinstance(entrypoint, TrialEntrypoint) else SCRIPT_FORM
    said = " ".join([*form.split()[:-1], *entrypoint.words])
    stated = ", ".join(_hyperparameters(source))
    text = (
        f"{{name: {config.stem}, entrypoint: {said}, hyperparameters: {{{stated}}}, "
        "resources: {slots_per_trial: 1}, searcher: {name: single, metric: validation_loss}}"
    )
    message = "no experiment beside it runs it"
    return source.change(source.tree, message, f"write {config}: {text}", "no-experiment", severity=NOTE)


def _hyperparameters(source: Source) -> Iterator[str]:
    """Those that a script needs for ``s.ds_config``: its DeepSpeed JSON, where it names one or has one beside it."""
    constants = [node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant)]
    for value in (each for each in constants if isinstance(each, str) and each.endswith(".json")):
        if (source.file.parent / value).is_file():
            yield f"deepspeed_config: {value}"
            return
    for path in sorted(source.file.parent.glob("*.json")):
        if any(key in path.read_text(errors="replace") for key in DEEPSPEED_KEYS):
            yield f"deepspeed_config: {path.name}"
            return
