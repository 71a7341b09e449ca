"""A trial or a script of Determined's own ``determined.pytorch.deepspeed``: what runs only on its clusters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from determined_ds.check.migration.source import Source, keyword
from determined_ds.check.output import ERROR, NOTE, WARNING, Finding
from determined_ds.experiment.code_check import DRIVERS, OWN_DRIVER, THEIRS

TRIALS = (
    f"{THEIRS}.DeepSpeedTrial",
    "determined_ds.DeepSpeedTrial",
    "determined_ds.deepspeed.DeepSpeedTrial",
)
OTHER_TRIALS = ("determined.pytorch.PyTorchTrial", "determined.keras.TFKerasTrial")
OWN = ("DataParallelTrial", "PipelineTrial", "SeveralEnginesTrial", "ReconciledTrial")
OURS = (*TRIALS[1:], *(f"determined_ds.{name}" for name in OWN))
TRAINERS = ("determined_ds.deepspeed.Trainer", "determined_ds.Trainer", f"{THEIRS}.Trainer")


def changes(source: Source) -> Iterator[Finding]:
    """What to change, in no order."""
    yield from _imports(source)
    yield from _other_trials(source)
    yield from _resuming(source)
    if source.derived(*TRIALS, *OURS):
        yield from _devices(source)


def _imports(source: Source) -> Iterator[Finding]:
    used = {
        name.rpartition(".")[2] for name in _used(source) if name in {f"{THEIRS}.{each}" for each in DRIVERS}
    }
    for node in ast.walk(source.tree):
        instead = _instead(node)
        if instead is None:
            continue
        own = {alias.name for alias in getattr(node, "names", ())} & set(DRIVERS)
        drives = sorted(used | own)
        if drives:
            message = f"{' and '.join(drives)} of {THEIRS} run only on GPUs on a Determined cluster"
            yield source.change(node, message, f"write {instead}", OWN_DRIVER, severity=ERROR)
        else:
            message = "runs as it is, by determined_ds.train; determined_ds has the same names"
            yield source.change(node, message, f"write {instead}", "determined-import", severity=NOTE)


def _used(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            yield source.name_of(node)


def _instead(node: ast.AST) -> str | None:
    """The import to write in place of one of Determined's DeepSpeed module; None for any other code."""
    if isinstance(node, ast.ImportFrom) and node.module == THEIRS:
        names = ", ".join(
            f"{each.name} as {each.asname}" if each.asname else each.name for each in node.names
        )
        return f"from determined_ds.deepspeed import {names}"
    if isinstance(node, ast.ImportFrom) and node.module == "determined.pytorch":
        found = next((each for each in node.names if each.name == "deepspeed"), None)
        return None if found is None else _as(found)
    if isinstance(node, ast.Import):
        found = next((each for each in node.names if each.name == THEIRS), None)
        return None if found is None else _as(found)
    return None


def _as(alias: ast.alias) -> str:
    return f"from determined_ds import deepspeed as {alias.asname or 'det_ds'}"


def _other_trials(source: Source) -> Iterator[Finding]:
    for node in source.derived(*OTHER_TRIALS):
        message = f"{node.name} is trained without DeepSpeed"
        fix = "derive it from determined_ds.DataParallelTrial: build_model, loss and two loaders (docs/coming-from.md)"
        yield source.change(node, message, fix, "other-trial", severity=ERROR)


def _resuming(source: Source) -> Iterator[Finding]:
    trainers = {names[0] for call in source.calls_of(*TRAINERS) if (names := source.targets.get(call))}
    for call, owner in source.methods("fit"):
        made_here = any(name in owner for name in ("Trainer(",)) or owner in trainers
        if made_here and keyword(call, "latest_checkpoint") is None and not _unpacks(call):
            message = "on a cluster, a trial that was paused starts again at step 0"
            fix = "add latest_checkpoint=info.latest_checkpoint, of info = det.get_cluster_info()"
            yield source.change(call, message, fix, "latest-checkpoint", severity=WARNING)


def _unpacks(call: ast.Call) -> bool:
    return any(each.arg is None for each in call.keywords)


def _devices(source: Source) -> Iterator[Finding]:
    for call, owner in source.methods("cuda"):
        message, fix = "moves to a GPU: it does not run on CPUs", f"write self.context.to_device({owner})"
        yield source.change(call, message, fix, "device", severity=WARNING)
    for call in source.calls_of("torch.device", "torch.cuda.set_device"):
        if "cuda" in ast.unparse(call):
            message, fix = "names a GPU: it does not run on CPUs", "write self.context.device"
            yield source.change(call, message, fix, "device", severity=WARNING)
