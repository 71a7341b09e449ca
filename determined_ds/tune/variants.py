"""Ways to carry out a training: what is chosen, the experiment that it makes of another, and whether that can run.

The model, the data and the global batch stay. What may differ are DeepSpeed's settings (the ZeRO stage, offload,
precision), how the batch and the model are cut (micro-batch, pipeline stages and their schedule), and whether
activations are computed again.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from determined_ds.check.trial import code_problems
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import BY_OTHER_NAMES, SHORTHANDS, SIZES
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.config.strategy import FORMS, SWITCHES
from determined_ds.documents.document import Document
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import decide_stated, left_open
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.source import (
    BY_HAND,
    Source,
    read_trial,
    source_of,
)
from determined_ds.launch.run import as_constants
from determined_ds.memory.model import ModelShape
from determined_ds.pipe.orders import ONE_F_ONE_B, Pipeline, default_chunks
from determined_ds.report.results import Row

ENTRYPOINT = ("entrypoint",)
MICRO_BATCH, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH_KEYS = ("train_batch_size", MICRO_BATCH, ACCUMULATION)
OFFLOADS = ("offload_optimizer", "offload_param")
# Of ZeRO's keys, those that mean something at one stage only; the others are kept as the experiment has them.
STAGE_3 = ("stage3_", "zero_")
ZEROPP = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
# Hyperparameters that a choice decides, directly or in the DeepSpeed JSON that it makes.
DECIDED = {*BY_OTHER_NAMES, *SHORTHANDS, "overwrite_deepspeed_args"}
OF_PIPELINES = ("pipe_schedule", "pipe_chunks", "partition_method")
# Micro-batches a pipeline stage, where they divide: a bubble of (p-1)/(5p-1), about a fifth.
MICRO_BATCHES_A_STAGE = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is chosen; None leaves it as the experiment has it."""

    zero_stage: int
    pipe_parallel_size: int = 1  # pipeline stages, 1 for none
    pipe_schedule: str | None = None
    slots: int  # ranks in all
    micro_batch_size: int | None = None  # divides a replica's share of the global batch
    offload_optimizer: bool = False
    offload_param: bool = False  # ZeRO 3
    zeropp: bool = False  # quantized communication, a second copy of the parameters within a machine; ZeRO 3
    precision: str | None = None  # fp32, bf16 or fp16
    activation_checkpointing: bool | None = None  # for a model that reads it
    engine: str = "deepspeed"  # or ddp: torch's own DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Base:
    """The experiment that choices are applied to."""

    experiment: Experiment  # overrides applied; one point, where it is a search
    resolved: ResolvedConfig  # what it runs with as it is
    context_dir: Path  # the folder with the code
    accelerator: Accelerator  # what the ranks compute on
    forms: dict[bool, str]  # whether it has pipeline stages -> MODULE:CLASS of its trial; none for a script

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

    @property
    def checkpointing_key(self) -> str | None:
        """The hyperparameter that the experiment states to checkpoint activations by; None for none."""
        return next((name for name in SWITCHES if name in self.experiment.hyperparameters.data), None)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An experiment carried out in one way, decided."""

    name: str  # of the strategy
    choice: Choice  # what makes it
    experiment: Experiment | None = None  # the whole experiment; None where it cannot run
    resolved: ResolvedConfig | None = None  # what it runs with; None where it cannot run
    problems: tuple[Problem, ...] = ()  # why it cannot; none where it can

    @property
    def reason(self) -> str:
        """Why it cannot run, in a sentence or two; each message once, with its first key. "" where it can."""
        keys: dict[str, str] = {}
        for problem in self.problems:
            keys.setdefault(problem.message, problem.key.removeprefix("hyperparameters."))
        return "; ".join(f"{key}: {message}" for message, key in keys.items())

    def row(self, status: str, reason: str) -> Row:
        """Its row without numbers."""
        choice, known = self.choice, dict[str, Any]()
        if self.resolved is not None:
            batch, precision = self.resolved.batch, self.resolved.strategy.precision
            known = {name: getattr(batch, name) for name in ("micro_batch_size", "accumulation", "replicas")}
            known |= {"samples_per_step": batch.global_batch_size, "precision": precision}
        known |= {"zero_stage": choice.zero_stage, "pipe_parallel_size": choice.pipe_parallel_size}
        return Row(name=self.name, slots=choice.slots, status=status, reason=reason, **known)

    def shape(self, context_dir: Path) -> ModelShape:
        """The sizes of its model, built without weights.

        Raises:
            ConfigError: it cannot be built, or is that of a script that does not state it.
        """
        from determined_ds.train.shape import shape_of_experiment

        assert self.experiment is not None
        assert self.resolved is not None
        return shape_of_experiment(self.experiment, self.resolved, context_dir)


def read_base(document: Document, context_dir: Path, accelerator: Accelerator) -> Base:
    """Read the experiment that choices will be applied to; of a search, its point in the middle."""
    experiment = parse_experiment(document)
    if experiment.searched:
        searcher = {"name": "single", "metric": experiment.metric or "validation_loss"}
        data = {**document.data, "hyperparameters": as_constants(experiment.hyperparameters.data)}
        data["searcher"] = {**searcher, "smaller_is_better": experiment.smaller_is_better}
        experiment = parse_experiment(document.holding(data))
    if problems := code_problems(experiment, context_dir, option="--measure"):
        raise ConfigError(problems)
    where = Where(context_dir=context_dir, accelerator=accelerator)
    resolved = decide_stated(experiment, experiment.hyperparameters, where)
    if resolved is None:
        raise ConfigError(left_open(experiment))
    forms: dict[bool, str] = {}
    module, _, own = experiment.trial.partition(":")
    file = source_of(module, context_dir) if own else None
    body = [] if file is None else Source(file, context_dir).tree.body
    sisters = [node.name for node in body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    sisters.sort(key=lambda name: -SequenceMatcher(None, name, own).ratio())
    for name in [own, *sisters] if own else ():  # its own, and the nearest sister in its module
        has_stages = read_trial(f"{module}:{name}", context_dir).has_stages
        if name == own:  # what one written by hand does with stages is its own affair
            has_stages = bool(has_stages)
        if has_stages is not None:
            forms.setdefault(has_stages, f"{module}:{name}")
    return Base(
        experiment=experiment,
        resolved=resolved,
        context_dir=context_dir,
        accelerator=accelerator,
        forms=forms,
    )


# ------------------------------------------------------------------------------------------ applying


def decided(base: Base, name: str, choice: Choice) -> Variant:
    """A choice applied to an experiment, and whether that can run."""
    try:
        experiment = parse_experiment(_applied(base, choice))
        where = Where(context_dir=base.context_dir, accelerator=base.accelerator)
        resolved = decide_stated(experiment, experiment.hyperparameters, where)
        if resolved is None:
            raise ConfigError(left_open(experiment))
    except ConfigError as error:
        return Variant(name=name, choice=choice, problems=error.problems)
    return Variant(name=name, choice=choice, experiment=experiment, resolved=resolved)


def _applied(base: Base, choice: Choice) -> Document:
    """The experiment's YAML with a choice applied: a whole experiment that runs by itself."""
    experiment, is_pipeline = base.experiment, choice.pipe_parallel_size > 1
    _check_code(base, choice)
    data = as_plain(experiment.config)
    stated = data["hyperparameters"]
    # By their real names only, since what is said here stands there.
    sizes = {path[0] for name, path in BY_OTHER_NAMES.items() if name in stated and path[0] in SIZES}
    made = {key: value for key, value in stated.items() if key not in DECIDED}
    made |= {name: base.resolved.hyperparameters.get((name,)) for name in sizes}
    made["data_parallel_world_size"] = "auto"
    made["pipe_parallel_size"] = choice.pipe_parallel_size
    made["deepspeed_config"] = {"type": "const", "val": _ds_config(base, choice)}
    if base.checkpointing_key is not None and choice.activation_checkpointing is not None:
        made[base.checkpointing_key] = choice.activation_checkpointing
    for key in OF_PIPELINES:
        if not is_pipeline or (key == "pipe_chunks" and choice.pipe_schedule is not None):
            made.pop(key, None)
    if is_pipeline and choice.pipe_schedule is not None:
        made["pipe_schedule"] = choice.pipe_schedule  # with its own number of chunks
    data["hyperparameters"] = made
    data["resources"] = {**(data.get("resources") or {}), "slots_per_trial": choice.slots}
    if trial := base.forms.get(is_pipeline):
        words, own = data["entrypoint"], experiment.trial
        is_list = isinstance(words, list)
        swapped = [trial if word == own else word for word in words] if is_list else words.replace(own, trial)
        data["entrypoint"] = swapped
    return experiment.document.holding(data)


