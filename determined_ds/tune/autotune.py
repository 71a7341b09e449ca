"""``det-ds autotune``: the fastest way to carry out a training, found by measuring.

It begins with the experiment as it is and goes along one axis after the other: each value of an axis is tried with the
best of the others, until a round along all axes brings nothing new. Rules and the memory model leave out what cannot
run before anything starts; a run whose loss does not agree with fp32's is not taken. Then those that the measurements
cannot tell apart are measured again, in turns, until they can or the budget is spent. Nothing is claimed to be faster
by what repetitions differ by.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import psutil

from determined_ds.config.params import LARGEST
from determined_ds.config.strategy import Strategy, plain_forms
from determined_ds.devices import cpu_flags
from determined_ds.documents.files import write_files
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems
from determined_ds.experiment.experiment import SLOTS
from determined_ds.experiment.secrets import stored_yaml
from determined_ds.memory.fitting import usable_bytes
from determined_ds.memory.rank import memory_per_rank
from determined_ds.pipe.orders import DUALPIPEV, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from determined_ds.report.results import FAILED, MEASURED, OUT_OF_MEMORY, STOPPED, Results, Row
from determined_ds.rundir.run_dir import RunLock, short
from determined_ds.rundir.signals import Interrupts
from determined_ds.tune.compare import Request, Say, check_names, in_words, open_workbench
from determined_ds.tune.variants import Base, Choice, Variant, decided

# What may be searched over, in the words of --over. The simplest come first.
AXES = (
    "zero_stage",
    "micro_batch",
    "precision",
    "activation_checkpointing",
    "pipeline",
    "pipe_schedule",
    "offload",
)
SCHEDULES = (ONE_F_ONE_B, INTERLEAVED, ZB_H1, DUALPIPEV)  # gpipe takes as long as 1f1b, and holds more
MAX_MICRO_BATCHES = 8  # sizes of a micro-batch that are tried: the largest powers of two, and the whole share
CPU_BF16 = {"avx512_bf16", "amx_bf16"}
PROCESS_BYTES = 600 * 2**20  # of a rank that holds no tensor yet: Python, torch and DeepSpeed on a CPU
BEST = "best.yaml"
REJECTED = "rejected: "  # of a reason: it ran, and its loss is another
SHORTEST_S = 30  # starting the ranks alone takes about ten seconds
UNITS = {"s": 1, "m": 60, "h": 3600}
FOR_THE_END = 0.25  # of the budget: kept to measure the best again
MOST_REPETITIONS = 5
OF_THE_FIRST = 10  # times as well as the last losses must the first ones agree


class Autotune:
    """A tuning: decided when it is made, measured by :meth:`run`.

    Args:
        request: What ``compare`` has too.
        budget: ``20m``, ``1h`` or ``90s`` of the clock, or a number of trials.
        over: Of :data:`AXES`.
        tolerance: Largest relative difference from fp32's of the last five steps' mean loss; a tenth of it of the
            first step's, which is of the same weights.
        say: Prints a line.

    Raises:
        ConfigError: everything that is wrong with the options and the experiment.
    """

    def __init__(
        self, request: Request, *, budget: str, over: Sequence[str], tolerance: float, say: Say
    ) -> None:
        found = Problems()
        found.of(lambda: check_names("--over", over, AXES, "axis"))
        allowed = found.of(lambda: parse_budget(budget))
        self.workbench = open_workbench(request, found, "autotune", say=say)
        assert allowed is not None
        self._most_trials, self._most_seconds = allowed
        self._tolerance, self._say = tolerance, say
        self.interrupts = Interrupts("ending the measurement; the best so far is written")
        self._variants: dict[str, Variant] = {}  # by name, those that were measured
        self._rows: dict[str, Row] = {}  # of them
        self._refused: dict[str, str] = {}  # name of a variant -> why it cannot run
        self._num_trials, self._started_s = 0, 0.0

        self._base = base = self.workbench.base
        left = _left_out(base)
        self._over = [axis for axis in AXES if axis in over and axis not in left]
        batch, slots = base.resolved.batch.global_batch_size, base.experiment.slots
        say(f"  the fastest way to train it on {slots} slots, global batch {batch}")
        say(f"  over     {', '.join(self._over) or 'nothing'}")
        for axis in over:
            if axis in left:
                say(f"  left out {axis}: {left[axis]}")
        if not self._over:
            message, fix = "there is nothing to choose from", f"search over more: {', '.join(AXES)}"
            raise ConfigError(Problem(key="--over", message=message, fix=fix, code="axis"))
        self._own = self._reference = decided(base, f"as it is ({name_of(base.own)})", base.own)
        if self._own.resolved is None:
            raise ConfigError(self._own.problems)
        if base.resolved.strategy.precision != "fp32":  # whose loss the others must reach
            in_fp32 = decided(base, "in fp32, for its loss", replace(base.own, precision="fp32"))
            self._reference = self._own if in_fp32.resolved is None else in_fp32
        # Bytes of tensors that a rank of this machine may hold; None where the model's sizes are not known.
        self._limit: int | None = int(psutil.virtual_memory().available / slots) - PROCESS_BYTES
        if base.accelerator.name == "cuda":
            import torch

            self._limit = usable_bytes(int(torch.cuda.get_device_properties(0).total_memory))
        try:
            self._memory_bytes(self._own)
        except ConfigError as error:
            if base.experiment.script is None:
                raise
            self._limit = None
            say(f"  memory   not estimated: {error.problems[0].message}; nothing is dropped for its memory")
        if why := self._why_not(self._own):
            fix = "use a strategy that fits, as det-ds check CONFIG --memory lists them, or a larger machine"
            raise ConfigError(base.experiment.document.problem(SLOTS, f"as it is, {why}", fix, "memory"))

    def run(self) -> tuple[Results, str] | None:
        """Tune, and write the report and the winner.

        Returns:
            The results, the experiment as it was first, and the name of the best; None where it was interrupted
            before anything was measured.

        Raises:
            ConfigError: the experiment as it is could not be measured, no loss agrees, or another process writes to
                the run directory.
        """
        run_dir = self.workbench.run_dir
        with RunLock(run_dir):
            with self.interrupts:
                ended = self._search()
            for reason, count in Counter(self._refused.values()).items():
                self._say(f"  left out {count:>3} that cannot run: {reason}")
            first, ranked = self._rows.get(self._own.name), self._ranked()
            results = self._write(is_last=True) if self._rows else None
            if first is None or results is None or (not ranked and self.interrupts.requested):
                return None
            if not ranked:
                why, fix = f"the experiment as it is does not run: {first.reason}", "raise --budget, or see "
                fix += f"{short(run_dir / 'runs')}, and use det-ds run CONFIG --test"
                if first.reason.startswith(REJECTED):
                    why = f"no strategy reaches the loss of fp32; of the experiment as it is, {first.reason}"
                    fix = "allow more by --loss-tolerance, or use another precision"
                raise ConfigError(Problem(key="autotune", message=why, fix=fix))
            best = ranked[0] if _is_faster(ranked[0], first) or first not in ranked else first
            times = len(best.repetitions)
            verdict = [f"{best.name}: {best.samples_per_second or 0:,.1f} samples/s, {times} measurement(s)"]
            if best is first:
                verdict.append(
                    "nothing that was tried is faster than the experiment as it was by more than repetitions differ"
                )
            elif best.interval and first.interval and best.interval[0] > 0:
                low, high = first.interval[0] / best.interval[1], first.interval[1] / best.interval[0]
                verdict.append(f"{low:.2f} to {high:.2f} times as fast as the experiment as it was")
            if self.workbench.load:
                verdict.append(f"while it was measured, {self.workbench.load}")
            for line in (f"ended: {ended}", *verdict):
                self._say(line)
            experiment = self._variants[best.name].experiment
            assert experiment is not None
            among = f"the best of {len(self._rows)} strategies that were measured"
            lines = [f"{best.name}: {among} for {self._base.experiment.document.name}.", *verdict]
            text = "".join(f"# {line}\n" for line in lines) + stored_yaml(experiment.config)
            write_files({run_dir / BEST: text}, overwrite=True)
            return results, best.name

    # ------------------------------------------------------------------------------------------ searching

    def _search(self) -> str:
        """Measure until nothing is left or the budget is spent. Returns why it ended."""
        self._started_s = time.monotonic()
        if self._reference is not self._own:
            self._measure(self._reference)
        if not self._measure(self._own) or self._rows[self._own.name].status != MEASURED:
            return ""  # there is nothing that others could be held against
        candidates, ended = self._candidates(), ""
        for kept in (FOR_THE_END, 0.0):  # what is kept, and not needed at the end, is searched with after all
            ended = "the budget is spent"
            while self._may_start(kept) and not self.interrupts.requested:
                variant = next(candidates, None)
                if variant is None:
                    ended = "every value of each axis was tried with the best of the others"
                    break
                self._measure(variant)
            # What cannot be told from the best is measured again in turns, and so is the experiment as it was: what
            # is told apart by one measurement each may have been luck.
            while (ranked := self._ranked()) and not self.interrupts.requested:
                best, own = ranked[0], self._own.name
                close = [
                    each
                    for each in ranked[1:]
                    if not _is_faster(best, each) or (each.name == own and len(each.repetitions) < 2)
                ]
                if not close and (len(best.repetitions) > 1 or best.name == own):
                    ended += "; what is best was measured apart from the others"
                    break
                again = min([best, *close], key=lambda each: len(each.repetitions))
                if len(again.repetitions) >= MOST_REPETITIONS:
                    ended += f"; {MOST_REPETITIONS} measurements each do not tell the best ones apart"
                    break
                if not self._may_start(0.0):
                    return "the budget is spent"
                self._measure(self._variants[again.name])
        return "it was interrupted" if self.interrupts.requested else ended

    def _candidates(self) -> Iterator[Variant]:
        """What can run and was not tried: the values of each axis with the best of the others, the simplest first.

        Round after round along all axes, until one brings nothing new.
        """
        tried, is_new = {_strategy_of(self._own)}, True
        while is_new:
            is_new = False
            for axis in self._over:
                ranked = self._ranked()
                best = self._variants[ranked[0].name] if ranked else self._own
                for choice in _along(self._base, axis, best.choice):
                    variant = decided(self._base, name_of(choice), choice)
                    if variant.resolved is not None and _strategy_of(variant) in tried:
                        continue
                    if why := self._why_not(variant):
                        self._refused[variant.name] = why
                        continue
                    tried.add(_strategy_of(variant))
                    is_new = True
                    yield variant

    def _why_not(self, variant: Variant) -> str:
        """Why a variant is not started; "" where it may run."""
        if variant.resolved is None or self._limit is None:
            return variant.reason
        try:
            needed = self._memory_bytes(variant)
        except ConfigError as error:  # the trial refuses it, as a cut into more parts than it has layers
            return error.problems[0].message.rstrip(".")
        if needed > self._limit:
            return "it does not fit a rank's memory"
        for name, row in self._rows.items():
            if row.status == OUT_OF_MEMORY and needed >= self._memory_bytes(self._variants[name]):
                return f"{name} ran out of memory, and it takes as much"
        return ""

    def _memory_bytes(self, variant: Variant) -> int:
        """Bytes that a rank's tensors take at the peak, by the memory model."""
        shape = variant.shape(self._base.context_dir)
        memory = memory_per_rank(shape, _strategy_of(variant).checkpointed_by(shape.checkpoint_interval))
        return memory.total_bytes + (memory.host_bytes if self._base.accelerator.name == "cpu" else 0)

    # ------------------------------------------------------------------------------------------ measuring

    def _measure(self, variant: Variant) -> bool:
        """Measure a variant once more. Returns whether it was not interrupted."""
        name, slots = variant.name, self._base.experiment.slots
        row = self._rows.get(name) or variant.row(STOPPED, "not measured yet")
        if self.interrupts.requested:
            return False
        self._num_trials += 1
        until_s = self._started_s + self._most_seconds
        start = self.workbench.measure(variant, row, name, self.interrupts, most_slots=slots, until_s=until_s)
        if self.interrupts.requested and start.status == STOPPED:
            return False
        row, why = row.joined(start), self._disagreement(start)
        if why:
            row = replace(row, status=FAILED, reason=f"{REJECTED}{why}")
        self._variants[name], self._rows[name] = variant, row
        note = f"  REJECTED: {why}" if why else ""
        self._say(f"{self._num_trials:>3}  {name:<34}  {in_words(start)}{note}")
        self._write(is_last=False)
        return True

    def _disagreement(self, row: Row) -> str:
        """Why a measured run is not the same training; "" where it is, or where that is not known.

        The first loss is of the same weights, and may differ by a tenth of the tolerance; from then on rounding
        alone leads apart, the more the higher the learning rate.
        """
        fp32 = self._rows.get(self._reference.name)
        if row.status != MEASURED or row.loss is None or fp32 is None or fp32.loss is None:
            return ""

        def agree(loss: float, expected: float, tolerance: float) -> bool:
            return math.isfinite(loss) and abs(loss - expected) <= tolerance * abs(expected)

        if not agree(row.losses[0], fp32.losses[0], self._tolerance / OF_THE_FIRST):
            return f"its first loss is {row.losses[0]:.5g}, and {fp32.losses[0]:.5g} in fp32"
        if not agree(row.loss, fp32.loss, self._tolerance):
            return f"its loss is {row.loss:.4g} after {len(row.losses)} steps, and {fp32.loss:.4g} in fp32"
        return ""

    def _may_start(self, kept: float) -> bool:
        """Whether one more run fits into the budget, if a share of it is kept for the end."""
        spent = time.monotonic() - self._started_s
        each = spent / max(1, self._num_trials)
        in_trials = self._most_trials - math.floor(kept * self._most_trials)
        return self._num_trials < in_trials and spent + each < (1 - kept) * self._most_seconds

    def _ranked(self) -> list[Row]:
        """What can be chosen, the fastest first; what was measured for its loss alone is none of it."""
        for_loss = {self._reference.name} - {self._own.name}
        timed = [row for row in self._rows.values() if row.is_measured and row.name not in for_loss]
        return sorted(timed, key=lambda row: row.median_step_seconds or math.inf)

    def _write(self, *, is_last: bool) -> Results:
        """Write the report, the experiment as it was first."""
        rows = sorted(self._rows.values(), key=lambda row: row.name != self._own.name)
        return self.workbench.write(rows, is_last=is_last)


