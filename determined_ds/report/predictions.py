"""How good predictions of step times were, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from determined_ds.report.formatting import percent
from determined_ds.report.results import Results, Row

FEWEST = 3  # pairs that have a rank correlation worth a number


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Pairs of a predicted and a measured step time.

    Args:
        pairs: (predicted, measured) seconds, each above 0.
    """

    pairs: Sequence[tuple[float, float]]

    @property
    def median_error(self) -> float | None:
        """The median of |predicted / measured - 1|; None without a pair."""
        return statistics.median(abs(ratio_of(*pair) - 1) for pair in self.pairs) if self.pairs else None

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's: 1 for the order of the measurements, -1 for the reverse; None of few pairs, or equal ones."""
        if len(self.pairs) < FEWEST:
            return None
        predicted, measured = (_ranks(values) for values in zip(*self.pairs, strict=True))
        try:
            return statistics.correlation(predicted, measured)
        except statistics.StatisticsError:  # all are equal
            return None

    def __str__(self) -> str:
        """In words; "" without a pair."""
        error, correlation = self.median_error, self.rank_correlation
        if error is None:
            return ""
        of = f"{len(self.pairs)} step time{'s' * (len(self.pairs) != 1)}"
        order = "" if correlation is None else f", rank correlation {correlation:.2f}"
        return f"predictions of {of}: median error {percent(error)}{order}"


def ratio_of(predicted: float, measured: float) -> float:
    """Above 1 where it was expected to be slower than it is."""
    return predicted / measured


def predictions_of(results: Results) -> Predictions:
    """Of the rows that have both."""
    return Predictions(pairs=[pair for row in results.measured if (pair := pair_of(row)) is not None])


def pair_of(row: Row) -> tuple[float, float] | None:
    """Predicted and measured seconds of a step; None where either is unknown."""
    predicted, measured = row.predicted_step_seconds, row.median_step_seconds
    return None if predicted is None or measured is None else (predicted, measured)


def _ranks(values: Sequence[float]) -> list[float]:
    """The place of each in their order; equal ones share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