def _check_code(base: Base, choice: Choice) -> None:
    """Refuse what the experiment's code cannot do.

    Where the source of a trial does not show that it makes its engine itself, the rank finds out later.
    """
    experiment, stages = base.experiment, choice.pipe_parallel_size
    module, _, name = experiment.trial.partition(":")
    message = fix = ""
    if experiment.script is not None:
        fix = "leave that strategy out, or write the model as a trial"
        if stages != base.own.pipe_parallel_size or choice.pipe_schedule not in (None, ONE_F_ONE_B):
            message = "a script keeps the stages that its code builds, and their schedule"
    elif (stages > 1) not in base.forms:
        wanted, has = ("PipelineTrial", "no stages") if stages > 1 else ("DataParallelTrial", "stages")
        message = f"{name} has {has}, and {module} has no other that is a {wanted}"
        fix = f"write one beside {name}, in the same module, or leave that strategy out"
    by_hand = experiment.script or read_trial(experiment.trial, base.context_dir).extends[0] == BY_HAND
    if choice.engine != "deepspeed" and by_hand:
        message = f"{name or 'a script'} makes its engine itself, so it cannot be trained by {choice.engine}"
        fix = f"leave {choice.engine} out; zero0 reduces the same gradients, by DeepSpeed"
    if message:
        value = str(experiment.entrypoint)
        raise ConfigError(experiment.document.problem(ENTRYPOINT, message, fix, "trial-kind", value=value))


