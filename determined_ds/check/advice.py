"""What to change in a script or a trial of another trainer, so that ``det-ds run`` runs it, and the command for that.

It knows plain DeepSpeed, transformers' Trainer, and Determined's own ``determined.pytorch.deepspeed``.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from determined_ds.check.output import ERROR, NOTE, WARNING, Finding
from determined_ds.documents.files import read_yaml
from determined_ds.errors import ConfigError, Origin, Problem
from determined_ds.experiment.entrypoint import ENTRYPOINT_FORM, SCRIPT_FORM, TrialEntrypoint, read_entrypoint
from determined_ds.experiment.source import (
    DRIVERS,
    FUNCTIONS,
    OWN_DRIVER,
    THEIRS,
    TRIALS,
    Script,
    Source,
    SourceError,
    find_code,
    keyword,
    text_of,
)

OWN_TRIALS = (
    f"{THEIRS}.DeepSpeedTrial",
    "determined_ds.deepspeed.DeepSpeedTrial",
    *(f"determined_ds.{name}" for name in TRIALS),
)
OTHER_TRIALS = ("determined.pytorch.PyTorchTrial", "determined.keras.TFKerasTrial")
WHOLE_MODULE = (("determined.pytorch", "deepspeed"), (None, THEIRS))  # (module, name) of its import
TRAINERS = ("determined_ds.deepspeed.Trainer", "determined_ds.Trainer", f"{THEIRS}.Trainer")
TRANSFORMERS = "determined_ds.transformers"
ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
ACCELERATOR = ("accelerate.Accelerator", "accelerate.accelerator.Accelerator")
INITIALIZE, SESSION = "deepspeed.initialize", "determined_ds.session"
JOIN = "torch.distributed.init_process_group"
JOINS = ("deepspeed.init_distributed", JOIN, "deepspeed.comm.init_distributed")
LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
SAMPLER = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")
SHOWS = ("print", "info", "log_dist", "add_scalar", "log", "set_postfix", "write", "set_description")
# Names of variables that hold what is reported, and of code that validates.
METRIC = re.compile(r"loss|acc(uracy)?\b|perplexity|ppl\b|auc\b|f1\b", re.IGNORECASE)
VALIDATES = re.compile(
    r"(^|_)(test|val|valid|validation|eval|evaluate|dev)($|_|\d|loader|set|data)", re.IGNORECASE
)
DEEPSPEED_KEYS = re.compile('"(train_batch_size|train_micro_batch_size_per_gpu|zero_optimization)"')
MOST_READ = 1_000_000  # bytes of a JSON: a larger one is data

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
    ported = bool(source.calls_of(SESSION))
    trials = source.derived(*OWN_TRIALS)
    if trials or source.derived(*OTHER_TRIALS) or THEIRS in source.modules or source.calls_of(*TRAINERS):
        changes = [*_of_determined(source, bool(trials))]
    elif _trainers(source) or source.calls_of(*ACCELERATOR):
        changes = [*_of_transformers(source)]
    elif source.calls_of(INITIALIZE) or ported:
        changes = [*_of_deepspeed(source, ported)]
    elif "determined_ds" in source.modules or source.calls_of("determined.core.init"):
        changes = []
    else:
        message = "neither a trial of Determined's, nor a DeepSpeed script, nor one of Hugging Face's Trainer"
        fix = "give the file that calls deepspeed.initialize, or that makes the Trainer"
        problem = source.problem(source.tree, message, fix, "unknown-script")
        return [Finding(severity=ERROR, problem=problem)], ""
    tests = (text_of(node.test) for node in source.tree.body if isinstance(node, ast.If))
    is_run = not trials or any("__main__" in test for test in tests)
    trial = "" if is_run else f"{file.stem}:{trials[-1].name}"
    config = _experiment_of(file, trial)
    if config is None:
        config = file.with_suffix(".yaml")
        runs = [*(ENTRYPOINT_FORM if trial else SCRIPT_FORM).split()[:-1], trial or file.name]
        text = (
            f"{{name: {config.stem}, entrypoint: {' '.join(runs)}, hyperparameters: {{{_ds_config(source)}}}, "
            "resources: {slots_per_trial: 1}, searcher: {name: single, metric: validation_loss}}"
        )
        fix = f"write {config}: {text}"
        changes.append((source.tree, "no-experiment", NOTE, "no experiment beside it runs it", fix))
    found = [
        Finding(severity=severity, problem=source.problem(node, message, fix, code))
        for node, code, severity, message, fix in changes
    ]
    return found, shlex.join(["det-ds", "run", str(config), str(file.parent)])


# ------------------------------------------------------------------------------------------- Determined's own


def _of_determined(source: Source, has_trial: bool) -> Iterator[Change]:
    attributes = {source.name_of(node) for node in source.nodes if isinstance(node, ast.Attribute)}
    used = {name for name in DRIVERS if f"{THEIRS}.{name}" in attributes}
    for node in source.nodes:
        names = node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        module = getattr(node, "module", None)
        whole = [each for each in names if (module, each.name) in WHOLE_MODULE]
        if module != THEIRS and not whole:
            continue
        own = [f"{each.name} as {each.asname}" if each.asname else each.name for each in names]
        fix = f"write from determined_ds.deepspeed import {', '.join(own)}"
        if whole:
            fix = f"write from determined_ds import deepspeed as {whole[0].asname or 'det_ds'}"
        if drives := sorted(used | ({each.name for each in names} & {*DRIVERS})):
            message = f"{' and '.join(drives)} of {THEIRS} run only on GPUs on a Determined cluster"
            yield node, OWN_DRIVER, ERROR, message, fix
        else:
            message = "runs as it is, by determined_ds.train; determined_ds has the same names"
            yield node, "determined-import", NOTE, message, fix
    for node in source.derived(*OTHER_TRIALS):
        fix = (
            "derive it from determined_ds.DataParallelTrial: build_model, loss and two loaders "
            "(docs/bring-your-code.md)"
        )
        yield node, "other-trial", ERROR, f"{node.name} is trained without DeepSpeed", fix
    made = _made(source, source.calls_of(*TRAINERS))
    for call, owner in source.method_calls("fit"):
        resumes = keyword(call, "latest_checkpoint") or any(each.arg is None for each in call.keywords)
        if ("Trainer(" in owner or owner in made) and not resumes:
            fix = "add latest_checkpoint=info.latest_checkpoint, of info = det.get_cluster_info()"
            message = "on a cluster, a trial that was paused starts again at step 0"
            yield call, "latest-checkpoint", WARNING, message, fix
    if has_trial:
        yield from _devices(source, WARNING, "write self.context.device", "write self.context.to_device({})")


def _made(source: Source, calls: list[ast.Call]) -> list[str]:
    """The names that hold what some calls make; of several results, the first."""
    return [*dict.fromkeys(names[0] for call in calls if (names := source.targets.get(call)))]


def _devices(source: Source, severity: str, device: str, moved: str, joined: str = "") -> Iterator[Change]:
    """Where a GPU is named; ``joined`` is the fix of the line that sets a rank's own."""
    for call in source.calls_of("torch.device", "torch.cuda.set_device"):
        if joined and source.name_of(call.func) == "torch.cuda.set_device":
            yield call, "device", severity, "the session sets the device", joined
        elif any(name in text_of(call) for name in ("cuda", "hip")):
            yield call, "device", severity, "names a GPU: it does not run on CPUs", device
    for call, owner in source.method_calls("cuda"):
        yield call, "device", severity, "moves to a GPU: it does not run on CPUs", moved.format(owner)


