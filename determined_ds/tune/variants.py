"""Ways to carry out a training: what is chosen, the experiment that it makes of another, and whether that can run.

The model, the data and the global batch stay. What may differ are DeepSpeed's settings (the ZeRO stage, offload,
precision), how the batch and the model are cut (micro-batch, pipeline stages and their schedule), and whether
activations are computed again.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from determined_ds.check.trial import code_problems
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import BY_OTHER_NAMES, SHORTHANDS
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.config.strategy import FORMS, SWITCHES, Named
from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.text import as_plain
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.decide import decide_stated, left_open
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.source import (
    BY_HAND,
    Source,
    find_code,
    read_trial,
    source_of,
    sources_of,
)
from determined_ds.pipe.orders import ONE_F_ONE_B, Pipeline, default_chunks

MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH_KEYS = ("train_batch_size", MICRO_BATCH, ACCUMULATION)
OFFLOADS = ("offload_optimizer", "offload_param")
# Of ZeRO's keys, those that mean something at one stage only; the others are kept as the experiment has them.
STAGE_3 = ("stage3_", "zero_")
ZEROPP = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
# Micro-batches a pipeline stage, where they divide: a bubble of (p-1)/(5p-1), about a fifth.
MICRO_BATCHES_A_STAGE = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is chosen; None leaves it as the experiment has it.

    Args:
        zero_stage: 0 to 3.
        pipe_parallel_size: Pipeline stages, 1 for none.
        pipe_schedule: One of :data:`determined_ds.pipe.orders.SCHEDULES`.
        slots: Ranks in all.
        micro_batch_size: Samples of a forward pass; must divide a replica's share of the global batch.
        offload_optimizer: Optimizer states live in host memory.
        offload_param: Parameters do, too; ZeRO 3.
        zeropp: ZeRO++: quantized communication and a second copy of the parameters within a machine; ZeRO 3.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        activation_checkpointing: Blocks are computed again going backward; for a model that reads it.
        torch_compile: The model is compiled.
        engine: ``deepspeed``, or ``ddp`` for torch's own DistributedDataParallel.
    """

    zero_stage: int
    pipe_parallel_size: int = 1
    pipe_schedule: str | None = None
    slots: int
    micro_batch_size: int | None = None
    offload_optimizer: bool = False
    offload_param: bool = False
    zeropp: bool = False
    precision: str | None = None
    activation_checkpointing: bool | None = None
    torch_compile: bool | None = None
    engine: str = "deepspeed"

    def stated(self) -> dict[str, Any]:
        """What is chosen, by name, less what is left as it is."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


@dataclass(frozen=True, kw_only=True)
class Base:
    """The experiment that choices are applied to.

    Args:
        document: Its YAML, overrides applied; one point, where it is a search.
        experiment: The same, read.
        ds: Its DeepSpeed JSON with what hyperparameters overwrite, in the current form; nothing is filled in.
        written: The same with its places.
        resolved: What it runs with as it is.
        context_dir: The folder with the code.
        accelerator: What the ranks compute on.
        replicated: ``MODULE:CLASS`` of its trial without stages; None where there is none, as for a script.
        staged: Of the one with stages.
    """

    document: Document
    experiment: Experiment
    ds: dict[str, Any]
    written: Document
    resolved: ResolvedConfig
    context_dir: Path
    accelerator: Accelerator
    replicated: str | None
    staged: str | None

    @property
    def own(self) -> Choice:
        """The experiment as it is, as a choice."""
        strategy = self.resolved.strategy
        return Choice(
            zero_stage=strategy.zero_stage,
            pipe_parallel_size=strategy.pipe_parallel_size,
            slots=strategy.slots,
            micro_batch_size=strategy.micro_batch_size,
            offload_optimizer=strategy.offload_optimizer is not None,
            offload_param=strategy.offload_param is not None,
            zeropp=strategy.zeropp,
        )

    def states(self, key: str) -> bool:
        """Whether the experiment switches a hyperparameter on."""
        return bool(self.experiment.hyperparameters.get((key,)))

    def has_form(self, pipe_parallel_size: int) -> bool:
        """Whether its code can be cut into so many pipeline stages; a script has those that it builds.

        Args:
            pipe_parallel_size: Pipeline stages, >= 1; 1 without a pipeline.
        """
        if self.experiment.script is not None:
            return pipe_parallel_size == self.resolved.topology.pipe_parallel_size
        return (self.staged if pipe_parallel_size > 1 else self.replicated) is not None

    @cached_property
    def code(self) -> str:
        """The text of its code: of a script's files, or of the modules beside the trial's and those they import."""
        script = self.experiment.script
        if script is not None:
            file = find_code(script, self.context_dir)
            files = sources_of(file, self.context_dir) if file is not None else []
            return "\n".join(each.read_text(errors="replace") for each in files)
        source = source_of(self.experiment.trial.partition(":")[0], self.context_dir)
        beside = sorted(source.parent.glob("*.py")) if source else []
        text = "\n".join(each.read_text(errors="replace") for each in beside)
        imported = set(re.findall(r"^from ([\w.]+) import", text, re.MULTILINE))
        others = (source_of(name, self.context_dir) for name in sorted(imported))
        return "\n".join([text, *(each.read_text(errors="replace") for each in others if each)])

    @property
    def takes_bf16(self) -> bool:
        """Whether inputs are cast where the model is in bf16: this library's loop does it, a script by itself."""
        if self.experiment.script is None:
            return True
        return re.search(r"\b(bf16|bfloat16|autocast)\b|\.dtype\b", self.code) is not None

    @property
    def checkpointing_key(self) -> str | None:
        """The hyperparameter by which the model checkpoints activations; None where nothing reads one."""

        def reads(name: str) -> bool:  # the name is in quotes, or is a field with a type
            return re.search(rf'["\']{name}["\']|^\s*{name}\s*:', self.code, re.MULTILINE) is not None

        stated = self.experiment.hyperparameters.data
        by_name = next((name for name in SWITCHES if name in stated), None)
        return by_name or next((name for name in SWITCHES if reads(name)), None)


