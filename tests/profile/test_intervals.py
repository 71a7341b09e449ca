"""Arithmetic of spans of time: against sets of whole numbers; shares are disjoint and add up."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from determined_ds.profile.intervals import difference, intersection, length, shared_out, union

SPAN = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair)))
SPANS = st.lists(SPAN, max_size=8)


def cells(spans: list[tuple[float, float]]) -> set[int]:
    """The unit cells that spans of whole numbers cover."""
    return {cell for begin, end in spans for cell in range(int(begin), int(end))}


def is_sound(spans: list[tuple[float, float]]) -> bool:
    """Whether they are sorted, disjoint and not empty."""
    return all(begin < end for begin, end in spans) and all(
        left[1] <= right[0] for left, right in itertools.pairwise(spans)
    )


@given(SPANS, SPANS)
def test_they_are_operations_on_sets(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    one, other = union(left), union(right)
    for found, expected in (
        (one, cells(left)),
        (intersection(one, other), cells(left) & cells(right)),
        (difference(one, other), cells(left) - cells(right)),
    ):
        assert is_sound(found)
        assert cells(found) == expected
        assert length(found) == len(expected)


@given(SPAN, st.lists(st.tuples(st.sampled_from("abc"), SPANS.map(union)), max_size=6))
def test_shares_are_disjoint_and_add_up_to_the_whole(whole: tuple[int, int], claims: list) -> None:
    shares = shared_out(whole, claims, "rest")
    assert all(is_sound(spans) for spans in shares.values())
    taken = [cells(spans) for spans in shares.values()]
    assert sum(map(len, taken)) == whole[1] - whole[0]
    assert set().union(*taken) == cells([whole])


@given(SPAN, SPANS.map(union), SPANS.map(union))
def test_a_stronger_claim_is_served_first(whole: tuple[int, int], strong: list, weak: list) -> None:
    shares = shared_out(whole, [("strong", strong), ("weak", weak)], "rest")
    assert cells(shares["strong"]) == cells(strong) & cells([whole])
    assert cells(shares["weak"]) == cells(weak) & cells([whole]) - cells(strong)
