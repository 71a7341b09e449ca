"""A script of Hugging Face's Trainer, or of Accelerate: what ``determined_ds.transformers`` takes over."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from determined_ds.check.migration.source import Source, keyword
from determined_ds.check.output import WARNING, Finding

OURS = "determined_ds.transformers"
LIBRARIES = ("transformers", "trl")
ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
ACCELERATOR = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
THEIR_CALLBACK = "determined.transformers"


def trainer_calls(source: Source) -> list[ast.Call]:
    """Where a Trainer is made, of transformers or of a class that extends it."""
    of_library = {base for bases in source.classes.values() for base in bases if _is_trainer(base)}
    derived = {node.name for node in source.derived(*of_library)} if of_library else set()
    return [call for call, name in source.calls if _is_trainer(name) or name in derived]


def _is_trainer(name: str) -> bool:
    return name.split(".")[0] in LIBRARIES and name.endswith("Trainer")


def is_used(source: Source) -> bool:
    """Whether a file makes a Trainer or an Accelerator."""
    return bool(trainer_calls(source) or source.calls_of(*ACCELERATOR))


def changes(source: Source) -> Iterator[Finding]:
    """What to change, in no order."""
    yield from _imports(source)
    yield from _trainers(source)
    for call in source.calls_of(*ACCELERATOR):
        if OURS not in source.modules or keyword(call, "deepspeed_plugin") is None:
            message = "its DeepSpeed configuration is not that of the experiment"
            fix = (
                f"write Accelerator(deepspeed_plugin=deepspeed_plugin()), from {OURS} import deepspeed_plugin"
            )
            yield source.change(call, message, fix, "accelerator", severity=WARNING)


def _imports(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        found = [alias.name for alias in node.names]
        if node.module == THEIR_CALLBACK and "DetCallback" in found:
            message = "resumes without the data's position, and checks nothing of the DeepSpeed JSON"
            fix = f"write from {OURS} import DetCallback"
            yield source.change(node, message, fix, "det-callback", severity=WARNING)
        arguments = [name for name in found if name in ARGUMENTS]
        if node.module == "transformers" and arguments:
            message = "are not filled from the trial's hyperparameters and DeepSpeed JSON"
            fix = f"write from {OURS} import {', '.join(arguments)}"
            yield source.change(
                node, f"{' and '.join(arguments)} {message}", fix, "arguments", severity=WARNING
            )


def _trainers(source: Source) -> Iterator[Finding]:
    calls = trainer_calls(source)
    has_callback = any(name.endswith("DetCallback") for name in source.names.values())
    for call in calls:
        if not has_callback:
            message = "reports no metric and no checkpoint, and is not stopped in good order"
            fix = (
                f"from {OURS} import DetCallback, init; then with init() as core_context: ... "
                "callbacks=[DetCallback(core_context, args)]"
            )
            yield source.change(call, message, fix, "det-callback", severity=WARNING)
    made = {names[0] for call in calls if (names := source.targets.get(call))}
    for call, owner in source.methods("train"):
        if owner in made and keyword(call, "resume_from_checkpoint") is None and not call.args:
            message = "starts at step 0 where the run resumes"
            fix = f"write {owner}.train(resume_from_checkpoint=args.resume_from_checkpoint)"
            yield source.change(call, message, fix, "resume-from-checkpoint", severity=WARNING)