def read_base(document: Document, context_dir: Path, accelerator: Accelerator) -> Base:
    """Read the experiment that choices will be applied to.

    Args:
        document: Its YAML, overrides applied. Of a search, the point in the middle is taken.
        context_dir: The folder with the code.
        accelerator: What the ranks compute on.

    Raises:
        ConfigError: it cannot run as it is.
    """
    experiment = parse_experiment(document)
    if experiment.searched:
        point = {key: _constant(value) for key, value in experiment.hyperparameters.data.items()}
        searcher = {"name": "single", "metric": experiment.metric or "validation_loss"}
        searcher["smaller_is_better"] = experiment.smaller_is_better  # type: ignore[assignment]
        data = {**document.data, "hyperparameters": point, "searcher": searcher}
        document = document.holding(data)
        experiment = parse_experiment(document)
    if problems := code_problems(experiment, context_dir, option="--measure"):
        raise ConfigError(problems)
    where = Where(context_dir=context_dir, accelerator=accelerator)
    resolved = decide_stated(experiment, experiment.hyperparameters, where)
    if resolved is None:
        raise ConfigError(left_open(experiment))
    document = _without_other_names(document, resolved.hyperparameters)
    experiment = parse_experiment(document)
    replicated, staged = _forms(experiment.trial, context_dir) if experiment.trial else (None, None)
    return Base(
        document=document,
        experiment=experiment,
        ds=resolved.stated.data,
        written=resolved.stated,
        resolved=resolved,
        context_dir=context_dir,
        accelerator=accelerator,
        replicated=replicated,
        staged=staged,
    )


def _without_other_names(document: Document, named: Document) -> Document:
    """An experiment whose hyperparameters have their real names only, so that others can overwrite them.

    What stands for a value of the DeepSpeed JSON is left out: each variant has a JSON of its own.

    Args:
        document: The experiment.
        named: Its hyperparameters by their real names.
    """
    changes: list[tuple[KeyPath, Any, str]] = []
    for name in document.get(("hyperparameters",)):
        if name not in BY_OTHER_NAMES and name not in SHORTHANDS:
            continue
        here: KeyPath = ("hyperparameters", name)
        (real, *inner) = BY_OTHER_NAMES.get(name, (name,))
        if not inner and real not in SHORTHANDS:
            changes.append((("hyperparameters", real), named.get((real,)), document.origin(here)))
        changes.append((here, NOT_GIVEN, ""))
    return document.overwritten(*changes)


def _constant(value: Any) -> Any:
    """A mapping with a key ``type`` as Determined takes it."""
    return {"type": "const", "val": value} if isinstance(value, dict) else value


