"""What follows from measurements."""

from __future__ import annotations

import math
import statistics
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.report.results import CANNOT_RUN, STOPPED, WINDOW, Results, Row
from tests.report.making import (
    MIB,
    any_results,
    comparison,
    failed,
    few,
    repetition,
    results,
    row,
    rows,
    seconds,
)


def test_times_are_those_of_all_steps_of_all_repetitions() -> None:
    measured = row("zero1", repetition([0.1, 0.2, 0.9]), repetition([0.3, 0.4]))
    assert measured.median_step_seconds == 0.3
    assert measured.p95_step_seconds == pytest.approx(
        0.8
    )  # of five steps, 0.8 of the way from the 4th to the 5th
    assert measured.num_steps == 5


def test_the_spread_is_that_of_the_repetitions_own_medians() -> None:
    measured = row("zero1", repetition([0.1, 0.2, 0.9]), repetition([0.3, 0.5]))
    assert measured.spread == (0.2, 0.4)
    assert measured.samples_per_second_spread == (32 / 0.4, 32 / 0.2)


def test_throughput_is_the_global_batch_over_the_median() -> None:
    measured = row("zero1", repetition([0.2, 0.1, 0.3]))
    assert measured.samples_per_second == 32 / 0.2
    assert measured.tokens_per_second == 128 * 32 / 0.2


def test_memory_is_that_of_the_rank_and_the_repetition_that_took_most() -> None:
    more = repetition(peak_memory_bytes_by_rank=(720 * MIB, 1), model_state_bytes_by_rank=(1, 13 * MIB))
    measured = row("zero1", repetition(), more)
    assert measured.peak_memory_bytes == 720 * MIB
    assert measured.model_state_bytes == 13 * MIB


def test_the_loss_is_the_mean_of_the_last_five_steps() -> None:
    assert row("zero1", repetition(losses=(9, 9, 5, 4, 3, 2, 1))).loss == 3
    assert row("zero1", repetition(losses=(9, 5))).loss == 7  # of fewer, where there are fewer
    assert row("zero1", repetition(losses=())).loss is None


def test_losses_of_repetitions_are_averaged_step_by_step() -> None:
    measured = row("zero1", repetition(losses=(4, 3, 2)), repetition(losses=(6, 5)))
    assert measured.losses == (5, 4, 2)  # the second came no further


def test_time_to_a_loss_counts_steps_with_their_median() -> None:
    measured = row("zero1", repetition([0.5, 0.5], losses=(7, 6, 5, 4, 3, 2, 1)))
    assert measured.loss_curve == ((2.5, 5), (3.0, 4), (3.5, 3))
    assert measured.seconds_to(4.5) == 3.0
    assert measured.seconds_to(3) == 3.5
    assert measured.seconds_to(2.9) is None


def test_the_target_is_the_highest_loss_so_that_all_come_to_it() -> None:
    better, worse = row("a", repetition(losses=(2.0,))), row("b", repetition(losses=(2.5,)))
    lost = row("c", repetition(losses=(math.nan,)))
    untold = failed("d")
    assert results(better, worse, lost, untold).target_loss == 2.5
    assert results(lost, untold).target_loss is None


def test_rows_are_held_against_the_first() -> None:
    first = row("zero0", repetition([0.2], losses=(3.0,)))
    second = row("zero1", repetition([0.1], losses=(3.5,), peak_memory_bytes_by_rank=(350 * MIB,)))
    assert results(first, second).against_first(second) == {
        "samples_per_second": 2.0,
        "peak_memory_bytes": 0.5,
        "loss": 0.5,
    }


def test_they_are_held_against_the_first_that_was_measured() -> None:
    missing, first, second = failed("zero0"), row("zero1", repetition([0.2])), row("zero2", repetition([0.4]))
    compared = results(missing, first, second)
    assert compared.first is first
    assert (compared.against_first(second) or {})["samples_per_second"] == 0.5
    assert compared.against_first(missing) is None
    assert results(missing).against_first(missing) is None


def test_what_neither_row_knows_is_not_compared() -> None:
    untold = repetition(peak_memory_bytes_by_rank=(), losses=())
    first, second = row("a", untold, samples_per_step=None), row("b", repetition())
    assert results(first, second).against_first(second) == {
        "samples_per_second": None,
        "peak_memory_bytes": None,
        "loss": None,
    }


