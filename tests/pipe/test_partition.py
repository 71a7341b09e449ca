"""Where layers are cut by their times: the evenest cut is exact; what is found from it is near the best there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.pipe.orders import DUALPIPEV, GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1, Pipeline
from determined_ds.pipe.partition import (
    Bounds,
    LayerTime,
    evenest,
    fastest,
    method_problem,
    part_seconds,
    rank_seconds,
    step_seconds,
)


def every_cut(layers: int, parts: int) -> Iterator[Bounds]:
    for inner in itertools.combinations(range(1, layers), parts - 1):
        yield (0, *inner, layers)


def timed(seconds: Sequence[float]) -> list[LayerTime]:
    return [LayerTime(name="Layer", parameters=1, forward_s=each, backward_s=2 * each) for each in seconds]


PIPES = (
    Pipeline(schedule=ONE_F_ONE_B, ranks=2, micro_batches=4),
    Pipeline(schedule=ONE_F_ONE_B, ranks=4, micro_batches=8),
    Pipeline(schedule=GPIPE, ranks=3, micro_batches=6),
    Pipeline(schedule=ZB_H1, ranks=3, micro_batches=6),
    Pipeline(schedule=INTERLEAVED, ranks=2, micro_batches=4, chunks=2),
    Pipeline(schedule=DUALPIPEV, ranks=2, micro_batches=4, chunks=2),
)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_cheaper_most_expensive_part(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))

    def most(bounds: Bounds) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    found = evenest(costs, parts)

    assert found[0] == 0
    assert found[-1] == len(costs)
    assert len(found) == parts + 1
    assert all(a < b for a, b in itertools.pairwise(found))
    assert most(found) == min(map(most, every_cut(len(costs), parts)))


@given(st.lists(st.integers(1, 50), min_size=4, max_size=9), st.sampled_from(PIPES))
def test_the_fastest_cut_is_within_a_tenth_of_the_best_there_is_and_never_slower_than_the_evenest(
    seconds: list[int], pipe: Pipeline
) -> None:
    layers = timed(seconds)

    found = step_seconds(layers, fastest(layers, pipe), pipe)

    best = min(step_seconds(layers, cut, pipe) for cut in every_cut(len(layers), pipe.parts))
    assert found <= 1.1 * best
    assert found <= step_seconds(layers, evenest([each.seconds for each in layers], pipe.parts), pipe)


@given(st.integers(1, 30), st.sampled_from([pipe for pipe in PIPES if pipe.chunks == 1]))
def test_equal_layers_are_shared_out_equally(layers: int, pipe: Pipeline) -> None:
    bounds = fastest(timed([1.0] * layers * pipe.parts), pipe)
    assert {b - a for a, b in itertools.pairwise(bounds)} == {layers}


def test_a_heavy_head_gets_a_stage_of_few_layers() -> None:
    """Twelve blocks and a head that takes as long as eight."""
    layers = timed([0.1, 0.1, *[1.0] * 12, 0.1, 8.0])

    bounds = fastest(layers, Pipeline(schedule=ONE_F_ONE_B, ranks=2, micro_batches=8))

    assert part_seconds(layers, bounds) == pytest.approx([30.6, 30.3])


def test_a_rank_of_several_parts_takes_as_long_as_all_of_them() -> None:
    layers, pipe = timed([1, 2, 3, 4]), Pipeline(schedule=INTERLEAVED, ranks=2, micro_batches=2, chunks=2)
    folded = Pipeline(schedule=DUALPIPEV, ranks=2, micro_batches=4, chunks=2)
    assert rank_seconds(layers, (0, 1, 2, 3, 4), pipe) == [12, 18]
    assert rank_seconds(layers, (0, 1, 2, 3, 4), folded) == [15, 15]


@pytest.mark.parametrize(
    "method", ["parameters", "uniform", "measured", "type:Block", "type:block|head", r"type:a\d"]
)
def test_methods(method: str) -> None:
    assert method_problem(method) == ""


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("best", "must be parameters, uniform, measured, or type:"),
        ("type:", "must be"),
        (3, "must be"),
        ("type:(Block", "is not a regular expression"),
        ("type:(?:a|b)", "does not pass on"),
        (r"type:\D", "does not pass on"),
    ],
)
def test_what_is_no_method(method: object, words: str) -> None:
    assert words in method_problem(method)
