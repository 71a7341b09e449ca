"""Thinned curves keep what one looks for."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from determined_ds.report.runs.thinning import thinned

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300)


@given(VALUES, st.integers(4, 100))
def test_ends_extremes_and_what_is_not_finite_stay(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(most, len(values) and 3 * (most - 2) // 2 + 2)
    left = [values[index] for index in kept]
    if not values:
        return
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert min(finite) in left
        assert max(finite) in left
    assert all(map(math.isfinite, left)) == all(map(math.isfinite, values))


def test_few_points_all_stay() -> None:
    assert thinned([3.0, 1.0, 2.0], 4) == [0, 1, 2]


def test_a_single_spike_stays() -> None:
    values = [1.0] * 10_000
    values[6_543] = 50.0
    assert 6_543 in thinned(values, 100)


def test_sums_that_overflow_are_no_reason_to_call_a_value_odd() -> None:
    assert len(thinned([1e308] * 1000, 10)) <= 10
