"""Layers are cut by their measured times so that a step takes hardly longer than by the best cut there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from tests.package import cut_by_times
from tests.pipe.steps import UNITS, Step, simulated, step_time

STEPS = [Step("1f1b", 2, 4), Step("1f1b", 4, 8), Step("gpipe", 3, 6), Step("zb-h1", 3, 6)]
STEPS += [Step("interleaved", 2, 4, 2), Step("dualpipev", 2, 4, 2)]


def parts_of(seconds: list[float], starts: Sequence[int]) -> list[float]:
    """The seconds of each part."""
    return [sum(seconds[a:b]) for a, b in itertools.pairwise([*starts, len(seconds)])]


def cut(seconds: list[float], step: Step) -> Sequence[int]:
    """Where each part starts; a backward pass takes twice a forward pass."""
    return cut_by_times([(each, 2 * each) for each in seconds], *step)


def seconds_of(parts: list[float], step: Step) -> float:
    return step_time(simulated(step, lambda op: UNITS[op[0]] * parts[op[1]]))


def test_of_twenty_models_nineteen_are_cut_within_a_tenth_of_the_best_there_is() -> None:
    drawn, ratios = random.Random(0), []
    for _ in range(10):
        for step in STEPS:
            seconds = [float(drawn.randint(1, 50)) for _ in range(drawn.randint(4, 9))]
            every_cut = itertools.combinations(range(1, len(seconds)), step.parts - 1)
            best = min(seconds_of(parts_of(seconds, (0, *each)), step) for each in every_cut)
            ratios.append(seconds_of(parts_of(seconds, cut(seconds, step)), step) / best)
    assert sum(ratio <= 1.1 for ratio in ratios) >= 0.95 * len(ratios), sorted(ratios)[-4:]


def test_a_heavy_head_gets_a_stage_of_few_layers_and_equal_layers_are_shared_out_equally() -> None:
    """Twelve blocks and a head that takes as long as eight."""
    seconds, step = [0.1, 0.1, *[1.0] * 12, 0.1, 8.0], Step("1f1b", 2, 8)
    assert parts_of(seconds, cut(seconds, step)) == pytest.approx([10.2, 10.1])
    for step in STEPS:
        if step.chunks == 1:
            assert list(cut([1.0] * 12 * step.ranks, step)) == [12 * rank for rank in range(step.ranks)]
