"""What ``det-ds autotune`` was given -> a tuning, or every reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from determined_ds.config.accelerator import Accelerator, assumed_cuda
from determined_ds.config.keys import MEASURE, ignored_keys
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document, nearest
from determined_ds.documents.writing import write_files
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.launch.interrupts import Interrupts
from determined_ds.memory import ModelShape
from determined_ds.protocol.run_dir import RUNS, new_run_dir, short, slug
from determined_ds.protocol.run_lock import RunLock, check_run_dir
from determined_ds.report.files import write_report
from determined_ds.report.measurements import STOPPED, Results, Row
from determined_ds.tune.axes import AXES, Left, check_axes
from determined_ds.tune.candidates import Candidate, candidates_of, memory_of_rank, reference_of
from determined_ds.tune.choice import Base, read_base
from determined_ds.tune.emit import emitted, stated
from determined_ds.tune.interleaved import machine, threads_a_rank
from determined_ds.tune.measurement import Watch, measure
from determined_ds.tune.selection import METRICS, Budget, Measured, Tuning
from determined_ds.tune.variants import Variant
from determined_ds.tune.winner import winner_yaml

BEST = "best.yaml"
TOKENS = "tokens_per_second"
SHORTEST_S = 30  # starting the ranks alone takes about ten seconds
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
LARGEST = 2**62


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Measures candidates in processes of their own.

    Args:
        base: The experiment.
        run_dir: Where the runs are written; what was measured there already is not measured again.
        steps: Steps of a run that are measured.
        warmup: Steps before them.
        interrupts: Ends a run.
    """

    base: Base
    run_dir: Path
    steps: int
    warmup: int
    interrupts: Interrupts

    def __call__(self, candidate: Candidate, repetition: int, watch: Watch) -> Row:
        """Measure a candidate for the n-th time."""
        return measure(
            candidate.variant,
            context_dir=self.base.context_dir,
            run_dir=self.run_dir / "runs" / candidate.name.replace(" ", "-") / str(repetition),
            accelerator=self.base.accelerator.name,
            steps=self.steps,
            warmup=self.warmup,
            interrupts=self.interrupts,
            threads=threads_a_rank(self.base, self.base.experiment.slots),
            watch=watch,
        )


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """A tuning that will start, and what is written of it.

    Args:
        tuning: It.
        runs: What it measures with.
        dropped: Reason -> how many choices cannot run.
        left: What is not searched, and why.
        title: Of the report.
        command: What was typed.
        created: When, ISO 8601.
    """

    tuning: Tuning
    runs: Runs
    dropped: dict[str, int]
    left: tuple[Left, ...]
    title: str
    command: str
    created: str

    @property
    def base(self) -> Base:
        return self.runs.base

    @property
    def run_dir(self) -> Path:
        """Where everything is written."""
        return self.runs.run_dir

    def header(self, *, runs_here: bool = True) -> list[str]:
        """What there is to choose from, in a few lines for people."""
        batch = self.base.resolved.batch.global_batch_size
        lines = [
            f"{self.title}: {len(self.tuning.candidates)} ways to train it on {self.base.experiment.slots} slots,"
            f" global batch {batch}",
        ]
        if runs_here:
            lines.append(f"  run dir  {short(self.run_dir)}")
        lines += [
            f"  dropped  {count:>4} that cannot run: {reason}" for reason, count in self.dropped.items()
        ]
        lines += [f"  left out {each.axis}: {each.reason}" for each in self.left]
        return lines

    def run(self) -> Measured | None:
        """Tune, and write the report and the winner.

        Returns:
            The best; None where it was interrupted before anything was measured.

        Raises:
            ConfigError: the experiment as it is could not be measured, nothing has the loss that it should, or
                another process writes to the run directory.
        """
        self.tuning.changed = self._write
        with RunLock(self.run_dir):
            return self._run(self.runs.interrupts)

    def _run(self, interrupts: Interrupts) -> Measured | None:
        with interrupts:
            self.tuning.run(interrupts)
        best = self.tuning.best
        first = self.tuning.found.get(self.tuning.candidates[0].name)
        if self.tuning.found:
            write_report(self.results(), self.run_dir)
        if best is None or first is None:
            if interrupts.requested:
                return None
            assert first is not None
            raise ConfigError(self._nothing_measured(first))
        write_files({self.run_dir / BEST: winner_yaml(self.tuning, best)}, overwrite=True)
        return best

    def _nothing_measured(self, first: Measured) -> Problem:
        if first.row.status == STOPPED:
            fix = "give it more time, e.g. --budget 10m"
            return Problem(key="--budget", message="ended before the first measurement did", fix=fix)
        if first.disagrees:
            message = (
                f"nothing that was tried trains as it should; of the experiment as it is, {first.disagrees}"
            )
            return Problem(
                key="--loss-tolerance", message=message, fix="allow more, or use another precision"
            )
        fix = f"see {short(self.run_dir / 'runs')}; det-ds run CONFIG --test tells more"
        message = f"the experiment as it is does not run: {first.row.reason}"
        return Problem(key="autotune", message=message, fix=fix)

    def results(self) -> Results:
        """Every row so far, the experiment as it was first."""
        return Results(
            title=self.title,
            command=self.command,
            created=self.created,
            machine=machine(self.base),
            accelerator=self.base.accelerator.name,
            steps=self.runs.steps,
            rows=self.tuning.rows,
        )

    def _write(self) -> None:
        write_report(self.results(), self.run_dir, page=False)