# ------------------------------------------------------------------------------------------- Hugging Face


def _trainers(source: Source) -> list[ast.Call]:
    """Where a Trainer is made, of transformers or of a class that extends it."""

    def is_trainer(name: str) -> bool:
        return name.split(".")[0] in ("transformers", "trl") and name.endswith("Trainer")

    bases = {source.name_of(base) for node in source.nodes for base in getattr(node, "bases", ())}
    derived = {node.name for node in source.derived(*filter(is_trainer, bases))}
    return [call for call, name in source.calls if is_trainer(name) or name in derived]


def _of_transformers(source: Source) -> Iterator[Change]:
    for node in source.nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        module = getattr(node, "module", None)
        if module == "determined.transformers" and "DetCallback" in names:
            message = "resumes without the data's position, and checks nothing of the DeepSpeed JSON"
            yield node, "det-callback", WARNING, message, f"write from {TRANSFORMERS} import DetCallback"
        if module == "transformers" and (arguments := [name for name in names if name in ARGUMENTS]):
            message = "are not filled from the trial's hyperparameters and DeepSpeed JSON"
            fix = f"write from {TRANSFORMERS} import {', '.join(arguments)}"
            yield node, "arguments", WARNING, f"{' and '.join(arguments)} {message}", fix
    calls = _trainers(source)
    for call in calls if not any(name.endswith(".DetCallback") for name in source.modules) else ():
        fix = f"from {TRANSFORMERS} import DetCallback, init; then with init() as core_context: ... "
        fix += "callbacks=[DetCallback(core_context, args)]"
        message = "reports no metric and no checkpoint, and is not stopped in good order"
        yield call, "det-callback", WARNING, message, fix
    made = _made(source, calls)
    for call, owner in source.method_calls("train"):
        if owner in made and keyword(call, "resume_from_checkpoint") is None and not call.args:
            fix = f"write {owner}.train(resume_from_checkpoint=args.resume_from_checkpoint)"
            yield call, "resume-from-checkpoint", WARNING, "starts at step 0 where the run resumes", fix
    for call in source.calls_of(*ACCELERATOR):
        message = "Accelerate's own loop: det-ds run cannot stop, resume or measure it exactly"
        fix = "train by transformers' Trainer, or by deepspeed.initialize within determined_ds.session()"
        yield call, "accelerator", WARNING, message, fix


