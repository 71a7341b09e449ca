"""What each row is best for: only where the spreads of repetitions tell rows apart."""

from __future__ import annotations

import math

from hypothesis import given

from determined_ds.report.results import Results, Row
from determined_ds.report.strengths import best_for, without_winner
from tests.report.making import MIB, any_results, few, repetition, results, row


def timed(name: str, *steps: float, mib: int = 700, loss: float = 3.0) -> Row:
    """A row with a repetition for each step time; its loss is reached in the fifth of ten steps."""
    each = {"losses": (4.0,) * 5 + (loss,) * 5, "peak_memory_bytes_by_rank": (mib * MIB,)}
    return row(name, *(repetition([seconds] * 8, **each) for seconds in steps))


def found(*rows: Row) -> dict[str, tuple[str, ...]]:
    held = results(*rows)
    return {each.name: best_for(held, each) for each in rows}


def test_each_is_named_for_what_no_other_is_better_in() -> None:
    fast = timed("fast", 0.10, 0.11, mib=900)
    lean = timed("lean", 0.20, 0.21, mib=500)
    good = timed("good", 0.30, 0.31, mib=800, loss=2.0)
    assert found(fast, lean, good) == {
        "fast": ("speed", "time to loss"),
        "lean": ("memory",),
        "good": ("loss",),
    }


def test_rows_whose_spreads_meet_are_tied() -> None:
    rows = timed("zero0", 0.20, 0.22), timed("zero1", 0.21, 0.23), timed("zero2", 0.40, 0.41)
    assert found(*rows) == {
        "zero0": ("speed (tied)", "time to loss (tied)"),
        "zero1": ("speed (tied)", "time to loss (tied)"),
        "zero2": (),
    }


def test_what_all_rows_share_none_is_best_for() -> None:
    held = results(timed("zero0", 0.20, 0.21), timed("zero1", 0.40, 0.41))
    assert without_winner(held) == ("memory", "loss")
    assert without_winner(results(timed("zero0", 0.2))) == ()


def test_what_was_measured_once_must_be_faster_by_more_than_a_twentieth() -> None:
    assert found(timed("zero0", 0.200), timed("zero1", 0.204))["zero0"] == ()
    assert found(timed("zero0", 0.200), timed("zero1", 0.220))["zero0"] == ("speed", "time to loss")


def test_a_loss_that_ran_away_is_no_candidate() -> None:
    rows = timed("zero0", 0.2, loss=math.nan), timed("zero1", 0.2, loss=3.0), timed("zero2", 0.2, loss=2.0)
    assert found(*rows)["zero0"] == found(*rows)["zero1"] == ()
    assert "loss" in found(*rows)["zero2"]


def test_alone_it_is_the_best_for_nothing() -> None:
    assert found(timed("zero0", 0.2, 0.2)) == {"zero0": ()}


@few
@given(any_results())
def test_any_results_have_a_best_or_none(held: Results) -> None:
    named = [each.removesuffix(" (tied)") for row in held.rows for each in best_for(held, row)]
    assert not set(named) & set(without_winner(held))