def _is_faster(one: Row, other: Row) -> bool:
    """Whether one is faster than another by more than their measurements differ."""
    mine, its = one.interval, other.interval
    return mine is not None and its is not None and mine[1] < its[0]


def parse_budget(text: str) -> tuple[int, float]:
    """Runs that may be started, and seconds of the clock, by ``20m``, ``1h``, ``90s`` or a number of trials."""
    match = re.fullmatch(r"\s*(\d+)\s*([smh]?)\s*", text)
    number, unit = (int(match[1]), match[2]) if match else (0, "")
    if unit and number * UNITS[unit] >= SHORTEST_S:
        return LARGEST, number * UNITS[unit]
    if not unit and number >= 2:
        return number, math.inf
    message = (
        f"must be a time of {SHORTEST_S}s or more, or 2 trials or more: the first is the experiment as it is"
    )
    fix = "write e.g. 20m, 1h or 12"
    raise ConfigError(Problem(key="--budget", value=text, message=message, fix=fix, code="budget"))


def _along(base: Base, axis: str, choice: Choice) -> Iterator[Choice]:
    """The values of an axis, the simplest first; all else as it is chosen."""
    stages, slots = choice.pipe_parallel_size, choice.slots
    plain = plain_forms(has_stages=stages > 1)
    if axis == "zero_stage":
        for stage in sorted({form.zero_stage for form in plain}) if stages < slots or stages == 1 else [0]:
            # Parameters are offloaded under ZeRO 3, an optimizer from stage 1 on.
            yield replace(
                choice,
                zero_stage=stage,
                zeropp=choice.zeropp and stage == 3,
                offload_optimizer=choice.offload_optimizer and stage > 0,
                offload_param=choice.offload_param and stage == 3,
            )
    elif axis == "micro_batch":
        replicas = slots // (stages * base.resolved.topology.sequence_parallel_size)
        share, rest = divmod(base.resolved.batch.global_batch_size, replicas)
        # Of a pipeline such that every stage has a micro-batch to work on.
        fewest = stages if stages > 1 else 1
        sizes = [size for size in range(1, share // fewest + 1) if not rest and share % size == 0]
        powers = [size for size in sizes if size & (size - 1) == 0 or size == share]
        for size in reversed(powers[-MAX_MICRO_BATCHES:]):
            yield replace(choice, micro_batch_size=size)
    elif axis == "precision":
        yield replace(choice, precision="bf16" if choice.precision is None else None)
    elif axis == "activation_checkpointing":
        is_on = bool(base.experiment.hyperparameters.get((base.checkpointing_key or "",)))
        yield replace(
            choice,
            activation_checkpointing=None if choice.activation_checkpointing is not None else not is_on,
        )
    elif axis == "pipeline":
        for depth in range(1, slots + 1):
            if slots % depth == 0 and depth != stages and (depth > 1) in base.forms:
                most = 3 if depth == 1 else 1 if depth < slots else 0
                yield Choice(
                    slots=slots,
                    pipe_parallel_size=depth,
                    zero_stage=min(choice.zero_stage, most),
                    precision=choice.precision,
                    activation_checkpointing=choice.activation_checkpointing,
                )
    elif axis == "pipe_schedule" and stages > 1:
        for schedule in SCHEDULES:
            yield replace(choice, pipe_schedule=schedule)
    elif axis == "offload":
        for form in plain:
            if form.zero_stage == choice.zero_stage:
                offloads = (form.offload_optimizer is not None, form.offload_param is not None)
                yield replace(choice, offload_optimizer=offloads[0], offload_param=offloads[1])


def _left_out(base: Base) -> dict[str, str]:
    """Axis -> why it cannot be searched."""
    precision, on_cpu, left = base.resolved.strategy.precision, base.accelerator.name == "cpu", {}
    if base.own.slots == 1:
        left["pipeline"] = "a pipeline needs two slots or more"
    elif base.experiment.script is not None:
        left["pipeline"] = left["pipe_schedule"] = "a script trains by the engine that it builds"
    elif len(base.forms) < 2:
        wanted = "DataParallelTrial" if True in base.forms else "PipelineTrial"
        left["pipeline"] = f"the trial's module has no {wanted}"
    if base.own.pipe_parallel_size == 1 and "pipeline" in left:
        left["pipe_schedule"] = "there is no pipeline"
    if on_cpu:
        left["offload"] = "a CPU has no other memory to offload to"
    if precision != "fp32":
        left["precision"] = f"the experiment trains in {precision}"
    elif not (base.accelerator.bf16 or (on_cpu and cpu_flags() & CPU_BF16)):
        left["precision"] = "this processor has no instructions for bf16"
    if base.checkpointing_key is None:
        left["activation_checkpointing"] = "the experiment states no hyperparameter of that name"
    return left


def name_of(choice: Choice) -> str:
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


def _strategy_of(variant: Variant) -> Strategy:
    assert variant.resolved is not None
    return variant.resolved.strategy
