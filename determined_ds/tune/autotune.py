"""``det-ds autotune``: the fastest way to carry out a training, found by measuring.

It begins with the experiment as it is and goes along one axis after the other: each value of an axis is tried with the
best of the others, until a round along all axes brings nothing new. Rules and the memory model leave out what cannot
run before anything starts; a run that is clearly beaten is cut short; one whose loss does not agree with fp32's is not
taken. Then those that the measurements cannot tell apart are measured again, in turns, until they can or the budget is
spent. Nothing is claimed to be faster by what repetitions differ by.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import psutil

from determined_ds.config.layout import Accelerator
from determined_ds.config.params import LARGEST
from determined_ds.config.strategy import plain_forms
from determined_ds.documents.files import write_files
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.launch.interrupts import Interrupts
from determined_ds.memory.fitting import usable_bytes
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import memory_per_rank
from determined_ds.memory.units import format_bytes
from determined_ds.pipe.orders import DUALPIPEV, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from determined_ds.report.results import FAILED, MEASURED, OUT_OF_MEMORY, STOPPED, Results, Row
from determined_ds.rundir.run_dir import short
from determined_ds.rundir.run_lock import RunLock
from determined_ds.tune.measure import (
    Request,
    Say,
    Workbench,
    check_names,
    in_words,
    interval,
    merged,
    open_workbench,
    shape_of,
)
from determined_ds.tune.variants import Base, Choice, Variant, decided

# What may be searched over, in the words of --over, and what it means. The simplest come first.
AXES = {
    "zero_stage": "the ZeRO stage, 0 to 3",
    "micro_batch": "samples of a forward pass; accumulation makes up for it",
    "precision": "bf16 where the processor computes it; the loss must agree with fp32's",
    "activation_checkpointing": "blocks computed again going backward, where the model has a hyperparameter for it",
    "pipeline": "pipeline stages, where the trial's module has a PipelineTrial",
    "pipe_schedule": "the order of a pipeline's passes: 1f1b, interleaved, zb-h1, dualpipev",
    "offload": "optimizer and parameters in host memory; on GPUs",
}
METRICS = ("samples_per_second", "tokens_per_second", "step_seconds", "peak_memory_gib")
TOKENS, MEMORY = "tokens_per_second", "peak_memory_gib"
SCHEDULES = (ONE_F_ONE_B, INTERLEAVED, ZB_H1, DUALPIPEV)  # gpipe takes as long as 1f1b, and holds more
MAX_MICRO_BATCHES = 8  # sizes of a micro-batch that are tried: the largest powers of two, and the whole share
CPU_BF16 = ("avx512_bf16", "amx_bf16")
PROCESS_BYTES = 600 * 2**20  # of a rank that holds no tensor yet: Python, torch and DeepSpeed on a CPU
BEST = "best.yaml"
SHORTEST_S = 30  # starting the ranks alone takes about ten seconds
UNITS = {"s": 1, "m": 60, "h": 3600}
BEATEN = 1.25  # times the best step's time, at which a run is cut short
STEPS_TO_JUDGE = 5
FOR_THE_END = 0.25  # of the budget: kept to measure the best again
MOST_REPETITIONS = 5
OF_THE_FIRST = 10  # times as well as the last losses must the first ones agree
REFERENCE = "in fp32, for its loss"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much may be spent: runs that are started, and seconds of the clock."""

    trials: int = LARGEST
    seconds: float = math.inf


@dataclass(kw_only=True)
class Measured:
    """A variant and what it gave.

    Args:
        variant: It.
        rows: Of its starts, in order; one or more.
        disagrees: Why it is not taken although it ran: its loss is another than fp32's; "" where it is the same.
    """

    variant: Variant
    rows: list[Row]
    disagrees: str = ""

    @property
    def row(self) -> Row:
        """All of its starts; one that may not be taken has failed."""
        row = merged(self.rows)
        return replace(row, status=FAILED, reason=f"rejected: {self.disagrees}") if self.disagrees else row