def _forms(trial: str, context_dir: Path) -> tuple[str | None, str | None]:
    """The trials of a module without and with pipeline stages: the experiment's own, and its nearest sister."""
    module, _, own = trial.partition(":")
    file = source_of(module, context_dir)
    body = [] if file is None else Source(file, context_dir).tree.body
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    names = [own, *sorted(classes, key=lambda name: -_common(name, own))]
    forms: dict[bool, str] = {}
    for name in names:
        staged = read_trial(f"{module}:{name}", context_dir).has_stages
        if staged is None and name == own:  # written by hand: what it does with stages is its own affair
            staged = False
        if staged is not None and not name.startswith("_"):
            forms.setdefault(staged, f"{module}:{name}")
    return forms.get(False), forms.get(True)


def _common(name: str, other: str) -> int:
    return next((index for index, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), len(name))


# ------------------------------------------------------------------------------------------ applying


def applied(base: Base, choice: Choice) -> Document:
    """The experiment's YAML with a choice applied: a whole experiment that runs by itself.

    Raises:
        ConfigError: the experiment's code has no such form.
    """
    is_pipeline = choice.pipe_parallel_size > 1
    if not base.has_form(choice.pipe_parallel_size):
        raise ConfigError(_no_form(base, is_pipeline))
    if is_pipeline and base.experiment.script is not None and choice.pipe_schedule not in (None, ONE_F_ONE_B):
        raise ConfigError(_own_schedule(base, choice))
    trial = base.staged if is_pipeline else base.replicated
    changes: list[tuple[KeyPath, Any]] = [
        (("resources", "slots_per_trial"), choice.slots),
        (("hyperparameters", "data_parallel_world_size"), "auto"),
        (("hyperparameters", "pipe_parallel_size"), choice.pipe_parallel_size),
        (("hyperparameters", "overwrite_deepspeed_args"), NOT_GIVEN),
        (("hyperparameters", "deepspeed_config"), NOT_GIVEN),
        (("hyperparameters", "deepspeed_config"), {"type": "const", "val": _ds_config(base, choice)}),
        (("entrypoint",), _entrypoint(base, trial)),
    ]
    for key, value in (
        ("torch_compile", choice.torch_compile),
        (base.checkpointing_key, choice.activation_checkpointing),
    ):
        if key is not None and value is not None:
            changes.append((("hyperparameters", key), value))
    if is_pipeline and choice.pipe_schedule is not None:  # with its own number of chunks
        changes.append((("hyperparameters", "pipe_schedule"), choice.pipe_schedule))
        changes.append((("hyperparameters", "pipe_chunks"), NOT_GIVEN))
    elif not is_pipeline:
        for name in ("pipe_schedule", "pipe_chunks", "partition_method"):
            changes.append((("hyperparameters", name), NOT_GIVEN))
    there = base.document
    return there.overwritten(
        *(
            (path, value, "the strategy")
            for path, value in changes
            if value is not NOT_GIVEN or there.get(path, NOT_GIVEN) is not NOT_GIVEN
        )
    )


def _no_form(base: Base, is_pipeline: bool) -> Problem:
    if base.experiment.script is not None:
        return _other_stages(base)
    module, _, name = base.experiment.trial.partition(":")
    wanted = "PipelineTrial" if is_pipeline else "DataParallelTrial"
    has = "has no stages" if is_pipeline else "is a pipeline"
    return Problem(
        key="entrypoint",
        value=base.experiment.trial,
        origin=base.document.origin(("entrypoint",)),
        message=f"{name} {has}, and {module} has no other that is a {wanted}",
        fix=f"write one beside {name}, in the same module, or leave that strategy out",
        code="trial-kind",
    )


def _other_stages(base: Base) -> Problem:
    has = base.resolved.topology.pipe_parallel_size
    builds = f"{has} pipeline stages" if has > 1 else "no pipeline stages"
    message = f"a script keeps the stages that its code builds, and this one has {builds}"
    fix = "leave that strategy out, or state pipe_parallel_size for a script that builds a PipelineModule"
    value = str(base.experiment.script)
    return base.document.problem(("entrypoint",), message, fix, "script-stages", value=value)


def _own_schedule(base: Base, choice: Choice) -> Problem:
    message = f"a script trains by the schedule of the engine that it builds, not by {choice.pipe_schedule}"
    fix = "leave that strategy out, or write the model as a PipelineTrial"
    value = str(base.experiment.script)
    return base.document.problem(("entrypoint",), message, fix, "script-stages", value=value)


