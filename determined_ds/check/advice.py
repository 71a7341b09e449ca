"""What to change in a script or a trial of another trainer, so that ``det-ds run`` runs it, and the command for that.

It knows plain DeepSpeed, transformers' Trainer, and Determined's own ``determined.pytorch.deepspeed``.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from determined_ds.check.output import ERROR, NOTE, WARNING, Finding
from determined_ds.errors import Origin, Problem
from determined_ds.experiment.entrypoint import ENTRYPOINT_FORM, SCRIPT_FORM
from determined_ds.experiment.source import OWN_DRIVER, THEIRS, TRIALS, Source, SourceError, within

TRIAL = re.compile(rf"determined.*\.({'|'.join(TRIALS)})")
TRAINER = re.compile(r"(transformers|trl)\..*Trainer")
INITIALIZE = "deepspeed.initialize"
SHOWS = ("print", "info", "log_dist", "add_scalar", "log", "set_postfix", "write", "set_description")
# Variables that hold what is reported; what is called, or called by, something that validates.
METRIC = re.compile(r"(?i)loss|acc(uracy)?\b|perplexity|ppl\b|auc\b|f1\b")
VALIDATES = re.compile(r"(?i)(\b|_)(test|val(id(ation)?)?|eval(uate)?|dev)(\b|_|\d|loader|set|data)")
DEEPSPEED_KEYS = re.compile('"(train_batch_size|train_micro_batch_size_per_gpu|zero_optimization)"')
# Code -> severity; all others are warnings.
SEVERITIES = dict.fromkeys(("syntax", "unknown-script", OWN_DRIVER), ERROR)
SEVERITIES |= dict.fromkeys(("no-experiment", "local-rank"), NOTE)
SHUFFLES = "s.loader gives each replica its share, and shuffles by the trial's seed"
CHECKPOINT = "write s.checkpoint({}); or remove it: fit.checkpoint_period writes them"
STEPS = "write for batches in s.steps(): {}.train_batch(data_iter=batches)"
# What a script calls -> code, message, and fix for what it is called on.
CALLS = {
    "torch.device": ("device", "names a GPU: it does not run on CPUs", "write s.device"),
    "torch.cuda.set_device": ("device", "a rank's device is set before the script trains", "remove it"),
    "cuda": ("device", "moves to a GPU: it does not run on CPUs", "write {}.to(s.device)"),
    "add_argument": ("local-rank", "no launcher here passes --local_rank", "remove it: s.rank, s.device"),
    "DistributedSampler": ("sampler", SHUFFLES, "remove it"),
    "set_epoch": ("sampler", SHUFFLES, "remove {}.set_epoch(...)"),
    "save_checkpoint": ("save-checkpoint", "a run that resumes does not find this checkpoint", CHECKPOINT),
    "load_checkpoint": ("load-checkpoint", "s.checkpoint loads what a run resumes from", "remove it"),
    "train_batch": ("train-batch", "the loop around it cannot be resumed", STEPS),
}
NEEDED = {"torch.device": "cuda", "add_argument": "local"}  # a word that such a call has
OURS = "determined_ds.transformers"
# What a script imports -> code, and what is lost without that of this library.
UNFILLED = ("arguments", "are not filled from the trial's hyperparameters and DeepSpeed JSON")
IMPORTS = {
    "determined.transformers.DetCallback": ("det-callback", "resumes without the data's position"),
    "transformers.TrainingArguments": UNFILLED,
    "transformers.Seq2SeqTrainingArguments": UNFILLED,
}


def advice(file: Path) -> tuple[list[Finding], str]:
    """What to change in a script or in the file of a trial, and the command that runs it then.

    Args:
        file: It; it is read, never imported.
    """
    command = ""
    try:
        source = Source(file)
    except SourceError as error:
        line = error.line or 1
        origin = Origin(f"{file}:{line}", file=str(file), line=line, column=1)
        fix = "give the path of a file of Python" if "read" in str(error) else f"fix line {line}"
        problems = [Problem(key="", origin=origin, message=str(error), fix=fix, code="syntax")]
    else:
        trials = [node.name for node in _derived(source, TRIAL)]
        problems = [*_changes(source, bool(trials))]
        if not any(problem.code == "unknown-script" for problem in problems):
            is_run = not trials or re.search("^if __name__", source.text, re.MULTILINE)
            config, missing = _experiment(source, "" if is_run else f"{file.stem}:{trials[-1]}")
            problems += missing
            command = shlex.join(["det-ds", "run", str(config), str(file.parent)])
    return [Finding(severity=SEVERITIES.get(each.code, WARNING), problem=each) for each in problems], command


def _experiment(source: Source, trial: str) -> tuple[Path, list[Problem]]:
    """The experiment beside a file that runs it, or the one to write with a note that says so."""
    file, name = source.file, trial or source.file.name
    runs = re.compile(rf"^entrypoint:.*\b{re.escape(name)}\b", re.MULTILINE)
    for config in [*sorted(file.parent.glob("*.yaml")), *sorted(file.parent.glob("experiments/*.yaml"))]:
        if runs.search(config.read_text(errors="replace")):
            return config, []
    config = file.with_suffix(".yaml")
    jsons = sorted(file.parent.glob("*.json"))
    of_deepspeed = [path for path in jsons if DEEPSPEED_KEYS.search(path.read_text(errors="replace"))]
    ds_config = f"deepspeed_config: {of_deepspeed[0].name}" if of_deepspeed else ""
    entrypoint = (ENTRYPOINT_FORM if trial else SCRIPT_FORM).rpartition(" ")[0]
    text = (
        f"{{name: {config.stem}, entrypoint: {entrypoint} {name}, hyperparameters: {{{ds_config}}}, "
        "resources: {slots_per_trial: 1}, searcher: {name: single, metric: validation_loss}}"
    )
    message, fix = "no experiment beside it runs it", f"write {config}: {text}"
    return config, [source.problem(source.tree, message, fix, "no-experiment")]


def _changes(source: Source, has_trial: bool) -> Iterator[Problem]:
    """What to change in a file, by the trainer that it was written for."""
    own = {node.name for node in _derived(source, TRAINER)}
    trainers = [call for call, name in source.calls if name in own or TRAINER.fullmatch(name)]
    if has_trial or THEIRS in source.modules:
        yield from source.own_drivers()
        for call in _without(source, "fit", "latest_checkpoint"):
            message = "on a cluster, a trial that was paused starts again at step 0"
            fix = "add latest_checkpoint=info.latest_checkpoint, of info = det.get_cluster_info()"
            yield source.problem(call, message, fix, "latest-checkpoint")
        for problem in _of_calls(source) if has_trial else ():
            if problem.code == "device":
                yield replace(problem, fix=problem.fix.replace("s.device", "self.context.device"))
    elif trainers:
        yield from _of_transformers(source, trainers)
    elif _calls(source, INITIALIZE):
        if not _calls(source, "determined_ds.session"):
            yield from _of_deepspeed(source)
    elif not {"determined_ds", "determined"} & source.modules or "determined.pytorch" in source.modules:
        message = "neither a DeepSpeedTrial, nor a DeepSpeed script, nor one of Hugging Face's Trainer"
        fix = "give the file that calls deepspeed.initialize or makes the Trainer; or write a trial of it"
        yield source.problem(source.tree, message, fix, "unknown-script")


def _of_transformers(source: Source, trainers: list[ast.Call]) -> Iterator[Problem]:
    """What of a script of transformers' Trainer does not report, resume, or take its hyperparameters."""
    for node, _, target in source.imports:
        if target in IMPORTS:
            (code, message), name = IMPORTS[target], target.rpartition(".")[2]
            yield source.problem(node, f"{name} {message}", f"write from {OURS} import {name}", code)
    for call in trainers:
        if not any(name.endswith(".DetCallback") for name in source.modules):
            message = "reports no metric and no checkpoint, and is not stopped in good order"
            fix = f"write with init() as core_context: ... callbacks=[DetCallback(core_context, args)], of {OURS}"
            yield source.problem(call, message, fix, "det-callback")
    for call in _without(source, "train", "resume_from_checkpoint"):
        fix = f"write {_owner(call)}.train(resume_from_checkpoint=args.resume_from_checkpoint)"
        yield source.problem(call, "starts at step 0 where the run resumes", fix, "resume-from-checkpoint")