# ------------------------------------------------------------------------------------------- plain DeepSpeed


def _of_deepspeed(source: Source, ported: bool) -> Iterator[Change]:
    """What ``determined_ds.session`` does in place of a script's own lines; of a ported one, what may go."""
    must, made, joins = NOTE if ported else WARNING, source.calls_of(INITIALIZE), source.calls_of(*JOINS)
    own = _made(source, made)
    engines = ", ".join(own) or "engine"
    first = None if ported else [*joins, *made][0]
    if first is not None:
        place = "write in its place" if joins else "write above it"
        fix = f"import determined_ds, and {place}: with determined_ds.session() as s: with the training below it"
        message = "a loop of its own: det-ds run cannot stop, resume or measure it exactly"
        yield first, "session", WARNING, message, fix
    for call in source.calls_of(JOIN):
        if call is not first:
            message = "the session joins the process group, and torch refuses to join twice"
            yield call, "process-group", WARNING, message, "remove it"
    for call in source.calls_of("deepspeed.add_config_arguments"):
        message = "adds --deepspeed and --deepspeed_config, which no launcher here passes"
        fix = "remove it: hyperparameters.deepspeed_config names the JSON, and s.ds_config is it"
        yield call, "config-arguments", NOTE, message, fix
    for call in source.calls_of(*SAMPLER):
        yield call, "sampler", must, "s.loader gives each replica its share, and shuffles", "remove it"
    yield from _devices(source, must, "write s.device", "write {}.to(s.device)", "remove it")
    saves = f"write s.checkpoint({engines}); or remove it: fit.checkpoint_period writes them"
    loads = "s.checkpoint loads what a run resumes from, with the optimizer, the data and generators"
    shuffles = "s.loader needs no sampler: it shuffles in each epoch by itself, by the trial's seed"
    methods = {
        "save_checkpoint": ("a run that resumes does not find this checkpoint", saves),
        "load_checkpoint": (loads, "remove it"),
        "set_epoch": (shuffles, "remove {}.set_epoch(...)"),
        "train_batch": (
            "the loop around it cannot be resumed",
            "write for batches in s.steps(): {}.train_batch(data_iter=batches)",
        ),
        "add_argument": (
            "Determined's launchers and det-ds run pass no --local_rank",
            "remove it: s.rank, s.distributed.local_rank and s.device",
        ),
    }
    codes = {"set_epoch": "sampler", "add_argument": "local-rank"}
    for call, owner in source.method_calls(*methods):
        name = str(getattr(call.func, "attr", ""))
        is_rank = {"--local_rank", "--local-rank"} & {getattr(each, "value", None) for each in call.args}
        if (name == "add_argument" and not is_rank) or (
            name == "train_batch" and (ported or owner not in own)
        ):
            continue
        severity = NOTE if name == "add_argument" else must
        yield (
            call,
            codes.get(name, name.replace("_", "-")),
            severity,
            methods[name][0],
            methods[name][1].format(owner),
        )
    for call in made if not ported else ():
        config, data = keyword(call, "config", "config_params"), keyword(call, "training_data")
        instead = []
        if not isinstance(config, ast.Dict):
            has_args = config is None and (call.args or keyword(call, "args") is not None)
            instead.append(f"config=s.ds_config in place of {'args' if has_args else 'config'}")
        if data is not None:
            instead.append(f"without training_data, and s.loader({text_of(data)}) in place of its loader")
        fix = f"write {', '.join([*instead, f'and then s.checkpoint({engines}), before the first batch'])}"
        message = "the engine's configuration, data and checkpoints are the script's own"
        yield call, "initialize", must, message, fix
    for call in source.calls_of(*LOADER):
        dataset = call.args[0] if call.args else keyword(call, "dataset")
        stated = "dataset" if dataset is None else text_of(dataset)
        named = any(VALIDATES.search(name) for name in [*source.targets.get(call, []), stated])
        message, fix = "cannot continue where a run was stopped", f"write s.loader({stated})"
        if named or _validates(source, call):
            message, fix = "is not divided among replicas", f"write s.validation_loader({stated})"
        yield call, "data-loader", must, message, fix
    reports = any(owner != "self" for _, owner in source.method_calls("report"))
    for call, name in source.calls if not reports else ():
        parts = (part for each in [*call.args, *call.keywords] for part in ast.walk(each))
        found = [part.id for part in parts if isinstance(part, ast.Name) and METRIC.search(part.id)]
        validates = _validates(source, call)
        in_loop = validates or _around(source, call, ast.For, ast.While)
        if found and in_loop and (getattr(call.func, "attr", None) or name) in SHOWS:
            entries = ", ".join(f'"{each}": {each}' for each in list(dict.fromkeys(found))[:3])
            more = ", validation=True" if validates or VALIDATES.search(found[0]) else ""
            message = "is shown, and not recorded: metrics.jsonl, TensorBoard, a search and the web UI have no metric"
            yield call, "report", must, message, f"write s.report({{{entries}}}{more})"


