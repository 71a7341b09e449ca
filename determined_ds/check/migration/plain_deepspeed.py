"""A plain DeepSpeed script: what ``determined_ds.session`` does in place of its own lines."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from determined_ds.check.migration.source import VALIDATES, Source, keyword, metrics_in
from determined_ds.check.output import ERROR, NOTE, WARNING, Finding

INITIALIZE = "deepspeed.initialize"
TWICE = "torch.distributed.init_process_group"
JOINS = (
    "deepspeed.init_distributed",
    TWICE,
    "deepspeed.comm.init_distributed",
)
ARGUMENTS = ("deepspeed.add_config_arguments",)
LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
SAMPLER = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")
SESSIONS = ("determined_ds.session",)
WITH = "with determined_ds.session() as s:"
SHOWS = ("print", "info", "log_dist", "add_scalar", "log", "set_postfix", "write", "set_description")
# Without effect under det-ds run, and without harm.
MAY_STAY = ("config-arguments", "local-rank")
DEVICE_NAMES = ("cuda", "hip")


def is_ported(source: Source) -> bool:
    """Whether a script opens a session already."""
    return bool(source.calls_of(*SESSIONS))


def changes(source: Source) -> Iterator[Finding]:
    """What to change, in no order; what may stay is a note, in a script with a session all that is left."""
    is_done = is_ported(source)
    for step in (_session, _arguments, _devices, _engines, _data, _checkpoints, _pipelines, _reports):
        for finding in step(source):
            may_stay = finding.problem.code in MAY_STAY or (
                is_done and finding.problem.code != "process-group"
            )
            yield dataclasses.replace(finding, severity=NOTE) if may_stay else finding


def engines_of(source: Source) -> list[str]:
    """The names of the engines that ``deepspeed.initialize`` makes."""
    made = [source.targets.get(call, []) for call in source.calls_of(INITIALIZE)]
    return list(dict.fromkeys(names[0] for names in made if names)) or ["engine"]


def _session(source: Source) -> Iterator[Finding]:
    joins = source.calls_of(*JOINS)
    if is_ported(source):
        for call in source.calls_of(TWICE):
            message = "the session has joined the process group, and torch refuses to join twice"
            yield source.change(call, message, "remove it", "process-group", severity=WARNING)
        return
    [first, *more] = [*joins, *source.calls_of(INITIALIZE)]
    message = "a loop of its own: det-ds run cannot stop, resume or measure it exactly"
    replaced = "write in its place" if joins else "write above it"
    fix = f"import determined_ds, and {replaced}: {WITH} with the training below it"
    yield source.change(first, message, fix, "session", severity=WARNING)
    for call in more:
        if call in source.calls_of(TWICE):
            message = "the session joins the process group, and torch refuses to join twice"
            yield source.change(call, message, "remove it", "process-group", severity=WARNING)


def _arguments(source: Source) -> Iterator[Finding]:
    for call in source.calls_of(*ARGUMENTS):
        message = (
            "adds --deepspeed and --deepspeed_config, which Determined's launchers and det-ds run do not pass"
        )
        fix = "remove it: hyperparameters.deepspeed_config names the JSON, and s.ds_config is it"
        yield source.change(call, message, fix, "config-arguments", severity=WARNING)
    for call, _ in source.methods("add_argument"):
        stated = [each.value for each in call.args if isinstance(each, ast.Constant)]
        if {"--local_rank", "--local-rank"} & set(map(str, stated)):
            message = "Determined's launchers and det-ds run pass no --local_rank"
            fix = "remove it: s.rank, s.distributed.local_rank and s.device"
            yield source.change(call, message, fix, "local-rank", severity=WARNING)


def _devices(source: Source) -> Iterator[Finding]:
    for call in source.calls_of("torch.cuda.set_device"):
        yield source.change(call, "the session sets the device", "remove it", "device", severity=WARNING)
    for call in source.calls_of("torch.device"):
        if any(name in ast.unparse(call) for name in DEVICE_NAMES):
            message = "names a GPU: it does not run on CPUs"
            yield source.change(call, message, "write s.device", "device", severity=WARNING)
    for call, owner in source.methods("cuda"):
        message, fix = "moves to a GPU: it does not run on CPUs", f"write {owner}.to(s.device)"
        yield source.change(call, message, fix, "device", severity=WARNING)


def _engines(source: Source) -> Iterator[Finding]:
    if is_ported(source):
        return
    engines = ", ".join(engines_of(source))
    for call in source.calls_of(INITIALIZE):
        data = keyword(call, "training_data")
        config = keyword(call, "config", "config_params")
        own = call.args[0] if call.args else keyword(call, "args")
        words = []
        if config is None or not isinstance(config, ast.Dict):
            stated = "args" if own is not None and config is None else "config"
            words.append(f"config=s.ds_config in place of {stated}")
        if data is not None:
            words.append(f"without training_data, and s.loader({ast.unparse(data)}) in place of its loader")
        words.append(f"and then s.checkpoint({engines}), before the first batch")
        message = "the engine's configuration, data and checkpoints are the script's own"
        yield source.change(call, message, f"write {', '.join(words)}", "initialize", severity=WARNING)


def _data(source: Source) -> Iterator[Finding]:
    for call in source.calls_of(*LOADER):
        dataset = call.args[0] if call.args else keyword(call, "dataset")
        stated = "dataset" if dataset is None else ast.unparse(dataset)
        named = [*source.targets.get(call, []), stated]
        validates = any(VALIDATES.search(name) for name in named) or source.validates(call)
        method = "validation_loader" if validates else "loader"
        message = (
            "cannot continue where a run was stopped" if not validates else "is not divided among replicas"
        )
        yield source.change(call, message, f"write s.{method}({stated})", "data-loader", severity=WARNING)
    for call in source.calls_of(*SAMPLER):
        message = "s.loader gives each replica its share, and shuffles"
        yield source.change(call, message, "remove it", "sampler", severity=WARNING)


def _checkpoints(source: Source) -> Iterator[Finding]:
    engines = ", ".join(engines_of(source))
    for call, _ in source.methods("save_checkpoint"):
        message = "det-ds run and a cluster do not find this checkpoint when they resume"
        fix = f"write s.checkpoint({engines}); or remove it: fit.checkpoint_period writes them"
        yield source.change(call, message, fix, "save-checkpoint", severity=WARNING)
    for call, _ in source.methods("load_checkpoint"):
        message = (
            "s.checkpoint loads the checkpoint that a run resumes from, optimizer, data and generators too"
        )
        yield source.change(call, message, "remove it", "load-checkpoint", severity=WARNING)


def _pipelines(source: Source) -> Iterator[Finding]:
    if is_ported(source):
        return
    for call, owner in source.methods("train_batch"):
        if owner in engines_of(source):
            message = "the loop around it cannot be resumed"
            fix = f"write for batches in s.steps(): {owner}.train_batch(data_iter=batches)"
            yield source.change(call, message, fix, "train-batch", severity=WARNING)


def _reports(source: Source) -> Iterator[Finding]:
    if any(owner != "self" for _, owner in source.methods("report")):
        return
    for call, name in source.calls:
        last = call.func.attr if isinstance(call.func, ast.Attribute) else name
        found = metrics_in([*call.args, *call.keywords]) if last in SHOWS else []
        if found and (call.lineno in source.loop_lines or source.validates(call)):
            entries = ", ".join(f'"{each}": {each}' for each in found[:3])
            more = ", validation=True" if source.validates(call) or VALIDATES.search(found[0]) else ""
            message = "is shown, and not recorded: metrics.jsonl, TensorBoard, a search and the web UI have no metric"
            fix = f"write s.report({{{entries}}}{more})"
            yield source.change(call, message, fix, "report", severity=WARNING)


def unknown(source: Source) -> Iterator[Finding]:
    """What is said of a file that trains with none of the libraries that are known."""
    message = "neither a trial of Determined's, nor a DeepSpeed script, nor one of Hugging Face's Trainer"
    fix = "give the file that calls deepspeed.initialize, or that makes the Trainer"
    yield source.change(source.tree, message, fix, "unknown-script", severity=ERROR)
