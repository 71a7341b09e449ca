"""The fastest way to carry out a training, found with few measurements.

A cost model orders what can run; the most promising is measured, in fresh processes; the model learns from it. A run
that is clearly beaten is cut short, one that fails or runs out of memory is never tried in a worse form, and one whose
loss does not agree with fp32's is not taken. What is left of the budget at the end goes to the best ones once more, in
turns with the experiment as it was.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from determined_ds.config.params import LARGEST
from determined_ds.launch.interrupts import Interrupts
from determined_ds.report.results import CANNOT_RUN, FAILED, MEASURED, OUT_OF_MEMORY, STOPPED, Row
from determined_ds.tune.candidates import Candidate, takes_as_much
from determined_ds.tune.cost import CostModel, Prediction, memory_bytes
from determined_ds.tune.measurement import Watch, in_words, merged

METRICS = {  # by which the best is chosen -> whether smaller is better
    "samples_per_second": False,
    "tokens_per_second": False,
    "step_seconds": True,
    "peak_memory_gib": True,
}
BEATEN = 1.25  # times the best step's time, at which a run is cut short
STEPS_TO_JUDGE = 5
WORTH_TRYING = 0.001  # expected gain of the logarithm of the step's time, below which nothing more is tried
CONFIRMED = 3  # that are measured again at the end: the best ones, and the experiment as it was
# Choices by which numbers are computed otherwise; all others only sum them in another order.
OF_NUMBERS = ("precision", "torch_compile")
OF_THE_FIRST = 10  # times as well as the last losses must the first ones agree
ENOUGH = 5  # measurements before it may be that nothing is worth trying


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much may be spent.

    Args:
        trials: Runs that are started.
        seconds: Of the clock.
    """

    trials: int = LARGEST
    seconds: float = math.inf


@dataclass(kw_only=True)
class Measured:
    """A candidate and what it gave.

    Args:
        candidate: It.
        rows: Of its starts, in order; one or more.
        disagrees: Why it is not taken although it ran: its loss is another than fp32's; "" where it is the same.
    """

    candidate: Candidate
    rows: list[Row]
    disagrees: str = ""

    @property
    def row(self) -> Row:
        return merged(self.rows)

    def value(self, metric: str) -> float | None:
        """What it is chosen by, the smaller the better; None where it cannot be chosen."""
        row = self.row
        if not row.is_measured or self.disagrees:
            return None
        found = {
            "step_seconds": row.median_step_seconds,
            "peak_memory_gib": row.peak_memory_bytes,
        }.get(metric, row.median_step_seconds)
        return None if found is None else float(found)


