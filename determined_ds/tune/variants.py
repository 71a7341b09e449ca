"""Strategies by their names, and the experiment that each of them makes of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.config.strategy import FORMS, Named
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import decide_stated, left_open
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.source import BY_HAND, read_trial
from determined_ds.tune.choice import Base, Choice, applied


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
    if read_trial(experiment.trial, context_dir).library != BY_HAND:
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
    """Every strategy on every number of slots; those of one slot once.

    Args:
        base: The experiment.
        names: Of :data:`determined_ds.config.strategy.FORMS`.
        slots: Numbers of ranks, >= 1.
    """
    return [
        _named(base, name, count)
        for name in dict.fromkeys(names)
        for count in ((FORMS[name]["slots"],) if "slots" in FORMS[name] else dict.fromkeys(slots))
    ]


def _named(base: Base, name: str, slots: int) -> Variant:
    if slots > 1 or "pipe_schedule" not in FORMS[name]:
        return decided(base, name, choice_of(base, FORMS[name], slots))
    message = "a pipeline needs two slots or more"
    problem = Problem(key="--slots", value=slots, message=message, fix="--slots 2", code="strategy")
    return Variant(name=name, choice=Choice(zero_stage=0, slots=slots), problems=(problem,))