def _of_deepspeed(source: Source) -> Iterator[Problem]:
    """What ``determined_ds.session`` does in place of a script's own lines."""
    joins, engines = _calls(source, "init_process_group", "init_distributed"), _calls(source, INITIALIZE)
    place = "write in its place" if joins else "write above it"
    fix = f"import determined_ds, and {place}: with determined_ds.session() as s: with the training below it"
    message = "a loop of its own: det-ds run cannot stop, resume or measure it exactly"
    yield source.problem([*joins, *engines][0], message, fix, "session")
    yield from _of_calls(source)
    for call in engines:
        stated = {each.arg: each.value for each in call.keywords}
        is_written_out = isinstance(stated.get("config"), ast.Dict)
        instead = [] if is_written_out else ["config=s.ds_config in place of its own"]
        if data := stated.get("training_data"):
            instead.append(f"without training_data, and s.loader({ast.unparse(data)}) in place of its loader")
        message = "the engine's configuration, data and checkpoints are the script's own"
        fix = f"write {', '.join([*instead, 'and then s.checkpoint(engine), before the first batch'])}"
        yield source.problem(call, message, fix, "initialize")
    lines = source.text.splitlines()
    functions = [node for node in source.nodes if isinstance(node, ast.FunctionDef)]
    validating = [node for node in functions if VALIDATES.search(node.name)]
    for call in _calls(source, "DataLoader"):
        dataset = ast.unparse(call.args[0]) if call.args else "dataset"
        message, fix = "cannot continue where a run was stopped", f"write s.loader({dataset})"
        if VALIDATES.search(lines[call.lineno - 1]) or within(call, validating):
            message, fix = "is not divided among replicas", f"write s.validation_loader({dataset})"
        yield source.problem(call, message, fix, "data-loader")
    for call in _calls(source, *SHOWS):
        parts = (part for each in [*call.args, *call.keywords] for part in ast.walk(each))
        names = [part.id for part in parts if isinstance(part, ast.Name) and METRIC.search(part.id)]
        if names and call.col_offset:  # in a loop or a function
            entries = ", ".join(f'"{each}": {each}' for each in list(dict.fromkeys(names))[:3])
            validates = VALIDATES.search(names[0]) or within(call, validating)
            more = ", validation=True" if validates else ""
            message = "is shown, and not recorded: metrics.jsonl, TensorBoard, a search and the web UI have no metric"
            yield source.problem(call, message, f"write s.report({{{entries}}}{more})", "report")


