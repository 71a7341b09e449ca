"""What follows from measurements: the numbers of ``determined_ds.load_results``."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.making import CANNOT_RUN, MIB, comparison, failed, repetition, results, row

seconds = st.floats(1e-6, 1e4)


def test_a_row_sums_up_all_steps_of_all_repetitions() -> None:
    more = repetition(
        [0.3, 0.5], peak_memory_bytes_by_rank=[720 * MIB, 1], model_state_bytes_by_rank=[1, 13 * MIB]
    )
    measured = results(row("zero1", repetition([0.1, 0.2, 0.9]), more)).rows[0]
    assert (measured.median_step_seconds, measured.num_steps) == (0.3, 5)
    assert measured.p95_step_seconds == pytest.approx(0.82)  # 0.8 of the way from the fourth to the fifth
    assert measured.spread == (0.2, 0.4)  # of the repetitions' own medians
    assert measured.samples_per_second == 32 / 0.3
    assert measured.samples_per_second_spread == (32 / 0.4, 32 / 0.2)
    assert measured.tokens_per_second == 128 * 32 / 0.3
    assert (measured.peak_memory_bytes, measured.model_state_bytes) == (720 * MIB, 13 * MIB)


def test_the_loss_is_the_mean_of_the_last_five_steps() -> None:
    def loss(*losses: float) -> float | None:
        return results(row("zero1", repetition(losses=list(losses)))).rows[0].loss

    assert loss(9, 9, 5, 4, 3, 2, 1) == 3
    assert loss(9, 5) == 7
    assert loss() is None


def test_losses_of_repetitions_are_averaged_step_by_step() -> None:
    (measured,) = results(row("zero1", repetition(losses=[4, 3, 2]), repetition(losses=[6, 5]))).rows
    assert measured.losses == (5, 4, 2)  # the second repetition has no third step


def test_time_to_a_loss_counts_steps_with_their_median() -> None:
    (measured,) = results(row("zero1", repetition([0.5, 0.5], losses=[7, 6, 5, 4, 3, 2, 1]))).rows
    assert measured.loss_curve == ((2.5, 5), (3.0, 4), (3.5, 3))
    assert [measured.seconds_to(loss) for loss in (4.5, 3, 2.9)] == [3.0, 3.5, None]


def test_the_target_is_the_highest_loss_so_that_all_reach_it() -> None:
    better, worse = row("a", repetition(losses=[2.0])), row("b", repetition(losses=[2.5]))
    lost = row("c", repetition(losses=["NaN"]))
    assert results(better, worse, lost, failed("d")).target_loss == 2.5
    assert results(lost, failed("d")).target_loss is None


def test_rows_are_compared_with_the_first_that_was_measured() -> None:
    first = row("zero1", repetition([0.2], losses=[3.0]))
    second = row("zero2", repetition([0.1], losses=[3.5], peak_memory_bytes_by_rank=[350 * MIB]))
    compared = results(failed("zero0"), first, second)
    missing, _, measured = compared.rows
    assert compared.first is compared.rows[1]
    assert compared.against_first(measured) == {
        "samples_per_second": 2.0,
        "peak_memory_bytes": 0.5,
        "loss": 0.5,
    }
    assert compared.against_first(missing) is None
    unknown = row("zero3", repetition(peak_memory_bytes_by_rank=[], losses=[]), samples_per_step=None)
    compared = results(unknown, second)
    assert set((compared.against_first(compared.rows[1]) or {}).values()) == {None}


def test_scaling_is_relative_to_the_fewest_slots_of_the_same_name() -> None:
    times = {4: 0.4, 1: 0.8, 2: 0.5}
    rows = [row("zero1", repetition([at]), slots=slots) for slots, at in times.items()]
    compared = results(
        *rows, row("zero2", repetition([0.1])), failed("zero2", slots=1), *comparison(), title="all"
    )
    efficiency = [compared.scaling_efficiency(each) for each in compared.rows[:5]]
    assert efficiency[:3] == [pytest.approx(0.5), 1, pytest.approx(0.8)]
    assert efficiency[3:] == [None, None]  # it was measured on two slots alone


def test_a_bubble_is_the_median_of_a_pipelines_repetitions() -> None:
    repeated = [repetition(bubble=share, bubble_ideal=1 / 9) for share in (0.1, 0.2, 0.4)]
    pipeline, other = results(row("pipeline", *repeated), row()).rows
    assert (pipeline.bubble, pipeline.bubble_ideal) == (0.2, 1 / 9)
    assert (other.bubble, other.bubble_ideal) == (None, None)


@pytest.mark.parametrize(
    "unmeasured",
    [
        failed("zero3"),
        failed("pipeline", CANNOT_RUN),
        row("cut", status="stopped"),
        row("warm-up only", repetition([])),
    ],
    ids=lambda each: each["name"],
)
def test_a_row_that_did_not_run_to_its_end_takes_no_part(unmeasured: dict[str, object]) -> None:
    compared = results(unmeasured, row("zero1"))
    left_out, first = compared.rows
    assert not left_out.is_measured
    assert compared.measured == (first,)
    assert compared.against_first(left_out) is None
    assert compared.scaling_efficiency(left_out) is None


@given(st.lists(st.lists(seconds, min_size=1, max_size=9), min_size=1, max_size=4))
def test_median_spread_and_percentile_lie_in_their_order(repeated: list[list[float]]) -> None:
    (measured,) = results(row("zero1", *map(repetition, repeated))).rows
    steps = [step for steps in repeated for step in steps]
    spread, p95 = measured.spread, measured.p95_step_seconds
    assert measured.median_step_seconds == statistics.median(steps)
    assert spread is not None
    assert p95 is not None
    assert min(steps) <= spread[0] <= spread[1] <= max(steps)
    assert statistics.median(steps) <= p95 * (1 + 1e-12)
    assert p95 <= max(steps) * (1 + 1e-12)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), min_size=1, max_size=4))
def test_every_measured_row_reaches_the_target(losses: list[list[float]]) -> None:
    found = results(*(row(f"{at}", repetition([0.5], losses=each)) for at, each in enumerate(losses)))
    target = found.target_loss
    assert target is not None
    assert math.isfinite(target)
    for each in found.measured:
        reached = each.seconds_to(target)
        assert reached is not None
        assert reached <= len(each.losses) * 0.5 * (1 + 1e-12)
