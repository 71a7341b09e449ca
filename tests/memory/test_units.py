"""Numbers as people write them, there and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.errors import ConfigError
from determined_ds.memory import format_bytes, format_count, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6B", 6_000_000_000),
        ("6b", 6_000_000_000),
        ("345M", 345_000_000),
        ("1.5e9", 1_500_000_000),
        ("1.3B", 1_300_000_000),
        ("124_439_808", 124_439_808),
        ("124,439,808", 124_439_808),
        (" 2 K ", 2_000),
        (".5T", 500_000_000_000),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("80Gi", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("16384MiB", 2**34),
        ("1.5TiB", 3 * 2**39),
        ("1024", 1024),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_decimal_comma_is_no_thousands_mark() -> None:
    """6,7B is 6.7 thousand million to half the world, and never 67."""
    with pytest.raises(ConfigError, match=r"write 6\.7B if that is meant"):
        parse_count("6,7B")
    with pytest.raises(ConfigError, match=r"write 1\.5TiB if that is meant"):
        parse_bytes("1,5TiB")


def test_a_gpu_of_80_bytes_is_a_unit_forgotten() -> None:
    with pytest.raises(ConfigError, match="80 bytes are too few\n  fix: write 80GiB"):
        parse_bytes("80")
    assert parse_bytes("80 B") == 80


@pytest.mark.parametrize(
    "text", ["", "6X", "-6B", "B", "0", "0.2", "six", "1e999", "nan", "inf", "6BB", "1e30", "6 6", "٣B"]
)
@pytest.mark.parametrize("parse", [parse_count, parse_bytes])
def test_what_is_not_a_number_is_refused_with_a_fix(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(ConfigError) as caught:
        parse(text)
    (problem,) = caught.value.problems
    assert problem.value == text
    assert "e.g." in problem.fix


@given(st.integers(1, 10**18))
def test_what_is_written_is_read_again(number: int) -> None:
    """To the three digits that are written."""
    assert math.isclose(parse_bytes(format_bytes(number)), number, rel_tol=0.0051)
    assert math.isclose(parse_count(format_count(number)), number, rel_tol=0.0051)


def test_a_whole_number_of_a_unit_is_exact() -> None:
    for text in ("80 GiB", "1 TiB", "640 MiB", "24 KiB", "12 B"):
        assert format_bytes(parse_bytes(text)) == text
    for text in ("6B", "345M", "1.3B", "512"):
        assert format_count(parse_count(text)) == text
