"""Strategies by their names, and the experiment that each of them makes of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from determined_ds.check.trial_class import builds_engine_by_hand
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where
from determined_ds.documents.document import Document, nearest
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import decide
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.tune.choice import Base, Choice, laid_over


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
        """Why it cannot run, in a sentence or two; each said once, of the first key that it is true of."""
        told: dict[str, str] = {}
        for problem in self.problems:
            told.setdefault(
                problem.message, f"{problem.key.removeprefix('hyperparameters.')}: {problem.message}"
            )
        return "; ".join(told.values())


def decided(base: Base, name: str, choice: Choice) -> Variant:
    """A choice laid over an experiment, and whether that can run."""
    try:
        document = laid_over(base, choice)
        experiment = parse_experiment(document)
        _check_engine(experiment, choice, base.context_dir)
        where = Where(context_dir=base.context_dir, accelerator=base.accelerator)
        resolved = decide(experiment, experiment.hyperparameters, where)
    except ConfigError as error:
        return Variant(name=name, choice=choice, problems=error.problems)
    return Variant(name=name, choice=choice, document=document, experiment=experiment, resolved=resolved)


def _check_engine(experiment: Experiment, choice: Choice, context_dir: Path) -> None:
    """Refuse torch's DistributedDataParallel for a trial that makes its engine itself: DeepSpeed would train.

    What the source does not tell, the rank sees where the engine is wrapped.
    """
    if choice.engine == "deepspeed" or not builds_engine_by_hand(experiment.trial, context_dir):
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

Maker = Callable[[Base, int], Choice]


def _zero(stage: int, *, optimizer: bool = False, param: bool = False, zeropp: bool = False) -> Maker:
    def make(base: Base, slots: int) -> Choice:
        return Choice(
            zero_stage=stage,
            slots=slots,
            micro_batch_size=same_micro_batch(base, slots),
            offload_optimizer=optimizer,
            offload_param=param,
            zeropp=zeropp,
        )

    return make


def _pipeline(stage: int) -> Maker:
    def make(base: Base, slots: int) -> Choice:
        own = base.resolved.topology.pipe_parallel_size
        stages = own if own > 1 and slots % own == 0 else slots
        return Choice(zero_stage=stage, slots=slots, pipe_parallel_size=stages)

    return make


def _ddp(base: Base, slots: int) -> Choice:
    return Choice(zero_stage=0, slots=slots, micro_batch_size=same_micro_batch(base, slots), engine="ddp")


STRATEGIES: dict[str, Maker] = {
    "ddp": _ddp,
    "zero0": _zero(0),
    "zero1": _zero(1),
    "zero2": _zero(2),
    "zero3": _zero(3),
    "zero1_offload": _zero(1, optimizer=True),
    "zero2_offload": _zero(2, optimizer=True),
    "zero3_offload": _zero(3, optimizer=True, param=True),
    "zeropp": _zero(3, zeropp=True),
    "pipeline": _pipeline(0),
    "pipeline_zero1": _pipeline(1),
    "single_gpu_simple": _zero(0),
    "single_gpu_offload": _zero(2, optimizer=True),
}
ON_ONE_SLOT = ("single_gpu_simple", "single_gpu_offload")


def same_micro_batch(base: Base, slots: int) -> int | None:
    """The experiment's own micro-batch, as far as it divides a replica's share; None has it derived.

    A pipeline's micro-batch says nothing of one that is not cut.
    """
    if base.resolved.topology.pipe_parallel_size > 1:
        return None
    batch = base.resolved.batch
    share, rest = divmod(batch.global_batch_size, slots)
    if rest:
        return None  # which cannot run, and says so
    return next(size for size in range(min(batch.micro_batch_size, share), 0, -1) if share % size == 0)


def check_names(names: Iterable[str]) -> None:
    """Refuse a strategy that there is none of.

    Raises:
        ConfigError: all that are misspelt.
    """
    problems = []
    names = list(names)
    for name in names:
        if name not in STRATEGIES:
            guess = nearest(name, STRATEGIES)
            fix = f"did you mean {guess}? " if guess else ""
            problems.append(
                Problem(
                    key="--strategies",
                    value=name,
                    message="no such strategy",
                    fix=f"{fix}there are: {', '.join(STRATEGIES)}",
                    code="strategy",
                )
            )
    if not names:
        fix = f"name some of: {', '.join(STRATEGIES)}"
        problems.append(Problem(key="--strategies", message="names none", fix=fix, code="strategy"))
    if problems:
        raise ConfigError(problems)


def named_variants(base: Base, names: Sequence[str], slots: Sequence[int]) -> list[Variant]:
    """Every strategy on every number of slots; those of one slot once.

    Args:
        base: The experiment.
        names: Of :data:`STRATEGIES`.
        slots: Numbers of ranks, >= 1.

    Raises:
        ConfigError: a name is misspelt.
    """
    check_names(names)
    found = []
    for name in dict.fromkeys(names):
        for count in dict.fromkeys(slots) if name not in ON_ONE_SLOT else (1,):
            if name.startswith("pipeline") and count < 2:
                problem = Problem(
                    key="--slots",
                    value=count,
                    message="a pipeline needs two slots or more",
                    fix="--slots 2",
                    code="strategy",
                )
                choice = Choice(zero_stage=0, slots=count)
                found.append(Variant(name=name, choice=choice, problems=(problem,)))
                continue
            found.append(decided(base, name, STRATEGIES[name](base, count)))
    return found
