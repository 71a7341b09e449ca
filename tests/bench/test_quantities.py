"""Measured numbers in words."""

from __future__ import annotations

import pytest

from determined_ds.bench.quantities import aligned, milliseconds, rate, signed_percent, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(12, "12 B"), (1000, "0.977 KiB"), (1024, "1 KiB"), (2**26, "64 MiB"), (3 * 2**29, "1.50 GiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("per_s", "text"), [(None, "–"), (1.43e9, "1.43 GB/s"), (9.9e14, "990 TB/s"), (5.0, "5.00 B/s")]
)
def test_rates(per_s: float | None, text: str) -> None:
    assert rate(per_s) == text


def test_times_and_shares() -> None:
    assert (milliseconds(0.0001834), milliseconds(None)) == ("0.183", "–")
    assert (signed_percent(0.0123), signed_percent(-0.5)) == ("+1.2 %", "-50.0 %")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert aligned([["name", "ms"], ["a", "10.5"]], left=1) == ["name    ms", "a     10.5"]
    assert aligned([]) == []
