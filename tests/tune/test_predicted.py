"""Each candidate of a tuning is predicted before it is measured, and how good that was is known afterwards."""

from __future__ import annotations

import statistics

import pytest

from determined_ds.report.predictions import predictions_of
from determined_ds.tune.cost import arithmetic
from determined_ds.tune.rates import Rates
from tests.report.making import results
from tests.tune.bases import SHAPE, gpt2_candidates
from tests.tune.measured_machine import machine
from tests.tune.simulated import Machine, Told, tuned


def told(seed: int = 0, **more: object) -> Told:
    candidates = gpt2_candidates()
    return tuned(candidates, Machine(candidates, seed), trials=12, **more)


def test_each_was_predicted_before_it_was_measured() -> None:
    """The first one only by figures of the machine; whoever tunes again sees how good that was."""
    predictions = [predictions_of(results(*told(seed).tuning.rows)) for seed in range(10)]
    errors = [found.median_error for found in predictions]
    assert statistics.median(error for error in errors if error is not None) < 0.1
    first, *others = told().tuning.rows
    assert first.predicted_step_seconds is None
    assert all(row.predicted_step_seconds for row in others)

    rates = Rates(accelerator="cpu", machine=machine())
    first = told(rates=rates).tuning.rows[0]
    assert first.predicted_step_seconds == pytest.approx(
        arithmetic(gpt2_candidates()[0].variant, SHAPE, rates), rel=0.3
    )
