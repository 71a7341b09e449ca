"""Layers are cut by their measured times so that a step takes hardly longer than by the best cut there is."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.package import cut_by_times
from tests.pipe.steps import (
    DUALPIPEV,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    UNITS,
    ZB_H1,
    Step,
    simulated,
    step_time,
)

STEPS = (
    Step(ONE_F_ONE_B, 2, 4),
    Step(ONE_F_ONE_B, 4, 8),
    Step(GPIPE, 3, 6),
    Step(ZB_H1, 3, 6),
    Step(INTERLEAVED, 2, 4, 2),
    Step(DUALPIPEV, 2, 4, 2),
)


def cut(seconds: list[float], step: Step) -> list[list[float]]:
    """The layers of each part; a backward pass takes twice a forward pass."""
    starts = cut_by_times([(each, 2 * each) for each in seconds], *step)
    assert starts[0] == 0
    return [seconds[a:b] for a, b in itertools.pairwise([*starts, len(seconds)])]


def seconds_of(parts: list[list[float]], step: Step) -> float:
    """Of the passes of a step, where layers are shared out so."""
    sums = list(map(sum, parts))
    return step_time(simulated(step, lambda op: UNITS[op[0]] * sums[op[1]]))


def every_cut(seconds: list[float], step: Step) -> list[list[list[float]]]:
    inner = itertools.combinations(range(1, len(seconds)), step.parts - 1)
    return [[seconds[a:b] for a, b in itertools.pairwise((0, *each, len(seconds)))] for each in inner]


def test_of_twenty_models_nineteen_are_cut_within_a_tenth_of_the_best_there_is() -> None:
    drawn, ratios = random.Random(0), []
    for _ in range(10):
        for step in STEPS:
            seconds = [float(drawn.randint(1, 50)) for _ in range(drawn.randint(4, 9))]
            best = min(seconds_of(each, step) for each in every_cut(seconds, step))
            ratios.append(seconds_of(cut(seconds, step), step) / best)
    assert sum(ratio <= 1.1 for ratio in ratios) >= 0.95 * len(ratios), sorted(ratios)[-4:]


def test_a_heavy_head_gets_a_stage_of_few_layers() -> None:
    """Twelve blocks and a head that takes as long as eight; equal layers are shared out equally."""
    found = cut([0.1, 0.1, *[1.0] * 12, 0.1, 8.0], Step(ONE_F_ONE_B, 2, 8))
    assert [3 * sum(part) for part in found] == pytest.approx([30.6, 30.3])
    for step in STEPS:
        if step.chunks == 1:
            assert {len(part) for part in cut([1.0] * 12 * step.ranks, step)} == {12}
