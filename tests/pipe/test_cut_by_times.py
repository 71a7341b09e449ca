"""Layers are cut by their measured times so that a step takes hardly longer than by the best cut there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from tests.package import cut_by_times
from tests.pipe.steps import UNITS, Step, simulated, step_time

STEPS = [Step("1f1b", 2, 4), Step("1f1b", 4, 8), Step("gpipe", 3, 6), Step("zb-h1", 3, 6)]
STEPS += [Step("interleaved", 2, 4, 2), Step("dualpipev", 2, 4, 2)]


def time_of(seconds: list[float], starts: Sequence[int], step: Step) -> float:
    """Of a step, by the seconds of each layer and where each part starts; backward takes twice as long."""
    parts = [sum(seconds[a:b]) for a, b in itertools.pairwise([*starts, len(seconds)])]
    return step_time(simulated(step, lambda op: UNITS[op[0]] * parts[op[1]]))


def test_of_twenty_models_nineteen_are_cut_within_a_tenth_of_the_best_there_is() -> None:
    drawn, ratios = random.Random(0), []
    for _ in range(10):
        for step in STEPS:
            seconds = [float(drawn.randint(1, 50)) for _ in range(drawn.randint(4, 9))]
            every_cut = itertools.combinations(range(1, len(seconds)), step.parts - 1)
            best = min(time_of(seconds, (0, *each), step) for each in every_cut)
            cut = cut_by_times([(each, 2 * each) for each in seconds], *step)
            ratios.append(time_of(seconds, cut, step) / best)
    assert sum(ratio <= 1.1 for ratio in ratios) >= 0.95 * len(ratios), sorted(ratios)[-4:]
