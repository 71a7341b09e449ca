"""``det-ds autotune``: from its options to a tuning, and what is written of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from determined_ds.documents.files import write_files
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems
from determined_ds.launch.interrupts import Interrupts
from determined_ds.report.results import STOPPED, Results, Row
from determined_ds.rundir.run_dir import short
from determined_ds.rundir.run_lock import RunLock
from determined_ds.tune.axes import AXES
from determined_ds.tune.candidates import Candidate, candidates_of, memory_of_rank, reference_of
from determined_ds.tune.measurement import Watch
from determined_ds.tune.selection import METRICS, Budget, Measured, Tuning
from determined_ds.tune.stage_axes import Left
from determined_ds.tune.winner import winner_yaml
from determined_ds.tune.workbench import Request, Say, Sizes, Workbench, check_names, open_workbench

BEST = "best.yaml"
TOKENS = "tokens_per_second"
SHORTEST_S = 30  # starting the ranks alone takes about ten seconds
UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """A tuning that is ready to start, and what is written of it.

    Args:
        workbench: The experiment, and where runs go.
        tuning: The search for the best.
        interrupts: Ends it.
        dropped: Reason -> how many choices cannot run.
        left: What is not searched, and why.
        unknown_sizes: Why the sizes of the model are not known; "" where they are.
    """

    workbench: Workbench
    tuning: Tuning
    interrupts: Interrupts
    dropped: dict[str, int]
    left: tuple[Left, ...]
    unknown_sizes: str = ""

    def header(self) -> list[str]:
        """What there is to choose from, in a few lines for people."""
        experiment = self.workbench.base.experiment
        lines = [
            f"{experiment.name}: {len(self.tuning.candidates)} ways to train it on {experiment.slots} slots,"
            f" global batch {self.workbench.base.resolved.batch.global_batch_size}",
            f"  run dir  {short(self.workbench.run_dir)}",
        ]
        lines += [f"  dropped  {count:>4} that cannot run: {why}" for why, count in self.dropped.items()]
        lines += [f"  left out {each.axis}: {each.reason}" for each in self.left]
        if self.unknown_sizes:
            lines.append(f"  memory   not estimated: {self.unknown_sizes};")
            lines.append(
                "           nothing is dropped for its memory, and the first runs are chosen without it"
            )
        return lines

    def run(self) -> Measured | None:
        """Tune, and write the report and the winner.

        Returns:
            The best; None where it was interrupted before anything was measured.

        Raises:
            ConfigError: the experiment as it is could not be measured, no loss agrees, or another process writes to
                the run directory.
        """
        tuning, workbench = self.tuning, self.workbench
        tuning.changed = lambda: workbench.write(tuning.rows, page=False)
        with RunLock(workbench.run_dir):
            with self.interrupts:
                tuning.run(self.interrupts)
            best = tuning.best
            if tuning.found:
                workbench.write(tuning.rows)
            if best is None:
                first = tuning.found.get(tuning.candidates[0].name)
                if first is None or self.interrupts.requested:
                    return None
                raise ConfigError(self._nothing_measured(first))
            write_files({workbench.run_dir / BEST: winner_yaml(tuning, best)}, overwrite=True)
            return best

    def _nothing_measured(self, first: Measured) -> Problem:
        if first.row.status == STOPPED:
            message, fix = "ended before the first measurement", "give it more time, e.g. --budget 10m"
            return Problem(key="--budget", message=message, fix=fix)
        if first.disagrees:
            message = f"no strategy reaches the loss of fp32; of the experiment as it is, {first.disagrees}"
            fix = "allow more, or use another precision"
            return Problem(key="--loss-tolerance", message=message, fix=fix)
        message = f"the experiment as it is does not run: {first.row.reason}"
        fix = f"see {short(self.workbench.run_dir / 'runs')}, or use det-ds run CONFIG --test"
        return Problem(key="autotune", message=message, fix=fix)

    def results(self) -> Results:
        """Every row so far, the experiment as it was first."""
        return self.workbench.results(self.tuning.rows)


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
    found.of(lambda: check_names("--metric", [metric], tuple(METRICS), "metric"))
    allowed = found.of(lambda: parse_budget(budget))
    workbench = open_workbench(request, found, "autotune", say=say)
    assert allowed is not None
    base = workbench.base
    sizes = Sizes(base=base)
    candidates = candidates_of(base, over, sizes, memory_of_rank(base))
    shape = candidates.possible[0].shape
    if metric == TOKENS and (shape is None or not shape.sequence_length):
        raise ConfigError(_no_tokens(workbench))
    if len(candidates.possible) < 2:
        raise ConfigError(_nothing_to_choose(candidates.dropped, candidates.left))
    interrupts = Interrupts("ending the measurement; the best so far is written")
    tuning = Tuning(
        candidates=candidates.possible,
        reference=reference_of(base, sizes),
        measure=_measuring(workbench, interrupts),
        metric=metric,
        budget=allowed,
        warmup=request.warmup,
        tolerance=tolerance,
        say=say,
    )
    return Autotune(
        workbench=workbench,
        tuning=tuning,
        interrupts=interrupts,
        dropped=candidates.dropped,
        left=candidates.left,
        unknown_sizes=sizes.unknown,
    )


def _measuring(workbench: Workbench, interrupts: Interrupts) -> Callable[[Candidate, int, Watch], Row]:
    """What measures a candidate for the n-th time."""

    def run_once(candidate: Candidate, repetition: int, watch: Watch) -> Row:
        slots = workbench.base.experiment.slots
        return workbench.measure(
            candidate.variant, candidate.name, repetition, interrupts, most_slots=slots, watch=watch
        )

    return run_once


def parse_budget(text: str) -> Budget:
    """``20m``, ``1h``, ``90s`` are times; ``12``, ``12 trials`` are runs.

    Raises:
        ConfigError: it is neither, or too small for one trial.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|trials?)?\s*", text)
    number, unit = (float(found[1]), found[2]) if found else (0.0, None)
    if found is None:
        message = "must be a time or a number of trials"
    elif unit in UNITS:
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


def _no_tokens(workbench: Workbench) -> Problem:
    experiment, fix = workbench.base.experiment, "use samples_per_second"
    if experiment.script is None:
        fix += ", or write a method tokens_per_sample in the trial"
    return Problem(
        key="--metric",
        value=TOKENS,
        message=f"{experiment.trial or experiment.script} does not say how many tokens a sample has",
        fix=fix,
        code="metric",
    )


def _nothing_to_choose(dropped: dict[str, int], left: Sequence[Left]) -> Problem:
    reasons = [f"{each.axis}: {each.reason}" for each in left]
    reasons += [f"{count} cannot run: {reason}" for reason, count in dropped.items()]
    return Problem(
        key="--over",
        message=f"there is nothing to choose from ({'; '.join(reasons) or 'one way only'})",
        fix=f"search over more: {', '.join(AXES)}",
        code="axis",
    )
