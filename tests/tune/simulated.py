"""A machine that is simulated: what a candidate's step takes on it, which the cost model does not know."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from determined_ds.launch.interrupts import Interrupts
from determined_ds.report.results import MEASURED, STOPPED, Row
from determined_ds.tune.candidates import Candidate
from determined_ds.tune.cost import arithmetic
from determined_ds.tune.measurement import Watch
from determined_ds.tune.selection import Budget, Tuning
from tests.tune.bases import row_of

WARMUP, STEPS = 5, 20
START_S = 10.0
LOSS = 2.0


class Machine:
    """Arithmetic times effects of its own, drawn by a seed, and noise.

    Args:
        candidates: What will be measured on it.
        seed: Of everything that is drawn.
        noise: Of a run's speed, relative: two runs of the same differ by it.
        misfit: Of a candidate's speed: what no sum of effects explains.
    """

    def __init__(
        self, candidates: Sequence[Candidate], seed: int = 0, *, noise: float = 0.02, misfit: float = 0.02
    ) -> None:
        self._drawn = random.Random(seed)
        draw = self._drawn.gauss
        self._zero = (0.0, draw(0.03, 0.08), draw(0.05, 0.10), draw(0.20, 0.15))
        self._pipeline, self._bf16 = draw(0.05, 0.20), draw(-0.25, 0.25)
        self._doubled, self._doubled_in_pipeline = draw(-0.03, 0.05), draw(0.0, 0.06)
        self._bf16_zero, self._bf16_pipeline = draw(0.0, 0.06), draw(0.0, 0.08)
        self._speed = math.exp(draw(0.0, 1.0))
        self._noise = noise
        self.seconds = {each.name: self._seconds(each) * math.exp(draw(0.0, misfit)) for each in candidates}
        self.memory: dict[str, int] = {}
        self.first_losses: dict[str, float] = {}  # of the first step; of all others:
        self.losses: dict[str, float] = {}
        self.fails: Callable[[Candidate], tuple[str, str] | None] = lambda _: None
        self.measured: list[str] = []
        self.now = 0.0

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=lambda name: self.seconds[name])

    def _seconds(self, candidate: Candidate) -> float:
        choice, resolved = candidate.variant.choice, candidate.variant.resolved
        assert resolved is not None
        is_pipeline, is_bf16 = choice.pipe_parallel_size > 1, choice.precision == "bf16"
        effect = self._zero[choice.zero_stage] + self._pipeline * is_pipeline
        of_bf16 = self._bf16 + self._bf16_zero * (choice.zero_stage > 0) + self._bf16_pipeline * is_pipeline
        doubled = math.log2(resolved.batch.micro_batch_size / 16)
        effect += of_bf16 * is_bf16 + doubled * (self._doubled_in_pipeline if is_pipeline else self._doubled)
        return self._speed * arithmetic(candidate.variant, candidate.shape) * math.exp(effect)

    def __call__(self, candidate: Candidate, repetition: int, watch: Watch) -> Row:
        """Measure a candidate, as ``Tuning.measure``."""
        name, variant = candidate.name, candidate.variant
        self.measured.append(name)
        assert repetition == self.measured.count(name)
        failed = self.fails(candidate)
        self.now += START_S
        if failed:
            return row_of(variant, (), status=failed[0], reason=failed[1])
        of_run = self.seconds[name] * math.exp(self._drawn.gauss(0.0, self._noise))
        steps: list[float] = []
        for _ in range(WARMUP + STEPS):
            steps.append(of_run * math.exp(self._drawn.gauss(0.0, self._noise)))
            self.now += steps[-1]
            cut = watch(steps)
            if cut:
                return row_of(variant, steps[WARMUP:], status=STOPPED, reason=cut, losses=())
        later = (self.losses.get(name, LOSS),) * (WARMUP + STEPS - 1)
        losses = (self.first_losses.get(name, LOSS), *later)
        memory = self.memory.get(name, 10**9)
        return row_of(variant, steps[WARMUP:], status=MEASURED, losses=losses, memory=memory)


@dataclass
class Told:
    """A tuning on such a machine, and what it told."""

    tuning: Tuning
    machine: Machine
    lines: list[str] = field(default_factory=list)
    interrupts: Interrupts = field(default_factory=lambda: Interrupts("ending"))

    @property
    def best(self) -> str | None:
        best = self.tuning.best
        return best.candidate.name if best else None

    @property
    def share(self) -> float:
        """Of the fastest there is: the speed of the best that was found."""
        assert self.best is not None
        return min(self.machine.seconds.values()) / self.machine.seconds[self.best]


def prepared(candidates: Sequence[Candidate], machine: Machine, **more: Any) -> Told:
    """A tuning that has not begun; ``trials`` or ``seconds`` is its budget."""
    budget = Budget(**{name: more.pop(name) for name in ("trials", "seconds") if name in more})
    tuning = Tuning(
        candidates=candidates,
        reference=more.pop("reference", None),
        measure=machine,
        metric=more.pop("metric", "samples_per_second"),
        budget=budget,
        warmup=WARMUP,
        tolerance=0.02,
        rates=more.pop("rates", None),
        clock=lambda: machine.now,
    )
    told = Told(tuning=tuning, machine=machine)
    tuning.say = told.lines.append
    assert not more, more
    return told


def tuned(candidates: Sequence[Candidate], machine: Machine, **more: Any) -> Told:
    """A tuning to its end."""
    told = prepared(candidates, machine, **more)
    told.tuning.run(told.interrupts)
    return told
