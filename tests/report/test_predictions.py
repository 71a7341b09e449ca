"""Predicted step times beside the measured ones."""

from __future__ import annotations

import pytest

from determined_ds.report.columns import COLUMNS
from determined_ds.report.page import report_page
from determined_ds.report.predictions import Predictions, predictions_of
from tests.report.making import failed, repetition, results, row
from tests.report.test_table import rendered

FOUND = results(
    row("zero0", repetition([0.2]), predicted_step_seconds=0.22),
    row("zero1", repetition([0.3]), predicted_step_seconds=0.27),
    row("zero2", repetition([0.4]), predicted_step_seconds=0.26),
    row("zero3", repetition([0.5])),
    failed("ddp", predicted_step_seconds=0.1),
)


def test_their_error_is_the_median_and_their_order_counts() -> None:
    found = predictions_of(FOUND)
    assert found.pairs == [(0.22, 0.2), (0.27, 0.3), (0.26, 0.4)]
    assert found.median_error == pytest.approx(0.1)
    assert found.rank_correlation == pytest.approx(0.5)
    assert str(found) == "predictions of 3 step times: median error 10.0 %, rank correlation 0.50"


@pytest.mark.parametrize(
    ("pairs", "correlation"),
    [
        ([(1, 2), (2, 3), (3, 4)], 1),
        ([(3, 2), (2, 3), (1, 4)], -1),
        ([(1, 2), (1, 2), (1, 3)], None),
        ([(1, 1), (1, 1), (2, 2)], 1),
        ([(1, 2), (2, 3)], None),
    ],
)
def test_rank_correlation(pairs: list[tuple[float, float]], correlation: float | None) -> None:
    assert Predictions(pairs=pairs).rank_correlation == correlation


def test_where_there_are_none_nothing_is_said() -> None:
    assert str(Predictions(pairs=[])) == ""
    assert "predict" not in rendered(results(row("zero0")), 80)
    assert "predict" not in report_page(results(row("zero0")))


def test_table_page_and_csv_say_how_good_they_were() -> None:
    assert "predictions of 3 step times: median error 10.0 %" in rendered(FOUND, 80)
    assert "Predictions of 3 step times: median error 10.0 %" in report_page(FOUND)
    assert COLUMNS["predicted_step_s"].value(FOUND, FOUND.rows[0]) == 0.22
    assert COLUMNS["prediction_error"].shown(FOUND, FOUND.rows[2]) == "-35 %"