def _of_calls(source: Source) -> Iterator[Problem]:
    """The calls of the table."""
    for called, (code, message, fix) in CALLS.items():
        for call in _calls(source, called):
            if NEEDED.get(called, "") in ast.unparse(call):
                yield source.problem(call, message, fix.format(_owner(call)), code)


def _derived(source: Source, base: re.Pattern[str]) -> list[ast.ClassDef]:
    """The classes that extend one by such a dotted name, or through another class of the file."""
    found: dict[str, ast.ClassDef] = {}
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            names = [source.name_of(each) for each in node.bases]
            if any(name in found or base.fullmatch(name) for name in names):
                found[node.name] = node
    return [*found.values()]


def _calls(source: Source, *names: str) -> list[ast.Call]:
    """The calls of what has one of some names, or ends in one: ``cuda`` is that of any module or method."""
    ends = tuple(f".{name}" for name in names)
    return [call for call, name in source.calls if f".{name}".endswith(ends)]


def _without(source: Source, method: str, argument: str) -> list[ast.Call]:
    """The calls of a method of what is called a trainer, without an argument that makes it resume."""
    calls = [call for call in _calls(source, method) if "trainer" in _owner(call).lower()]
    return [call for call in calls if argument not in {each.arg for each in call.keywords} and not call.args]


def _owner(call: ast.Call) -> str:
    """What a method is called on."""
    return ast.unparse(call.func).rpartition(".")[0]