def _entrypoint(base: Base, trial: str | None) -> Any:
    entrypoint = base.document.get(("entrypoint",))
    own = base.experiment.trial
    if trial is None:
        return entrypoint
    if isinstance(entrypoint, list):
        return [trial if word == own else word for word in entrypoint]
    return str(entrypoint).replace(own, trial)


def _ds_config(base: Base, choice: Choice) -> dict[str, Any]:
    """The experiment's DeepSpeed JSON with what is chosen in it; what the choice does not decide stays."""
    ds: dict[str, Any] = as_plain({key: value for key, value in base.ds.items() if key not in BATCH_KEYS})
    ds["zero_optimization"] = _zero(base, choice)
    if choice.micro_batch_size is not None:
        ds[MICRO_BATCH] = choice.micro_batch_size
    elif choice.pipe_parallel_size > 1:
        ds[ACCUMULATION] = num_micro_batches(base, choice)
    if choice.precision is not None:
        for name in ("bf16", "fp16"):
            if name in ds or name == choice.precision:
                section = ds.get(name) if isinstance(ds.get(name), dict) else {}
                ds[name] = {**(section or {}), "enabled": name == choice.precision}
    return ds


def _zero(base: Base, choice: Choice) -> dict[str, Any]:
    own = base.ds.get("zero_optimization")
    zero: dict[str, Any] = as_plain(own) if isinstance(own, dict) else {}
    for key in list(zero):
        if key in (*OFFLOADS, *ZEROPP) or (key.startswith(STAGE_3) and choice.zero_stage < 3):
            del zero[key]
    zero["stage"] = choice.zero_stage
    for key, is_wanted in zip(OFFLOADS, (choice.offload_optimizer, choice.offload_param), strict=True):
        if is_wanted:
            kept = own.get(key) if isinstance(own, dict) else None
            is_of_use = isinstance(kept, dict) and kept.get("device") not in (None, "none")
            zero[key] = as_plain(kept) if is_of_use else {"device": "cpu", "pin_memory": "auto"}
    if choice.zeropp:
        is_own = base.own.zeropp and choice.slots == base.own.slots
        kept = {key: own[key] for key in ZEROPP if key in own} if is_own and isinstance(own, dict) else None
        zero.update(kept or zip(ZEROPP, (choice.slots, True, True), strict=True))
    return zero