@dataclass(kw_only=True)
class Tuning:
    """Finds the best of some candidates.

    Args:
        candidates: The first is the experiment as it is.
        reference: The experiment in fp32 and not compiled, whose loss the others must reach; None where the first
            is that already, or where no candidate could differ from it.
        measure: Measures a candidate for the n-th time, from 1, cut short as soon as the watch says why.
        metric: Of :data:`METRICS`.
        budget: What may be spent.
        warmup: Steps of a run that do not count.
        tolerance: Largest relative difference from fp32's of the last five steps' mean loss; a tenth of it of the first
            step's, which is of the same weights.
        say: Prints a line as something happens.
        changed: Is called whenever something was measured.
        clock: Seconds.
    """

    candidates: Sequence[Candidate]
    reference: Candidate | None
    measure: Callable[[Candidate, int, Watch], Row]
    metric: str
    budget: Budget
    warmup: int
    tolerance: float
    say: Callable[[str], None] = print
    changed: Callable[[], object] = lambda: None
    clock: Callable[[], float] = time.monotonic
    found: dict[str, Measured] = field(default_factory=dict)
    gave_up: list[str] = field(default_factory=list)
    num_trials: int = 0

    def run(self, interrupts: Interrupts) -> None:
        """Spend the budget, or less where nothing more is worth trying, or the experiment as it is does not run."""
        self._started = self.clock()
        first = self.candidates[0]
        resolved = first.variant.resolved
        assert resolved is not None
        self.model = CostModel(resolved.batch.micro_batch_size, knows_sizes=first.shape is not None)
        self._fp32: Row | None = None
        if self.reference is not None:
            self._measure(self.reference, interrupts)
            known = self.found.get(self.reference.name)
            self._fp32 = known.row if known and known.row.is_measured else None
        self._measure(first, interrupts)
        known = self.found.get(first.name)
        if known is None or not known.row.is_measured:
            return  # there is nothing that others could be held against
        self._fp32 = self._fp32 or known.row
        while not interrupts.requested and self._may_start(keep=self._to_confirm()):
            candidate = self._next()
            if candidate is None:
                break
            self._measure(candidate, interrupts)
        self._confirm(interrupts)

    # --------------------------------------------------------------------------------------- what is next

    def _next(self) -> Candidate | None:
        left = self.left()
        if not left:
            return None
        best = self.best
        if best is None:
            return left[0][0]
        value = best.value(self.metric)
        assert value is not None
        gains = [prediction.expected_improvement(math.log(value)) for _, prediction in left]
        most = max(gains)
        if most < WORTH_TRYING and len(self.found) >= ENOUGH:
            self.say(f"nothing left is expected to gain {WORTH_TRYING:.1%}")
            return None
        return left[gains.index(most)][0]

    def left(self) -> list[tuple[Candidate, Prediction]]:
        """What may still be tried, the fastest first, with what is expected of it."""
        untried = [
            each for each in self.candidates if each.name not in self.found and not self._is_hopeless(each)
        ]
        if self.metric == "peak_memory_gib":
            known = [(each, _log_memory(each)) for each in untried]
        else:
            variants, shapes = [each.variant for each in untried], [each.shape for each in untried]
            known = list(zip(untried, self.model.predict(variants, shapes), strict=True))
        return sorted(known, key=lambda item: item[1].log_seconds)

    def _is_hopeless(self, candidate: Candidate) -> bool:
        """Whether something like it has failed already, and this can only be worse."""
        for measured in self.found.values():
            row, other = measured.row, measured.candidate
            if row.status == OUT_OF_MEMORY and takes_as_much(candidate, other):
                return True
            if row.status in (FAILED, CANNOT_RUN) or measured.disagrees:
                blamed = self._blamed(measured)
                if blamed and blamed <= candidate.variant.choice.stated().items():
                    return True
        return False

    def _blamed(self, measured: Measured) -> set[tuple[str, object]]:
        """What of a failure may have made it one: what has gone well elsewhere has not.

        Where that leaves more, it is not what seldom does: to cut the batch otherwise crashes nothing, and but for
        what changes how numbers are computed a training stays the same.
        """
        left = measured.candidate.variant.choice.stated().items() - self._innocent()
        if measured.disagrees:
            likely = {item for item in left if item[0] in OF_NUMBERS}
        else:
            likely = {item for item in left if item[0] != "micro_batch_size"}
        return likely or left

    def _innocent(self) -> set[tuple[str, object]]:
        """What was part of a run that went well."""
        good = (each for each in self.found.values() if each.row.is_measured and not each.disagrees)
        return {item for each in good for item in each.candidate.variant.choice.stated().items()}

    # ----------------------------------------------------------------------------------------- measuring

    def _measure(self, candidate: Candidate, interrupts: Interrupts) -> None:
        if interrupts.requested:
            return
        known = self.found.get(candidate.name)
        repetition = len(known.rows) + 1 if known else 1
        self.num_trials += 1
        row = self.measure(candidate, repetition, self._watch_clock if known else self._watch)
        if interrupts.requested and row.status == STOPPED:
            return
        if known:
            known.rows.append(row)
        else:
            known = self.found[candidate.name] = Measured(candidate=candidate, rows=[row])
        known.disagrees = known.disagrees or self._disagreement(row)
        seconds = row.median_step_seconds  # of a run that was cut short, too
        if seconds is not None and self.metric != "peak_memory_gib":
            self.model.learn(candidate.variant, candidate.shape, seconds)
        note = f"  REJECTED: {known.disagrees}" if known.disagrees else ""
        self.say(f"{self.num_trials:>3}  {candidate.name:<34}  {in_words(row)}{note}")
        self.changed()

    def _watch(self, seconds: Sequence[float]) -> str | None:
        """Why a run is cut short: the clock, or that it is clearly beaten."""
        late = self._watch_clock(seconds)
        best = self.best
        if late or best is None or self.metric == "peak_memory_gib":
            return late
        limit = best.row.median_step_seconds
        measured = list(seconds)[self.warmup :]
        if limit is None or len(measured) < STEPS_TO_JUDGE:
            return None
        if statistics.quantiles(measured, n=4)[0] <= BEATEN * limit:
            return None
        median = statistics.median(measured)
        return f"beaten: {1000 * median:,.0f} ms a step after {len(measured)}, the best takes {1000 * limit:,.0f}"

    def _watch_clock(self, _: Sequence[float]) -> str | None:
        is_over = self.clock() - self._started > self.budget.seconds
        return "the budget's time was over" if is_over else None

    def _disagreement(self, row: Row) -> str:
        """Why a measured run is not the same training; "" where it is, or where that is not known.

        The first loss is of the same weights, and may differ by a tenth of the tolerance; from then on rounding
        alone leads apart, the more the higher the learning rate.
        """
        fp32 = self._fp32
        if row.status != MEASURED or row.loss is None or fp32 is None or fp32.loss is None:
            return ""
        first, first_in_fp32 = row.losses[0], fp32.losses[0]
        if not _agree(first, first_in_fp32, self.tolerance / OF_THE_FIRST):
            begins = "of the same weights"
            if (
                self.candidates[0].base.experiment.script is not None
            ):  # under ZeRO 3 transformers draws others
                begins = "if the script begins with the same weights"
            return f"its first loss is {first:.5g}, and {first_in_fp32:.5g} in fp32, {begins}"
        if not _agree(row.loss, fp32.loss, self.tolerance):
            return f"its loss is {row.loss:.4g} after {len(row.losses)} steps, and {fp32.loss:.4g} in fp32"
        return ""

    # ---------------------------------------------------------------------------------------- the budget

    def _may_start(self, *, keep: int) -> bool:
        """Whether one more run fits, if so many are kept for the end."""
        spent = self.clock() - self._started
        each = spent / max(1, self.num_trials)
        return self.num_trials + keep < self.budget.trials and spent + (keep + 1) * each < self.budget.seconds

    def _to_confirm(self) -> int:
        """Runs that are kept for the end: a quarter at most."""
        if math.isfinite(self.budget.seconds):
            each = (self.clock() - self._started) / max(1, self.num_trials)
            total = min(self.budget.trials, int(self.budget.seconds / max(each, 1e-9)))
        else:
            total = self.budget.trials
        return min(CONFIRMED, total // 4)

    def _confirm(self, interrupts: Interrupts) -> None:
        """Measure the best ones again, and the experiment as it was: once may have been luck."""
        ranked = self.ranked
        first = self.found.get(self.candidates[0].name)
        if not ranked or first is None or ranked[0] is first:
            return
        again = [ranked[0], first, *(each for each in ranked[1:] if each is not first)]
        for measured in again[:CONFIRMED]:
            if interrupts.requested or not self._may_start(keep=0):
                return
            self._measure(measured.candidate, interrupts)

    # ---------------------------------------------------------------------------------------- the answer

    @property
    def ranked(self) -> list[Measured]:
        """What can be chosen, the best first; what was measured for its loss alone is none of it."""
        found = [each for each in self.found.values() if each.candidate is not self.reference]
        values = [(each.value(self.metric), each) for each in found]
        good = [(value, each) for value, each in values if value is not None]
        return [each for _, each in sorted(good, key=lambda item: item[0])]

    @property
    def best(self) -> Measured | None:
        ranked = self.ranked
        return ranked[0] if ranked else None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Of all that was measured, the experiment as it was first; what may not be taken is a failure."""
        found = sorted(self.found.values(), key=lambda each: each.candidate is not self.candidates[0])
        return tuple(
            replace(each.row, status=FAILED, reason=f"rejected: {each.disagrees}")
            if each.disagrees
            else each.row
            for each in found
        )


def _agree(loss: float, expected: float, tolerance: float) -> bool:
    return math.isfinite(loss) and abs(loss - expected) <= tolerance * abs(expected)


def _log_memory(candidate: Candidate) -> Prediction:
    """What is expected of its memory; without the model's sizes only an order: what spreads most comes first."""
    if candidate.shape is not None:
        needed = memory_bytes(candidate.variant, candidate.shape)
        return Prediction(log_seconds=math.log(needed), deviation=0.05)
    choice, resolved = candidate.variant.choice, candidate.variant.resolved
    assert resolved is not None
    spread = choice.zero_stage + choice.offload_optimizer + choice.offload_param
    return Prediction(log_seconds=math.log(resolved.batch.micro_batch_size) - spread, deviation=0.0)