def test_scaling_is_against_the_fewest_slots_of_the_same_name() -> None:
    one, two, four = (row("zero1", repetition([at]), slots=n) for at, n in ((0.8, 1), (0.5, 2), (0.4, 4)))
    alone = row("zero2", repetition([0.1]), slots=2)
    compared = results(four, one, two, alone, failed("zero2", slots=1))
    assert compared.scaling_efficiency(one) == 1
    assert compared.scaling_efficiency(two) == pytest.approx(0.8)
    assert compared.scaling_efficiency(four) == pytest.approx(0.5)
    assert compared.scaling_efficiency(alone) is None


def test_a_bubble_is_that_of_pipelines_alone() -> None:
    pipeline = row("pipeline", *(repetition(bubble=share, bubble_ideal=1 / 9) for share in (0.1, 0.2, 0.4)))
    assert (pipeline.bubble, pipeline.bubble_ideal) == (0.2, 1 / 9)
    assert (row().bubble, row().bubble_ideal) == (None, None)


@pytest.mark.parametrize(
    "unmeasured",
    [
        failed("zero3"),
        failed("pipeline", CANNOT_RUN),
        row("cut", status=STOPPED),
        row("all warm-up", repetition([])),
    ],
    ids=lambda each: each.name,
)
def test_what_did_not_run_to_its_end_takes_no_part(unmeasured: Row) -> None:
    first = row("zero1")
    compared = results(unmeasured, first)
    assert not unmeasured.is_measured
    assert compared.measured == (first,)
    assert compared.against_first(unmeasured) is None
    assert compared.scaling_efficiency(unmeasured) is None


def test_where_nothing_was_measured_nothing_is_known() -> None:
    missing = failed("zero3")
    kept = {each.name for each in fields(Row)} | {
        "is_measured",
        "is_pipeline",
        "num_repetitions",
        "num_steps",
        "losses",
        "loss_curve",
    }
    derived = [name for name in dir(Row) if isinstance(getattr(Row, name), property) and name not in kept]
    assert len(derived) >= 12
    for name in derived:
        assert getattr(missing, name) is None, name
    assert missing.seconds_to(99) is None


def test_a_status_that_there_is_not_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        row(status="fine")


# ------------------------------------------------------------------------------------- whatever is measured


@given(st.lists(st.lists(seconds, min_size=1, max_size=9), min_size=1, max_size=4))
def test_times_lie_in_their_order(repeated: list[list[float]]) -> None:
    measured = row("zero1", *map(repetition, repeated))
    steps = [step for steps in repeated for step in steps]
    spread, median, p95 = measured.spread, measured.median_step_seconds, measured.p95_step_seconds
    assert spread is not None
    assert median == statistics.median(steps)
    assert p95 is not None
    assert min(steps) <= spread[0] <= spread[1] <= max(steps)
    assert median <= p95 * (1 + 1e-12)
    assert p95 <= max(steps) * (1 + 1e-12)


@few
@given(any_results(loss=st.floats(-1e6, 1e6)))
def test_every_measured_row_comes_to_the_target(found: Results) -> None:
    target = found.target_loss
    for each in found.measured:
        if each.losses:
            assert target is not None
            reached = each.seconds_to(target)
            assert reached is not None
            assert reached <= len(each.losses) * (each.median_step_seconds or 0) * (1 + 1e-12)


@given(rows())
def test_a_curve_ends_at_the_loss(each: Row) -> None:
    curve = each.loss_curve
    assert bool(curve) == (each.loss is not None and each.median_step_seconds is not None)
    if curve:
        assert len(curve) == max(1, len(each.losses) - WINDOW + 1)
        assert repr(curve[-1][1]) == repr(each.loss)


@few
@given(any_results())
def test_the_first_is_as_much_as_itself(found: Results) -> None:
    first = found.first
    if first is not None:
        against = found.against_first(first) or {}
        assert against["samples_per_second"] in (None, 1)
        assert against["peak_memory_bytes"] in (None, 1)


def test_the_example_is_what_it_says() -> None:
    """The comparison that other tests draw and tell: its numbers, by hand."""
    compared = comparison()
    assert [each.name for each in compared.measured] == ["zero0", "zero1", "zero0", "zero1", "pipeline"]
    assert compared.scaling_efficiency(compared.rows[3]) == pytest.approx(0.415 / 0.22 / 2)