def _validates(source: Source, call: ast.Call) -> bool:
    """Whether a call is in a function that validates, by the function's name."""
    return any(VALIDATES.search(getattr(each, "name", "")) for each in _around(source, call, *FUNCTIONS))


def _around(source: Source, call: ast.Call, *kinds: type[ast.stmt]) -> list[ast.stmt]:
    """The blocks of some kinds that a call is in."""
    blocks = (node for node in source.nodes if isinstance(node, kinds))
    return [node for node in blocks if node.lineno <= call.lineno <= (node.end_lineno or 0)]


# ------------------------------------------------------------------------------------------- its experiment


def _experiment_of(file: Path, trial: str) -> Path | None:
    """An experiment beside a file that runs its trial; or, without one, the file or a script that imports it."""
    folders = [file.parent / each for each in (".", "experiments", "configs")]
    for folder, form in itertools.product(folders, ("*.yaml", "*.yml")):
        for path in sorted(folder.glob(form)):
            with contextlib.suppress(ConfigError, SourceError):
                found = read_entrypoint(read_yaml(path).data.get("entrypoint"))
                script = find_code(found, file.parent)
                if isinstance(found, TrialEntrypoint):
                    if found.trial == trial:
                        return path
                elif script and file in Script(file=script, context_dir=file.parent).sources:
                    return path
    return None


def _ds_config(source: Source) -> str:
    """The hyperparameter for ``s.ds_config``: the DeepSpeed JSON that a script names, or that is beside it."""
    folder = source.file.parent
    stated = (getattr(node, "value", None) for node in source.nodes if isinstance(node, ast.Constant))
    named = (each for each in stated if isinstance(each, str) and each.endswith(".json") and len(each) < 200)
    for path in (*(folder / each for each in named), *sorted(folder.glob("*.json"))):
        is_read = path.is_file() and path.stat().st_size < MOST_READ
        if is_read and DEEPSPEED_KEYS.search(path.read_text(errors="replace")):
            return f"deepspeed_config: {path.relative_to(folder) if path.is_relative_to(folder) else path}"
    return ""
