"""What to change in a script or a trial of another trainer, so that ``det-ds run`` runs it, and the command for that.

It knows plain DeepSpeed, transformers' Trainer, and Determined's own ``determined.pytorch.deepspeed``.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from determined_ds.check.output import ERROR, NOTE, WARNING, Finding
from determined_ds.errors import Origin, Problem
from determined_ds.experiment.entrypoint import ENTRYPOINT_FORM, SCRIPT_FORM
from determined_ds.experiment.source import (
    DRIVERS,
    FUNCTIONS,
    OWN_DRIVER,
    THEIRS,
    TRIALS,
    Source,
    SourceError,
    keyword,
    text_of,
)

OWN_TRIALS = (f"{THEIRS}.DeepSpeedTrial", *(f"determined_ds.{name}" for name in TRIALS))
OTHER_TRIALS = ("determined.pytorch.PyTorchTrial", "determined.keras.TFKerasTrial")
TRANSFORMERS = "determined_ds.transformers"
ARGUMENTS = {"TrainingArguments", "Seq2SeqTrainingArguments"}
INITIALIZE = "deepspeed.initialize"
LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
SAMPLER = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")
SHOWS = ("print", "info", "log_dist", "add_scalar", "log", "set_postfix", "write", "set_description")
# Names of variables that hold what is reported, and of code that validates.
METRIC = re.compile(r"loss|acc(uracy)?\b|perplexity|ppl\b|auc\b|f1\b", re.IGNORECASE)
VALIDATES = re.compile(r"(^|_)(test|val(id(ation)?)?|eval(uate)?|dev)($|_|\d|loader|set|data)", re.IGNORECASE)
DEEPSPEED_KEYS = re.compile('"(train_batch_size|train_micro_batch_size_per_gpu|zero_optimization)"')
# Call, or method of an engine, a sampler or a parser -> code, severity, message, and fix for what it is called on.
SHUFFLES = "s.loader gives each replica its share, and shuffles by the trial's seed"
CALLS = {
    "deepspeed.add_config_arguments": (
        *("config-arguments", NOTE, "adds --deepspeed and --deepspeed_config, which no launcher here passes"),
        "remove it: hyperparameters.deepspeed_config names the JSON, and s.ds_config is it",
    ),
    **dict.fromkeys(SAMPLER, ("sampler", WARNING, SHUFFLES, "remove it")),
    ".set_epoch": ("sampler", WARNING, SHUFFLES, "remove {}.set_epoch(...)"),
    ".save_checkpoint": (
        *("save-checkpoint", WARNING, "a run that resumes does not find this checkpoint"),
        "write s.checkpoint({}); or remove it: fit.checkpoint_period writes them",
    ),
    ".load_checkpoint": (
        *("load-checkpoint", WARNING, "s.checkpoint loads what a run resumes from, with the data's position"),
        "remove it",
    ),
    ".train_batch": (
        *("train-batch", WARNING, "the loop around it cannot be resumed"),
        "write for batches in s.steps(): {}.train_batch(data_iter=batches)",
    ),
    ".add_argument": (
        *("local-rank", NOTE, "Determined's launchers and det-ds run pass no --local_rank"),
        "remove it: s.rank, s.distributed.local_rank and s.device",
    ),
}

Change = tuple[ast.AST, str, str, str, str]  # place, code, severity, message, fix


def advice(file: Path) -> tuple[list[Finding], str]:
    """What to change in a script or in the file of a trial, and the command that runs it then.

    Args:
        file: It; it is read, never imported.
    """
    try:
        source = Source(file)
    except SourceError as error:
        line = error.line or 1
        origin = Origin(f"{file}:{line}", file=str(file), line=line, column=1)
        fix = "give the path of a file of Python" if "read" in str(error) else f"fix line {line}"
        problem = Problem(key="", origin=origin, message=str(error), fix=fix, code="syntax")
        return [Finding(severity=ERROR, problem=problem)], ""
    trials, trainers = source.derived(*OWN_TRIALS), _trainers(source)
    changes: list[Change] = []
    if trials or source.derived(*OTHER_TRIALS) or THEIRS in source.modules:
        changes += _of_determined(source, bool(trials))
    elif trainers:
        changes += _of_transformers(source, trainers)
    elif source.calls_of(INITIALIZE) and not source.calls_of("determined_ds.session"):
        changes += _of_deepspeed(source)
    elif not {"determined_ds", "determined"} & source.modules:
        message = "neither a trial of Determined's, nor a DeepSpeed script, nor one of Hugging Face's Trainer"
        fix = "give the file that calls deepspeed.initialize, or that makes the Trainer"
        problem = source.problem(source.tree, message, fix, "unknown-script")
        return [Finding(severity=ERROR, problem=problem)], ""
    tests = (text_of(node.test) for node in source.tree.body if isinstance(node, ast.If))
    is_run = not trials or any("__main__" in test for test in tests)
    trial = "" if is_run else f"{file.stem}:{trials[-1].name}"
    beside = (each for name in (".", "experiments") for each in sorted((file.parent / name).glob("*.yaml")))
    runs = re.compile(rf"^entrypoint:.*\b{re.escape(trial or file.name)}\b", re.MULTILINE)
    config = next((each for each in beside if runs.search(each.read_text(errors="replace"))), None)
    if config is None:
        config = file.with_suffix(".yaml")
        files = sorted(file.parent.glob("*.json"))
        named = (path.name for path in files if DEEPSPEED_KEYS.search(path.read_text(errors="replace")))
        ds_config = "".join(f"deepspeed_config: {name}" for name in itertools.islice(named, 1))
        command = [*(ENTRYPOINT_FORM if trial else SCRIPT_FORM).split()[:-1], trial or file.name]
        text = (
            f"{{name: {config.stem}, entrypoint: {' '.join(command)}, hyperparameters: {{{ds_config}}}, "
            "resources: {slots_per_trial: 1}, searcher: {name: single, metric: validation_loss}}"
        )
        message, fix = "no experiment beside it runs it", f"write {config}: {text}"
        changes.append((source.tree, "no-experiment", NOTE, message, fix))
    found = [
        Finding(severity=severity, problem=source.problem(node, message, fix, code))
        for node, code, severity, message, fix in changes
    ]
    return found, shlex.join(["det-ds", "run", str(config), str(file.parent)])


def _of_determined(source: Source, has_trial: bool) -> Iterator[Change]:
    """Where Determined's module makes a loop that runs on its clusters alone, and trials without DeepSpeed."""
    attributes = {source.name_of(node) for node in source.nodes if isinstance(node, ast.Attribute)}
    used = {name for name in DRIVERS if f"{THEIRS}.{name}" in attributes}
    for node in source.nodes:
        bound = dict(source.imported(node))
        names = {
            target.removeprefix(f"{THEIRS}."): name for name, target in bound.items() if THEIRS in target
        }
        if drives := sorted((used if THEIRS in names else set()) | ({*names} & {*DRIVERS})):
            fix = f"write from determined_ds.deepspeed import {', '.join(names)}"
            if THEIRS in names:
                fix = f"write from determined_ds import deepspeed as {names[THEIRS]}"
            message = f"{' and '.join(drives)} of {THEIRS} run only on GPUs on a Determined cluster"
            yield node, OWN_DRIVER, ERROR, message, fix
    for node in source.derived(*OTHER_TRIALS):
        fix = "derive it from determined_ds.DataParallelTrial: build_model, loss and two loaders "
        fix += "(docs/bring-your-code.md)"
        yield node, "other-trial", ERROR, f"{node.name} is trained without DeepSpeed", fix
    made = _made(source, source.calls_of(f"{THEIRS}.Trainer"))
    for call, owner in source.method_calls("fit"):
        if owner in made and keyword(call, "latest_checkpoint") is None:
            fix = "add latest_checkpoint=info.latest_checkpoint, of info = det.get_cluster_info()"
            message = "on a cluster, a trial that was paused starts again at step 0"
            yield call, "latest-checkpoint", WARNING, message, fix
    if has_trial:
        yield from _devices(source, "write self.context.device", "write self.context.to_device({})")


