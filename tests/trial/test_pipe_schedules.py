"""Every schedule of a pipeline trains as plain PyTorch does: losses, weights and evaluations to 1e-5."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks import Ranks
from tests.trial.pipelines import Case, Trained, in_ranks, plainly

ALL = "more ranks, parts, replicas and ZeRO stages: two ranks of each kind are in the short test"
SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("dualpipev", 2), ("zb-h1", 1))


def agree(size: Ranks, cases: list[Case]) -> None:
    of_ranks = size.run(in_ranks, cases)
    for number, case in enumerate(cases):
        expected = plainly(case)
        for own in (found[number] for found in of_ranks):
            _close(own, expected, case)
        held = set().union(*(found[number].weights for found in of_ranks))
        assert held == set(expected.weights), case


def _close(own: Trained, expected: Trained, case: Case) -> None:
    assert own.losses == pytest.approx(expected.losses, abs=1e-5), case
    assert own.evaluated == pytest.approx(expected.evaluated, abs=1e-5), case
    for name, weight in own.weights.items():
        assert np.abs(weight - expected.weights[name]).max() < 1e-5, (name, case)


def test_two_ranks_train_as_plain_pytorch(two_ranks: Ranks) -> None:
    """Tied weights, functions, dropout, accumulation, clipping, evaluation with a tail; ZeRO 1 in one of them."""
    agree(
        two_ranks,
        [
            Case(schedule="interleaved", chunks=2),
            Case(schedule="zb-h1", zero=1),
            Case(schedule="dualpipev", chunks=2, zero=1, interval=2),
        ],
    )