@dataclass(kw_only=True)
class Autotune:
    """A tuning that is ready to start.

    Args:
        workbench: The experiment, and where runs go.
        own: The experiment as it is.
        reference: The same in fp32 and not compiled, whose loss the others must reach; None where it is so already.
        over: Of :data:`AXES`.
        metric: Of :data:`METRICS`.
        budget: What may be spent.
        tolerance: Largest relative difference from fp32's of the last five steps' mean loss; a tenth of it of the first
            step's, which is of the same weights.
        interrupts: Ends it.
        limit: Bytes of tensors that a rank may hold.
        left: Axis -> why it is not searched.
        unknown_sizes: Why the sizes of the model are not known; "" where they are.
    """

    workbench: Workbench
    own: Variant
    reference: Variant | None
    over: Sequence[str]
    metric: str
    budget: Budget
    tolerance: float
    interrupts: Interrupts
    limit: int
    left: dict[str, str]
    unknown_sizes: str = ""
    found: dict[str, Measured] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # name of a variant -> why it cannot run
    ended: str = ""
    _num_trials: int = 0
    _started_s: float = 0.0

    def header(self) -> list[str]:
        """What is searched, in a few lines for people."""
        base = self.workbench.base
        axes = ", ".join(axis for axis in self.over if axis not in self.left) or "nothing"
        lines = [
            f"{base.experiment.name}: the fastest way to train it on {base.experiment.slots} slots,"
            f" global batch {base.resolved.batch.global_batch_size}",
            f"  over     {axes}",
            f"  run dir  {short(self.workbench.run_dir)}",
            *(f"  left out {axis}: {why}" for axis, why in self.left.items() if axis in self.over),
        ]
        if self.unknown_sizes:
            lines.append(f"  memory   not estimated: {self.unknown_sizes}; nothing is dropped for its memory")
        return lines

    def run(self) -> Measured | None:
        """Tune, and write the report and the winner.

        Returns:
            The best; None where it was interrupted before anything was measured.

        Raises:
            ConfigError: the experiment as it is could not be measured, no loss agrees, or another process writes to
                the run directory.
        """
        bench = self.workbench
        with RunLock(bench.run_dir):
            with self.interrupts:
                self._search()
            for reason, count in Counter(self.refused.values()).items():
                bench.say(f"  left out {count:>3} that cannot run: {reason}")
            if self.found:
                bench.write(self._rows())
            first = self.found.get(self.own.name)
            ranked = self._ranked()
            if first is None or not ranked:
                if first is None or self.interrupts.requested:
                    return None
                raise ConfigError(self._nothing_measured(first))
            best = ranked[0] if self._is_faster(ranked[0], first) or first not in ranked else first
            bench.say(f"ended: {self.ended}")
            for line in self._verdict(best, first):
                bench.say(line)
            write_files({bench.run_dir / BEST: self._winner_yaml(best, first)}, overwrite=True)
            return best

    def results(self) -> Results:
        """Every row so far, the experiment as it was first."""
        return self.workbench.results(self._rows())

    # ------------------------------------------------------------------------------------------ searching

    def _search(self) -> None:
        self._started_s = time.monotonic()
        if self.reference is not None:
            self._measure(self.reference)
        first = self._measure(self.own)
        if first is None or first.row.status != MEASURED:
            return  # there is nothing that others could be held against
        tried: set[tuple[object, ...]] = {_identity(self.own)}
        is_new = True
        while is_new:  # a round along all axes, each from the best so far
            is_new = False
            for axis in self.over:
                best = self._ranked()
                choice = best[0].variant.choice if best else self.own.choice
                for other in self._along(axis, choice):
                    if not self._may_start(FOR_THE_END):
                        self.ended = "the budget for searching is spent"
                        break
                    variant = decided(self.workbench.base, name_of(self.workbench.base, other), other)
                    if variant.can_run and _identity(variant) in tried:
                        continue
                    if variant.can_run:
                        tried.add(_identity(variant))
                    why = self._why_not(variant)
                    if why:
                        self.refused[variant.name] = why
                        continue
                    is_new = True
                    self._measure(variant)
                if self.ended or self.interrupts.requested:
                    is_new = False
                    break
        self.ended = self.ended or "every value of each axis was tried with the best of the others"
        self._tell_apart(first)
        if self.interrupts.requested:
            self.ended = "it was interrupted"

    def _along(self, axis: str, choice: Choice) -> Iterator[Choice]:
        """The other values of an axis, the simplest first."""
        base = self.workbench.base
        stages = choice.pipe_parallel_size
        if axis in self.left:
            return
        if axis == "zero_stage":
            forms = sorted({form.zero_stage for form in plain_forms(has_stages=stages > 1)})
            for stage in forms if stages < choice.slots or stages == 1 else [0]:
                # Parameters are offloaded under ZeRO 3, an optimizer from stage 1 on.
                yield replace(
                    choice,
                    zero_stage=stage,
                    zeropp=choice.zeropp and stage == 3,
                    offload_optimizer=choice.offload_optimizer and stage > 0,
                    offload_param=choice.offload_param and stage == 3,
                )
        elif axis == "micro_batch":
            a_replica = stages * base.resolved.topology.sequence_parallel_size
            share, rest = divmod(base.resolved.batch.global_batch_size, choice.slots // a_replica)
            sizes = [size for size in range(1, share + 1) if not rest and share % size == 0]
            if stages > 1:  # such that every stage has a micro-batch to work on
                sizes = [size for size in sizes if share // size >= stages]
            powers = [size for size in sizes if size & (size - 1) == 0 or size == share]
            for size in reversed(powers[-MAX_MICRO_BATCHES:]):
                yield replace(choice, micro_batch_size=size)
        elif axis == "precision" and base.resolved.strategy.precision == "fp32":
            yield replace(choice, precision="bf16" if choice.precision is None else None)
        elif axis == "activation_checkpointing":
            key = base.checkpointing_key
            other = None if choice.activation_checkpointing is not None else not base.states(key or "")
            yield replace(choice, activation_checkpointing=other)
        elif axis == "pipeline":
            for depth in range(1, choice.slots + 1):
                if choice.slots % depth == 0 and depth != stages and base.has_form(depth):
                    stage = min(choice.zero_stage, 1) if 1 < depth < choice.slots else 0
                    stage = choice.zero_stage if depth == 1 else stage
                    whole = replace(choice, pipe_parallel_size=depth, zero_stage=stage, pipe_schedule=None)
                    yield replace(
                        whole,
                        micro_batch_size=None,
                        zeropp=False,
                        offload_optimizer=False,
                        offload_param=False,
                    )
        elif axis == "pipe_schedule" and stages > 1:
            for schedule in SCHEDULES:
                yield replace(choice, pipe_schedule=schedule)
        elif axis == "offload":
            for form in plain_forms(has_stages=stages > 1):
                if form.zero_stage == choice.zero_stage:
                    yield replace(
                        choice,
                        offload_optimizer=form.offload_optimizer is not None,
                        offload_param=form.offload_param is not None,
                    )

    def _why_not(self, variant: Variant) -> str:
        """Why a variant is not started; "" where it may run."""
        if not variant.can_run:
            return variant.reason
        try:
            shape = self._shape(variant)
        except ConfigError as error:  # the trial refuses it, as a cut into more parts than it has layers
            return error.problems[0].message.rstrip(".")
        assert variant.resolved is not None
        strategy = variant.resolved.strategy
        parts, layers = strategy.pipeline.parts, 0 if shape is None else shape.num_layers
        if strategy.pipe_chunks > 1 and 0 < layers < parts:
            return f"{parts} parts are more than the model's {layers} layers"
        needed = 0 if shape is None else _memory_bytes(variant, shape)
        if needed > self.limit:
            return "it does not fit a rank's memory"
        for other in self.found.values():
            if other.row.status != OUT_OF_MEMORY:
                continue
            if shape is not None:
                as_much = needed >= _memory_bytes(other.variant, shape)
            else:
                mine, its = variant.resolved.batch, other.variant.resolved
                as_much = its is not None and mine.micro_batch_size >= its.batch.micro_batch_size
                rest = replace(variant.choice, micro_batch_size=other.variant.choice.micro_batch_size)
                as_much = as_much and rest == other.variant.choice
            if as_much:
                return f"{other.variant.name} ran out of memory, and it takes as much"
        return ""

    def _shape(self, variant: Variant) -> ModelShape | None:
        """The sizes of a variant's model; None for a script that does not state them.

        Raises:
            ConfigError: the model of a trial cannot be built.
        """
        return None if self.unknown_sizes else shape_of(self.workbench.base, variant)

    # ------------------------------------------------------------------------------------------ measuring

    def _measure(self, variant: Variant) -> Measured | None:
        """Measure a variant once more; None where it was interrupted."""
        if self.interrupts.requested:
            return None
        known, bench = self.found.get(variant.name), self.workbench
        self._num_trials += 1
        row = bench.measure(
            variant,
            variant.name,
            len(known.rows) + 1 if known else 1,
            self.interrupts,
            most_slots=bench.base.experiment.slots,
            watch=lambda seconds: self._watch(seconds, is_first=known is None),
        )
        if self.interrupts.requested and row.status == STOPPED:
            return None
        if known is None:
            known = self.found[variant.name] = Measured(variant=variant, rows=[])
        known.rows.append(row)
        known.disagrees = known.disagrees or self._disagreement(row)
        note = f"  REJECTED: {known.disagrees}" if known.disagrees else ""
        bench.say(f"{self._num_trials:>3}  {variant.name:<34}  {in_words(row)}{note}")
        bench.write(self._rows(), page=False)
        return known

    def _watch(self, seconds: Sequence[float], *, is_first: bool) -> str | None:
        """Why a run is cut short: the clock, or, the first time, that it is clearly beaten."""
        if time.monotonic() - self._started_s > self.budget.seconds:
            return "the budget's time was over"
        ranked = self._ranked()
        limit = ranked[0].row.median_step_seconds if ranked and is_first and self.metric != MEMORY else None
        timed = list(seconds)[self.workbench.request.warmup :]
        if limit is None or len(timed) < STEPS_TO_JUDGE:
            return None
        if statistics.quantiles(timed, n=4)[0] <= BEATEN * limit:
            return None
        median = statistics.median(timed)
        return (
            f"beaten: {1000 * median:,.0f} ms a step after {len(timed)}, the best takes {1000 * limit:,.0f}"
        )

    def _disagreement(self, row: Row) -> str:
        """Why a measured run is not the same training; "" where it is, or where that is not known.

        The first loss is of the same weights, and may differ by a tenth of the tolerance; from then on rounding
        alone leads apart, the more the higher the learning rate.
        """
        name = self.own.name if self.reference is None else self.reference.name
        known = self.found.get(name)
        fp32 = known.rows[0] if known and known.rows else None
        if row.status != MEASURED or row.loss is None or fp32 is None or fp32.loss is None:
            return ""

        def agree(loss: float, expected: float, tolerance: float) -> bool:
            return math.isfinite(loss) and abs(loss - expected) <= tolerance * abs(expected)

        first, first_in_fp32 = row.losses[0], fp32.losses[0]
        if not agree(first, first_in_fp32, self.tolerance / OF_THE_FIRST):
            is_script = self.workbench.base.experiment.script is not None
            begins = "if the script begins with the same weights" if is_script else "of the same weights"
            return f"its first loss is {first:.5g}, and {first_in_fp32:.5g} in fp32, {begins}"
        if not agree(row.loss, fp32.loss, self.tolerance):
            return f"its loss is {row.loss:.4g} after {len(row.losses)} steps, and {fp32.loss:.4g} in fp32"
        return ""

    def _may_start(self, kept: float) -> bool:
        """Whether one more run fits into the budget, if a share of it is kept for the end."""
        spent = time.monotonic() - self._started_s
        each = spent / max(1, self._num_trials)
        in_trials = self.budget.trials - math.floor(kept * self.budget.trials)
        return self._num_trials < in_trials and spent + each < (1 - kept) * self.budget.seconds

    def _tell_apart(self, first: Measured) -> None:
        """Measure again what cannot be told from the best, and the experiment as it was, in turns."""
        while not self.interrupts.requested:
            ranked = self._ranked()
            if not ranked:
                return
            best = ranked[0]
            close = [each for each in ranked[1:] if each is first or not self._is_faster(best, each)]
            # What is told apart by one measurement each is confirmed once: it may have been luck.
            open_ = [each for each in close if not self._is_faster(best, each) or len(each.rows) < 2]
            if not open_ and (len(best.rows) > 1 or best is first):
                self.ended += "; what is best was measured apart from the others"
                return
            again = min([best, *open_], key=lambda each: len(each.rows))
            if len(again.rows) >= MOST_REPETITIONS:
                self.ended += f"; {MOST_REPETITIONS} measurements each do not tell the best ones apart"
                return
            if not self._may_start(0.0):
                self.ended = "the budget is spent"
                return
            if self._measure(again.variant) is None:
                return

    # ------------------------------------------------------------------------------------------ the answer

    def _value(self, row: Row) -> float | None:
        """What a row is ranked by, the smaller the better."""
        return row.peak_memory_bytes if self.metric == MEMORY else row.median_step_seconds

    def _ranked(self) -> list[Measured]:
        """What can be chosen, the best first; what was measured for its loss alone is none of it."""
        good = [
            (value, each)
            for each in self.found.values()
            if each.variant is not self.reference
            and each.row.is_measured
            and (value := self._value(each.row)) is not None
        ]
        return [each for _, each in sorted(good, key=lambda item: item[0])]

    def _is_faster(self, one: Measured, other: Measured) -> bool:
        """Whether one is better than another by more than their measurements differ."""
        if self.metric == MEMORY:
            return (self._value(one.row) or 0) < (self._value(other.row) or 0)
        mine, its = interval(one.row), interval(other.row)
        return mine is not None and its is not None and mine[1] < its[0]

    def _rows(self) -> list[Row]:
        found = sorted(self.found.values(), key=lambda each: each.variant is not self.own)
        return [each.row for each in found]

    def _verdict(self, best: Measured, first: Measured) -> list[str]:
        """What may be claimed of the best, beside the experiment as it was."""
        mine, its, value = interval(best.row), interval(first.row), best.row.samples_per_second or 0
        lines = [f"{best.variant.name}: {value:,.1f} samples/s, {len(best.rows)} measurement(s)"]
        if best is first:
            lines.append(
                "nothing that was tried is faster than the experiment as it was by more than repetitions differ"
            )
        elif mine is not None and its is not None and min(mine) > 0:
            low, high = its[0] / mine[1], its[1] / mine[0]
            lines.append(f"{low:.2f} to {high:.2f} times as fast as the experiment as it was")
        spread = best.row.spread
        if spread is not None and len(best.rows) > 1:
            lines.append(f"its measurements differ by {spread[1] / spread[0] - 1:.0%}")
        return lines

    def _winner_yaml(self, best: Measured, first: Measured) -> str:
        """The winning experiment, whole, with what was chosen and what it gained on top."""
        variant = best.variant
        assert variant.document is not None
        own, chosen = self.own.choice, variant.choice
        others = f"the best of {len(self.found)} strategies that were measured for"
        lines = [
            f"{variant.name}: {others} {self.workbench.base.document.name}.",
            *self._verdict(best, first),
        ]
        for each in fields(Choice):
            before, after = getattr(own, each.name), getattr(chosen, each.name)
            if before != after:
                lines.append(f"  {each.name}: {'as it was' if before is None else before} -> {after}")
        return "".join(f"# {line}\n" for line in lines) + stored_yaml(variant.document.data)

    def _nothing_measured(self, first: Measured) -> Problem:
        if first.row.status == STOPPED:
            message, fix = "ended before the first measurement", "give it more time, e.g. --budget 10m"
            return Problem(key="--budget", message=message, fix=fix)
        if first.disagrees:
            message = f"no strategy reaches the loss of fp32; of the experiment as it is, {first.disagrees}"
            return Problem(
                key="--loss-tolerance", message=message, fix="allow more, or use another precision"
            )
        message = f"the experiment as it is does not run: {first.row.reason}"
        fix = f"see {short(self.workbench.run_dir / 'runs')}, or use det-ds run CONFIG --test"
        return Problem(key="autotune", message=message, fix=fix)


def prepare_autotune(
    request: Request,
    *,
    metric: str,
    budget: str,
    over: Sequence[str],
    tolerance: float,
    say: Say = print,
) -> Autotune:
    """Decide a tuning from the options of ``det-ds autotune``.

    Raises:
        ConfigError: everything that is wrong with them.
    """
    found = Problems()
    found.of(lambda: check_names("--over", over, tuple(AXES), "axis"))
    found.of(lambda: check_names("--metric", [metric], METRICS, "metric"))
    allowed = found.of(lambda: parse_budget(budget))
    workbench = open_workbench(request, found, "autotune", say=say)
    assert allowed is not None
    base, experiment = workbench.base, workbench.base.experiment
    own = decided(base, f"as it is ({name_of(base, base.own)})", base.own)
    if not own.can_run:
        raise ConfigError(own.problems)
    shape, unknown_sizes = None, ""
    try:
        shape = shape_of(base, own)
    except ConfigError as error:
        if experiment.script is None:
            raise
        unknown_sizes = error.problems[0].message
    if metric == TOKENS and (shape is None or not shape.sequence_length):
        message = f"{experiment.trial or experiment.script} does not say how many tokens a sample has"
        fix = "use samples_per_second"
        fix += ", or write a method tokens_per_sample in the trial" if experiment.script is None else ""
        raise ConfigError(Problem(key="--metric", value=TOKENS, message=message, fix=fix, code="metric"))
    limit, needed = _memory_of_rank(base), 0 if shape is None else _memory_bytes(own, shape)
    if needed > limit:
        place = ("resources", "slots_per_trial")
        message = (
            f"a rank needs {format_bytes(needed)} as the experiment is, and here has {format_bytes(limit)}"
        )
        fix = "use a strategy that fits, as det-ds check CONFIG --memory lists them, or a larger machine"
        raise ConfigError(base.document.problem(place, message, fix, "memory"))
    left = _left_out(base)
    if all(axis in left for axis in over):
        reasons = "; ".join(f"{axis}: {left[axis]}" for axis in over)
        message = f"there is nothing to choose from ({reasons})"
        fix = f"search over more: {', '.join(AXES)}"
        raise ConfigError(Problem(key="--over", message=message, fix=fix, code="axis"))
    reference = None
    if base.resolved.strategy.precision != "fp32" or base.resolved.torch_compile:
        made = decided(base, REFERENCE, replace(base.own, precision="fp32", torch_compile=False))
        reference = made if made.can_run else None
    return Autotune(
        workbench=workbench,
        own=own,
        reference=reference,
        over=[axis for axis in AXES if axis in over],
        metric=metric,
        budget=allowed,
        tolerance=tolerance,
        interrupts=Interrupts("ending the measurement; the best so far is written"),
        limit=limit,
        left=left,
        unknown_sizes=unknown_sizes,
    )


def parse_budget(text: str) -> Budget:
    """``20m``, ``1h`` or ``90s`` of the clock, or a number of trials.

    Raises:
        ConfigError: it is neither, or too small.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if match is None:
        message = "must be a time or a number of trials"
    elif unit:
        if number * UNITS[unit] >= SHORTEST_S:
            return Budget(seconds=number * UNITS[unit])
        message = (
            f"is too small: must be {SHORTEST_S} s or more, since a trial takes about ten seconds to start"
        )
    else:
        if number >= 2 and number.is_integer():
            return Budget(trials=int(number))
        message = "is too small: must be 2 trials or more, since the first measures the experiment as it is"
    fix = "write e.g. 20m, 1h or 12 trials"
    raise ConfigError(Problem(key="--budget", value=text, message=message, fix=fix, code="budget"))


def _left_out(base: Base) -> dict[str, str]:
    """Axis -> why it cannot be searched."""
    is_script, left = base.experiment.script is not None, {}
    depths = [depth for depth in range(2, base.own.slots + 1) if base.own.slots % depth == 0]
    if not depths:
        left["pipeline"] = "a pipeline needs two slots or more"
    elif is_script:
        left["pipeline"] = "a script keeps its own stages"
    elif base.staged is None or base.replicated is None:
        left["pipeline"] = "the trial's module has no " + (
            "PipelineTrial" if base.staged is None else "DataParallelTrial"
        )
    if is_script:
        left["pipe_schedule"] = "a script trains by the engine that it builds"
    elif base.own.pipe_parallel_size == 1 and "pipeline" in left:
        left["pipe_schedule"] = "there is no pipeline"
    if base.accelerator.name == "cpu":
        left["offload"] = "a CPU has no other memory to offload to"
    if base.resolved.strategy.precision != "fp32":
        left["precision"] = f"the experiment trains in {base.resolved.strategy.precision}"
    elif not computes_bf16(base.accelerator):
        left["precision"] = "this processor has no instructions for bf16"
    elif not base.takes_bf16:
        left["precision"] = "the script casts no input to bf16"
    if base.checkpointing_key is None:
        left["activation_checkpointing"] = "the model reads no hyperparameter of that name"
    return left


def computes_bf16(accelerator: Accelerator, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bf16 is computed by instructions made for it; on a CPU it may be that it is, and off by default."""
    if accelerator.name != "cpu":
        return accelerator.bf16
    try:
        return any(flag in cpuinfo.read_text() for flag in CPU_BF16)
    except OSError:
        return False


def name_of(base: Base, choice: Choice) -> str:
    """A choice in a few words: ``zero1 micro 8 bf16``."""
    words = [f"zero{choice.zero_stage}{'++' * choice.zeropp}"]
    if choice.pipe_parallel_size > 1:
        stage = f" zero{choice.zero_stage}" if choice.zero_stage else ""
        words = [f"pipeline of {choice.pipe_parallel_size}{stage}", choice.pipe_schedule or ""]
    if choice.micro_batch_size is not None:
        words.append(f"micro {choice.micro_batch_size}")
    words.append("offload all" if choice.offload_param else "offload optimizer" * choice.offload_optimizer)
    words.append(choice.precision or "")
    if choice.activation_checkpointing is not None:
        words.append("checkpointed" if choice.activation_checkpointing else "not checkpointed")
    return " ".join(filter(None, words))


def _identity(variant: Variant) -> tuple[object, ...]:
    """Equal for variants that run just alike, though one of them states what the other leaves open."""
    assert variant.resolved is not None
    assert variant.experiment is not None
    stated = variant.experiment.hyperparameters.data
    own = {key: value for key, value in stated.items() if value not in (False, None)}
    own.pop("deepspeed_config", None)
    topology = variant.resolved.topology
    return (str(variant.resolved.ds_config), str(topology), str(sorted(own.items(), key=str)))


def _memory_bytes(variant: Variant, shape: ModelShape) -> int:
    """Bytes that a rank's tensors take at the peak, by the memory model."""
    assert variant.resolved is not None
    memory = memory_per_rank(shape, variant.resolved.strategy.checkpointed_by(shape.checkpoint_interval))
    on_host = memory.host_bytes if variant.resolved.accelerator.name == "cpu" else 0
    return memory.total_bytes + on_host


def _memory_of_rank(base: Base) -> int:
    """Bytes of tensors that a rank of this machine may hold."""
    if base.accelerator.name == "cuda":
        import torch

        return usable_bytes(int(torch.cuda.get_device_properties(0).total_memory))
    slots = base.resolved.topology.slots
    return max(0, int(psutil.virtual_memory().available / slots) - PROCESS_BYTES)
