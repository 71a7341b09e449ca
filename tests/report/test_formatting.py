"""Numbers and rows in words, and what came out in one sentence."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.report.formatting import (
    byte_unit,
    difference,
    label,
    layout,
    number,
    reason,
    step_unit,
    verdict,
)
from determined_ds.report.results import STOPPED, Results
from determined_ds.report.texts import printable, squeezed
from tests.report.making import MIB, any_results, comparison, failed, few, repetition, results, row


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (97.4321, "97.43"),
        (328.44, "328.4"),
        (41984.4, "41,984"),
        (0.01234321, "0.01234"),
        (0, "0"),
        (None, "–"),
        (math.nan, "not finite"),
        (-1e16, "-1.000e+16"),
        (1e-9, "1.000e-09"),
    ],
)
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-300, 1e300))
def test_a_number_says_what_it_is_to_its_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0021, "+0.0021"),
        (-0.5, "-0.5000"),
        (0, "+0.0000"),
        (1e-7, "+0.0000"),
        (-2e16, "-2.000e+16"),
        (math.nan, "not finite"),
    ],
)
def test_differences_have_a_sign(value: float, text: str) -> None:
    assert difference(value) == text


def test_bytes_are_told_in_a_unit_that_leaves_digits() -> None:
    assert byte_unit([700 * MIB, None]) == ("MiB", MIB)
    assert byte_unit([70 * 2**30]) == ("GiB", 2**30)
    assert byte_unit([2**30]) == ("MiB", MIB)  # 1024 MiB says more than 1 GiB
    assert byte_unit([None]) == ("MiB", MIB)


def test_long_steps_are_told_in_seconds() -> None:
    assert step_unit(results(row("a", repetition([0.2]))))[0] == "ms"
    assert step_unit(results(row("a", repetition([0.2])), row("b", repetition([12.0]))))[0] == "s"


def test_layouts() -> None:
    pipe = {"pipe_parallel_size": 2, "micro_batch_size": 4, "accumulation": 8}
    for each, said in (
        (row(), "2 replicas, micro 16 x 1"),
        (row(replicas=1, slots=1), "1 replica, micro 16 x 1"),
        (row(replicas=1, **pipe), "2 stages, micro 4 x 8"),
        (row(replicas=4, **pipe), "4 x 2 stages, micro 4 x 8"),
        (failed("zero3"), ""),
    ):
        assert layout(each, results(each)) == said


def test_a_precision_is_told_where_rows_differ_in_it() -> None:
    plain, low = row("a"), row("b", precision="bf16")
    assert layout(low, results(low, failed("c"))) == "2 replicas, micro 16 x 1"
    assert layout(low, results(plain, low)) == "2 replicas, bf16, micro 16 x 1"


def test_slots_are_told_where_rows_differ_in_them() -> None:
    one, two = row("zero1", slots=1), row("zero1")
    assert label(two, results(two)) == "zero1"
    assert label(one, results(one, two)) == "zero1 on 1 slot"
    assert label(two, results(one, two)) == "zero1 on 2 slots"


def test_what_came_from_outside_stays_on_its_line() -> None:
    assert printable("a\nb\tc\x1b[31m\u202e\ud800") == "a b c\\x1b[31m\\u202e\\ud800"


def test_long_names_keep_their_ends() -> None:
    assert squeezed("zero1, micro 4, bf16, compiled", 16) == "zero1, m…ompiled"
    assert squeezed("zero1", 5) == "zero1"


@given(st.text(), st.integers(3, 40))
def test_a_squeezed_text_is_no_longer_than_it_may_be(text: str, most: int) -> None:
    assert len(squeezed(text, most)) <= most


def test_a_reason_says_what_happened() -> None:
    assert reason(failed("zero3")) == "out of memory: it asked for 2 GiB"
    assert reason(failed("zero3", STOPPED, "")) == "stopped"
    assert "warm-up" in reason(row("short", repetition([])))
    assert reason(row()) == ""


# -------------------------------------------------------------------------------------------- the verdict


def test_the_verdict_names_the_fastest_and_the_smallest() -> None:
    smaller = repetition([0.5], peak_memory_bytes_by_rank=(511 * MIB,))
    found = results(
        row("zero0", repetition([0.2])), row("zero1", repetition([0.16])), row("pipeline", smaller)
    )
    assert verdict(found) == (
        "zero1 is the fastest: 200 samples/s, 1.25 times zero0; pipeline takes the least memory, 511 MiB a rank."
    )


def test_a_first_row_that_is_the_fastest_is_not_held_against_itself() -> None:
    found = results(row("zero0", repetition([0.1])), row("zero1", repetition([0.2])))
    assert verdict(found) == "zero0 is the fastest: 320 samples/s."


def test_memory_that_is_the_same_is_no_advantage() -> None:
    assert "memory" not in verdict(results(row("zero0", repetition([0.1])), row("zero1", repetition([0.2]))))


def test_on_several_slots_like_is_held_against_like() -> None:
    assert verdict(comparison()).startswith(
        "zero0 on 2 slots is the fastest: 145 samples/s, 1.89 times zero0 on 1 slot"
    )
    rows = [row("zero0", repetition([at]), slots=slots) for at, slots in ((0.4, 1), (0.2, 2))]
    fastest = row("zero1", repetition([0.1]))
    assert (
        verdict(results(*rows, fastest))
        == "zero1 on 2 slots is the fastest: 320 samples/s, 2.00 times zero0."
    )


def test_what_the_spread_does_not_tell_apart_is_not_distinct_names() -> None:
    fast = row("zero1", repetition([0.20]), repetition([0.22]))
    near = row("zero2", repetition([0.21]), repetition([0.23]))
    slow = row("zero3", repetition([0.40]), repetition([0.41]))
    assert "(too close to zero2 to distinguish)" in verdict(results(fast, near, slow))
    assert "distinguish" not in verdict(results(fast, slow))


def test_what_is_missing_is_told() -> None:
    assert verdict(results(row("zero1"), failed("zero3"))).endswith("; zero3 ran out of memory.")
    assert verdict(results(row("zero1"), failed("a"), failed("b"))).endswith("; 2 of 3 were not measured.")
    assert verdict(results(failed("a"), failed("b"))) == "None of the 2 was measured."
    assert verdict(results()) == "Nothing was measured."


def test_one_row_alone_is_no_contest() -> None:
    assert verdict(results(row("zero1", repetition([0.2])))) == "zero1 does 160 samples/s."


@few
@given(any_results())
def test_there_is_a_verdict_on_anything(found: Results) -> None:
    said = verdict(found)
    assert said.endswith(".")
    assert said.isprintable()