def _of_transformers(source: Source, trainers: list[ast.Call]) -> Iterator[Change]:
    """What of a script of transformers' Trainer does not report, resume, or take its hyperparameters."""
    for node in source.nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        module = getattr(node, "module", None)
        if module == "determined.transformers" and "DetCallback" in names:
            message = "resumes without the data's position, and checks nothing of the DeepSpeed JSON"
            yield node, "det-callback", WARNING, message, f"write from {TRANSFORMERS} import DetCallback"
        if module == "transformers" and (arguments := sorted(ARGUMENTS & {*names})):
            message = "are not filled from the trial's hyperparameters and DeepSpeed JSON"
            fix = f"write from {TRANSFORMERS} import {', '.join(arguments)}"
            yield node, "arguments", WARNING, f"{' and '.join(arguments)} {message}", fix
    for call in trainers if not any(name.endswith(".DetCallback") for name in source.modules) else ():
        fix = f"from {TRANSFORMERS} import DetCallback, init; then with init() as core_context: ... "
        fix += "callbacks=[DetCallback(core_context, args)]"
        message = "reports no metric and no checkpoint, and is not stopped in good order"
        yield call, "det-callback", WARNING, message, fix
    made = _made(source, trainers)
    for call, owner in source.method_calls("train"):
        if owner in made and keyword(call, "resume_from_checkpoint") is None and not call.args:
            fix = f"write {owner}.train(resume_from_checkpoint=args.resume_from_checkpoint)"
            yield call, "resume-from-checkpoint", WARNING, "starts at step 0 where the run resumes", fix