def _ds_config(base: Base, choice: Choice) -> dict[str, Any]:
    """The experiment's DeepSpeed JSON with what is chosen in it; what the choice does not decide stays."""
    own = base.resolved.stated
    ds: dict[str, Any] = as_plain({key: value for key, value in own.data.items() if key not in BATCH_KEYS})
    if choice.micro_batch_size is not None:
        ds[MICRO_BATCH] = choice.micro_batch_size
    elif choice.pipe_parallel_size > 1:
        ds[ACCUMULATION] = _num_micro_batches(base, choice)
    if choice.precision is not None:
        for name in ("bf16", "fp16"):
            if name in ds or name == choice.precision:
                ds[name] = {**(ds.get(name) or {}), "enabled": name == choice.precision}
    kept = ds.get("zero_optimization") or {}
    zero = {key: value for key, value in kept.items() if key not in (*OFFLOADS, *ZEROPP)}
    if choice.zero_stage < 3:
        zero = {key: value for key, value in zero.items() if not key.startswith(STAGE_3)}
    zero["stage"] = choice.zero_stage
    for key, is_wanted in zip(OFFLOADS, (choice.offload_optimizer, choice.offload_param), strict=True):
        if is_wanted:
            is_of_use = own.get(("zero_optimization", key, "device")) not in (None, "none")
            zero[key] = kept[key] if is_of_use else {"device": "cpu", "pin_memory": "auto"}
    if choice.zeropp and base.own.zeropp and choice.slots == base.own.slots:
        zero |= {key: kept[key] for key in ZEROPP if key in kept}
    elif choice.zeropp:
        zero |= zip(ZEROPP, (choice.slots, True, True), strict=True)
    ds["zero_optimization"] = zero
    return ds


def _num_micro_batches(base: Base, choice: Choice) -> int:
    """Micro-batches of a pipeline's step that divide a replica's share, and that its schedule can order.

    As many as the experiment has, where only the schedule of its own pipeline is another; else four a stage. Where
    these do not do, the most below; where there are none, the fewest above.
    """
    stages, own = choice.pipe_parallel_size, base.resolved.strategy
    share = max(1, base.resolved.batch.global_batch_size // max(1, choice.slots // stages))
    is_own = choice.pipe_schedule is not None and own.pipe_parallel_size == stages
    wanted = own.accumulation if is_own else MICRO_BATCHES_A_STAGE * stages
    schedule = choice.pipe_schedule or own.pipe_schedule
    chunks = own.pipe_chunks if choice.pipe_schedule is None else default_chunks(schedule)

    def can_be_ordered(count: int) -> bool:
        return not Pipeline(schedule=schedule, ranks=stages, micro_batches=count, chunks=chunks).problem()

    dividing = [count for count in range(1, share + 1) if share % count == 0]
    # Where none can be ordered, the configuration is refused with what the schedule needs.
    fitting = [count for count in dividing if can_be_ordered(count)] or dividing
    return max((count for count in fitting if count <= wanted), default=fitting[0])


# ------------------------------------------------------------------------------------------------ by name


def named_variants(base: Base, names: Sequence[str], slots: Sequence[int]) -> list[Variant]:
    """Every strategy, of :data:`determined_ds.config.strategy.FORMS`, on every number of slots."""
    own, found = base.resolved.strategy, []
    for name, count in itertools.product(dict.fromkeys(names), dict.fromkeys(slots)):
        form = FORMS[name]
        is_pipeline, schedule = "pipe_schedule" in form, form.get("pipe_schedule")
        keeps_stages = own.pipe_parallel_size > 1 and count % own.pipe_parallel_size == 0
        stages = own.pipe_parallel_size if keeps_stages else count
        keeps_zero = schedule is not None and own.pipe_parallel_size > 1
        micro_batch_size = None
        if (
            not is_pipeline and own.pipe_parallel_size == 1
        ):  # a pipeline's says nothing about an undivided model
            # The largest up to the experiment's own that divides a replica's share; else it is refused as it is.
            share, rest = divmod(base.resolved.batch.global_batch_size, count)
            sizes = range(min(own.micro_batch_size, share), 0, -1)
            micro_batch_size = None if rest else next(size for size in sizes if share % size == 0)
        choice = Choice(
            zero_stage=own.zero_stage if keeps_zero else form.get("zero_stage", 0),
            slots=count,
            pipe_parallel_size=stages if is_pipeline else 1,
            pipe_schedule=schedule,
            micro_batch_size=micro_batch_size,
            offload_optimizer="offload_optimizer" in form,
            offload_param="offload_param" in form,
            zeropp="zeropp" in form,
            engine=form.get("engine", "deepspeed"),
        )
        variant = decided(base, name, choice)
        if is_pipeline and count == 1:
            message = "a pipeline needs two slots or more"
            problem = Problem(key="--slots", value=count, message=message, fix="--slots 2", code="strategy")
            variant = Variant(name=name, choice=choice, problems=(problem,))
        found.append(variant)
    return found
