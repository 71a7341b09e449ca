"""Latency and bandwidth from times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.runtime.benching.latency import latency_and_slope, quartiles

SIZES = [2.0**power for power in range(10, 27, 2)]
LATENCIES = st.floats(1e-6, 1e-2)
SLOPES = st.floats(1e-12, 1e-7)
TIMES = st.floats(1e-7, 10)


@given(LATENCIES, SLOPES)
def test_a_line_is_found_again(latency: float, slope: float) -> None:
    found = latency_and_slope(SIZES, [latency + slope * size for size in SIZES])
    # Of what is far below the times on the line nothing can be known.
    assert found[0] == pytest.approx(latency, rel=1e-3, abs=1e-6 * slope * SIZES[0])
    assert found[1] == pytest.approx(slope, rel=1e-3, abs=1e-6 * latency / SIZES[-1])


@given(LATENCIES, SLOPES, st.lists(st.floats(-0.1, 0.1), min_size=len(SIZES), max_size=len(SIZES)))
def test_noise_of_some_percent_stays_some_percent(latency: float, slope: float, noise: list[float]) -> None:
    seconds = [(latency + slope * size) * (1 + each) for size, each in zip(SIZES, noise, strict=True)]
    a, b = latency_and_slope(SIZES, seconds)
    for size in SIZES:
        assert a + b * size == pytest.approx(latency + slope * size, rel=0.35)


@given(st.lists(TIMES, min_size=1, max_size=len(SIZES)))
def test_any_times_give_a_line_that_rises(seconds: list[float]) -> None:
    latency, slope = latency_and_slope(SIZES[: len(seconds)], seconds)
    assert latency >= 0
    assert slope > 0


@given(st.lists(TIMES, min_size=1))
def test_quartiles_are_in_order_and_among_the_values(values: list[float]) -> None:
    low, median, high = quartiles(values)
    assert min(values) <= low <= median <= high <= max(values)