def _of_deepspeed(source: Source) -> Iterator[Change]:
    """What ``determined_ds.session`` does in place of a script's own lines."""
    made = source.calls_of(INITIALIZE)
    joins = source.calls_of("torch.distributed.init_process_group", "deepspeed.init_distributed")
    own, first = _made(source, made), [*joins, *made][0]
    place = "write in its place" if joins else "write above it"
    fix = f"import determined_ds, and {place}: with determined_ds.session() as s: with the training below it"
    message = "a loop of its own: det-ds run cannot stop, resume or measure it exactly"
    yield first, "session", WARNING, message, fix
    yield from _devices(source, "write s.device", "write {}.to(s.device)")
    for call, name in source.calls:
        owner, _, method = text_of(call.func).rpartition(".")
        is_rank = {"--local_rank", "--local-rank"} & {getattr(each, "value", None) for each in call.args}
        is_other = (method == "add_argument" and not is_rank) or (
            method == "train_batch" and owner not in own
        )
        if (known := CALLS.get(name) or CALLS.get(f".{method}")) and not is_other:
            code, severity, message, fix = known
            yield call, code, severity, message, fix.format(owner)
    for call in made:
        config, data = keyword(call, "config", "config_params"), keyword(call, "training_data")
        instead = [] if isinstance(config, ast.Dict) else ["config=s.ds_config in place of its own"]
        if data is not None:
            instead.append(f"without training_data, and s.loader({text_of(data)}) in place of its loader")
        instead.append(f"and then s.checkpoint({', '.join(own) or 'engine'}), before the first batch")
        message = "the engine's configuration, data and checkpoints are the script's own"
        yield call, "initialize", WARNING, message, f"write {', '.join(instead)}"
    for call in source.calls_of(*LOADER):
        dataset = call.args[0] if call.args else keyword(call, "dataset")
        stated = "dataset" if dataset is None else text_of(dataset)
        names = [*source.targets.get(call, []), stated, *_around(source, call, *FUNCTIONS)]
        message, fix = "cannot continue where a run was stopped", f"write s.loader({stated})"
        if any(VALIDATES.search(name) for name in names):
            message, fix = "is not divided among replicas", f"write s.validation_loader({stated})"
        yield call, "data-loader", WARNING, message, fix
    for call, name in source.calls:
        parts = (part for each in [*call.args, *call.keywords] for part in ast.walk(each))
        found = [part.id for part in parts if isinstance(part, ast.Name) and METRIC.search(part.id)]
        validates = any(map(VALIDATES.search, _around(source, call, *FUNCTIONS)))
        in_loop = validates or _around(source, call, ast.For, ast.While)
        if found and in_loop and (getattr(call.func, "attr", None) or name) in SHOWS:
            entries = ", ".join(f'"{each}": {each}' for each in list(dict.fromkeys(found))[:3])
            more = ", validation=True" if validates or VALIDATES.search(found[0]) else ""
            message = "is shown, and not recorded: metrics.jsonl, TensorBoard, a search and the web UI have no metric"
            yield call, "report", WARNING, message, f"write s.report({{{entries}}}{more})"


def _devices(source: Source, device: str, moved: str) -> Iterator[Change]:
    """Where a GPU is named."""
    for call in source.calls_of("torch.cuda.set_device"):
        yield call, "device", WARNING, "a rank's device is set before the script trains", "remove it"
    for call in source.calls_of("torch.device"):
        if "cuda" in text_of(call):
            yield call, "device", WARNING, "names a GPU: it does not run on CPUs", device
    for call, owner in source.method_calls("cuda"):
        yield call, "device", WARNING, "moves to a GPU: it does not run on CPUs", moved.format(owner)


def _trainers(source: Source) -> list[ast.Call]:
    """Where a Trainer is made, of transformers or of a class that extends it."""

    def is_trainer(name: str) -> bool:
        return name.split(".")[0] in ("transformers", "trl") and name.endswith("Trainer")

    bases = {source.name_of(base) for node in source.nodes for base in getattr(node, "bases", ())}
    derived = {node.name for node in source.derived(*filter(is_trainer, bases))}
    return [call for call, name in source.calls if is_trainer(name) or name in derived]


def _made(source: Source, calls: list[ast.Call]) -> list[str]:
    """The names that hold what some calls make; of several results, the first."""
    return [*dict.fromkeys(names[0] for call in calls if (names := source.targets.get(call)))]


def _around(source: Source, call: ast.Call, *kinds: type[ast.stmt]) -> list[str]:
    """The names of the blocks of some kinds that a call is in, "" of one without a name."""
    blocks = (node for node in source.nodes if isinstance(node, kinds))
    around = [node for node in blocks if node.lineno <= call.lineno <= (node.end_lineno or 0)]
    return [getattr(node, "name", "") for node in around]