def num_micro_batches(base: Base, choice: Choice) -> int:
    """Micro-batches of a pipeline's step that divide a replica's share, and that its schedule can order.

    As many as the experiment has, where only the schedule of its own pipeline is another; else four a stage. Where
    these do not do, the most below; where there are none, the fewest above.
    """
    stages, own = choice.pipe_parallel_size, base.resolved.strategy
    replicas = max(1, choice.slots // stages)
    share = max(1, base.resolved.batch.global_batch_size // replicas)
    is_own = choice.pipe_schedule is not None and own.pipe_parallel_size == stages
    wanted = min(own.accumulation if is_own else MICRO_BATCHES_A_STAGE * stages, share)
    pipe = pipeline_of(base, choice)
    dividing = [count for count in range(1, share + 1) if share % count == 0]
    fitting = [count for count in dividing if not replace(pipe, micro_batches=count).problem()]
    # Where none fits, the configuration is refused with what the schedule needs.
    below = [count for count in fitting or dividing if count <= wanted]
    return below[-1] if below else fitting[0]


def pipeline_of(base: Base, choice: Choice) -> Pipeline:
    """What the ranks of a choice compute in which order; its micro-batches are yet to be decided."""
    own = base.resolved.strategy
    schedule = choice.pipe_schedule or own.pipe_schedule
    chunks = own.pipe_chunks if choice.pipe_schedule is None else default_chunks(schedule)
    return Pipeline(
        schedule=schedule,
        ranks=choice.pipe_parallel_size,
        micro_batches=1,
        chunks=chunks,
    )


# ------------------------------------------------------------------------------------------ decided


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An experiment carried out in one way, decided.

    Args:
        name: Of the strategy.
        choice: What makes it.
        document: The whole experiment; None where the trial has no such form.
        experiment: The same, read.
        resolved: What it runs with; None where it cannot run.
        problems: Why it cannot; none where it can.
    """

    name: str
    choice: Choice
    document: Document | None = None
    experiment: Experiment | None = None
    resolved: ResolvedConfig | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def can_run(self) -> bool:
        return self.resolved is not None

    @property
    def reason(self) -> str:
        """Why it cannot run, in a sentence or two; each message once, with its first key."""
        keys: dict[str, str] = {}
        for problem in self.problems:
            keys.setdefault(problem.message, problem.key.removeprefix("hyperparameters."))
        return "; ".join(f"{key}: {message}" for message, key in keys.items())


def decided(base: Base, name: str, choice: Choice) -> Variant:
    """A choice applied to an experiment, and whether that can run."""
    try:
        document = applied(base, choice)
        experiment = parse_experiment(document)
        _check_engine(experiment, choice, base.context_dir)
        where = Where(context_dir=base.context_dir, accelerator=base.accelerator)
        resolved = decide_stated(experiment, experiment.hyperparameters, where)
        if resolved is None:
            raise ConfigError(left_open(experiment))
    except ConfigError as error:
        return Variant(name=name, choice=choice, problems=error.problems)
    return Variant(name=name, choice=choice, document=document, experiment=experiment, resolved=resolved)


def _check_engine(experiment: Experiment, choice: Choice, context_dir: Path) -> None:
    """Refuse torch's DistributedDataParallel where the code makes its engine itself: DeepSpeed would train.

    Where the source of a trial does not show it, the rank finds out when the engine is wrapped.
    """
    if choice.engine == "deepspeed":
        return
    if experiment.script is not None:
        message = f"a script makes its engine itself, so it cannot be trained by {choice.engine}"
        fix = f"leave {choice.engine} out; zero0 reduces the same gradients, by DeepSpeed"
        value = str(experiment.script)
        raise ConfigError(experiment.document.problem(("entrypoint",), message, fix, "engine", value=value))
    if read_trial(experiment.trial, context_dir).extends[0] != BY_HAND:
        return
    name = experiment.trial.partition(":")[2]
    raise ConfigError(
        Problem(
            key="entrypoint",
            value=experiment.trial,
            origin=experiment.document.origin(("entrypoint",)),
            message=f"{name} calls deepspeed.initialize itself, so it cannot be trained by {choice.engine}",
            fix=f"leave {choice.engine} out, or write {name} as a DataParallelTrial",
            code="engine",
        )
    )


# ------------------------------------------------------------------------------------------------ by name


def choice_of(base: Base, form: Named, slots: int) -> Choice:
    """A named strategy for an experiment on some slots."""
    own = base.resolved.topology.pipe_parallel_size
    stages = own if own > 1 and slots % own == 0 else slots
    is_pipeline, schedule = "pipe_schedule" in form, form.get("pipe_schedule")
    keeps_zero = schedule is not None and own > 1
    return Choice(
        zero_stage=base.own.zero_stage if keeps_zero else form.get("zero_stage", 0),
        slots=slots,
        pipe_parallel_size=stages if is_pipeline else 1,
        pipe_schedule=schedule,
        micro_batch_size=None if is_pipeline else same_micro_batch(base, slots),
        offload_optimizer="offload_optimizer" in form,
        offload_param="offload_param" in form,
        zeropp="zeropp" in form,
        engine=form.get("engine", "deepspeed"),
    )


def same_micro_batch(base: Base, slots: int) -> int | None:
    """The largest micro-batch up to the experiment's own that divides a replica's share; None has it derived.

    The micro-batch of a pipeline says nothing about a model that is not divided.
    """
    if base.resolved.topology.pipe_parallel_size > 1:
        return None
    batch = base.resolved.batch
    share, rest = divmod(batch.global_batch_size, slots)
    if rest:
        return None  # which cannot run, and is reported so
    return next(size for size in range(min(batch.micro_batch_size, share), 0, -1) if share % size == 0)


def named_variants(base: Base, names: Sequence[str], slots: Sequence[int]) -> list[Variant]:
    """Every strategy on every number of slots.

    Args:
        base: The experiment.
        names: Of :data:`determined_ds.config.strategy.FORMS`.
        slots: Numbers of ranks, >= 1.
    """
    return [_named(base, name, count) for name in dict.fromkeys(names) for count in dict.fromkeys(slots)]


def _named(base: Base, name: str, slots: int) -> Variant:
    if slots > 1 or "pipe_schedule" not in FORMS[name]:
        return decided(base, name, choice_of(base, FORMS[name], slots))
    message = "a pipeline needs two slots or more"
    problem = Problem(key="--slots", value=slots, message=message, fix="--slots 2", code="strategy")
    return Variant(name=name, choice=Choice(zero_stage=0, slots=slots), problems=(problem,))