def prepare_autotune(
    config: Path,
    context_dir: Path,
    *,
    metric: str,
    budget: str,
    over: Sequence[str],
    steps: int,
    warmup: int,
    tolerance: float,
    slots: int | None = None,
    overrides: Iterable[str] = (),
    run_dir: Path | None = None,
    accelerator: str | None = None,
    command: str = "",
    for_cluster: bool = False,
    now: datetime,
    tell: Callable[[str], None] = print,
) -> Autotune:
    """Decide a tuning from what ``det-ds autotune`` was given.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    found = Problems()
    found.of(lambda: check_axes(over))
    found.of(lambda: _check_metric(metric))
    allowed = found.of(lambda: parse_budget(budget))
    document = found.of(
        lambda: read_document(config, context_dir, slots=slots, overrides=overrides, command="autotune")
    )
    devices = found.of(lambda: _devices(accelerator, document if for_cluster else None))
    found.raise_any()
    assert document is not None
    assert devices is not None
    assert allowed is not None
    found.warn(() if for_cluster else ignored_keys(document, MEASURE))
    base = found.need(lambda: read_base(document, context_dir, devices))
    found.warn(base.resolved.warnings)
    where = run_dir or new_run_dir(RUNS / f"{slug(base.experiment.name)}_autotune", now)
    found.of(lambda: check_run_dir(where))
    found.raise_any()
    for warning in found.warnings:
        tell(f"warning: {warning}")
    memory = LARGEST if for_cluster else memory_of_rank(base)  # of a cluster's slots nothing is known
    candidates = candidates_of(base, over, lambda variant: _shape_of(base, variant), memory)
    if metric == TOKENS and not candidates.possible[0].shape.sequence_length:
        raise ConfigError(_no_tokens(base))
    if len(candidates.possible) < 2:
        raise ConfigError(_nothing_to_choose(candidates.dropped, candidates.left))
    told = "ending the measurement; the best so far is written"
    runs = Runs(base=base, run_dir=where.resolve(), steps=steps, warmup=warmup, interrupts=Interrupts(told))
    tuning = Tuning(
        candidates=candidates.possible,
        reference=reference_of(base, lambda variant: _shape_of(base, variant)),
        measure=runs,
        metric=metric,
        budget=allowed,
        warmup=warmup,
        tolerance=tolerance,
        tell=tell,
    )
    return Autotune(
        tuning=tuning,
        runs=runs,
        dropped=candidates.dropped,
        left=candidates.left,
        title=base.experiment.name,
        command=command,
        created=now.isoformat(timespec="seconds"),
    )


def _devices(accelerator: str | None, on_cluster: Document | None) -> Accelerator:
    """What the ranks compute on: here what there is; on a cluster GPUs, unless CPU slots are meant."""
    if on_cluster is None or accelerator == "cpu":
        return detect_accelerator(accelerator)
    slots = on_cluster.get(("resources", "slots_per_trial"))
    return assumed_cuda(slots if isinstance(slots, int) else 1)


def emit(autotune: Autotune, path: Path) -> None:
    """Write the same tuning as an experiment for a cluster."""
    tuning = autotune.tuning
    text = emitted(
        autotune.base,
        [stated(candidate.variant) for candidate in tuning.candidates],
        autotune.left,
        metric=tuning.metric,
        smaller_is_better=METRICS[tuning.metric],
        steps=autotune.runs.steps,
        warmup=tuning.warmup,
    )
    write_files({path: text}, overwrite=True)


def parse_budget(text: str) -> Budget:
    """``20m``, ``1h``, ``90s`` are times; ``12``, ``12 trials`` are runs.

    Raises:
        ConfigError: it is neither, or too small for one trial.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|trials?)?\s*", text)
    fix = "write e.g. 20m, 1h or 12 trials"
    if found is None:
        message = "is neither a time nor a number of trials"
        raise ConfigError(Problem(key="--budget", value=text, message=message, fix=fix, code="budget"))
    number, unit = float(found[1]), found[2]
    if unit in (None, "trial", "trials"):
        if number < 2 or not number.is_integer():
            message = "is too small: one trial measures the experiment as it is, another can be better"
            raise ConfigError(Problem(key="--budget", value=text, message=message, fix=fix, code="budget"))
        return Budget(trials=int(number))
    if number * UNITS[unit] < SHORTEST_S:
        message = (
            f"is too small for one trial, which takes about ten seconds to start: {SHORTEST_S} s or more"
        )
        raise ConfigError(Problem(key="--budget", value=text, message=message, fix=fix, code="budget"))
    return Budget(seconds=number * UNITS[unit])


def _check_metric(metric: str) -> None:
    if metric in METRICS:
        return
    guess = nearest(metric, METRICS)
    hint = f"did you mean {guess}? " if guess else ""
    message = "is not measured by a tuning"
    fix = f"{hint}use one of {', '.join(METRICS)}"
    raise ConfigError(Problem(key="--metric", value=metric, message=message, fix=fix, code="metric"))


def _no_tokens(base: Base) -> Problem:
    return Problem(
        key="--metric",
        value=TOKENS,
        message=f"{base.experiment.trial} does not say how many tokens a sample has",
        fix="use samples_per_second, or write a method tokens_per_sample in the trial",
        code="metric",
    )


def _shape_of(base: Base, variant: Variant) -> ModelShape:
    from determined_ds.runtime.shapes.of_experiment import shape_of_experiment

    assert variant.experiment is not None
    assert variant.resolved is not None
    return shape_of_experiment(variant.experiment, variant.resolved, base.context_dir)


def _nothing_to_choose(dropped: dict[str, int], left: Sequence[Left]) -> Problem:
    reasons = [f"{each.axis}: {each.reason}" for each in left]
    reasons += [f"{count} cannot run: {reason}" for reason, count in dropped.items()]
    return Problem(
        key="--over",
        message=f"there is nothing to choose from ({'; '.join(reasons) or 'one way only'})",
        fix=f"search over more: {', '.join(AXES)}",
        code="axis",
    )
