"""What the page's script draws, as compact JSON: thinned curves, marks, which chart holds what."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from determined_ds.report.runs.curves import VALIDATION, Curve
from determined_ds.report.runs.line_charts import LineChart
from determined_ds.report.runs.run_view import RunView
from determined_ds.report.runs.thinning import thinned
from determined_ds.report.style import PALETTE
from determined_ds.rundir.metrics_file import jsonable
from determined_ds.rundir.records import START

MOST_POINTS = 90_000  # of all curves of a page together: one and a half megabytes
MOST_OF_A_CURVE, LEAST_OF_A_CURVE = 3000, 100
MOST_PARTS, POINTS_OF_A_PART, LEAST_SMOOTHED = 150, 5, 20


@dataclass(frozen=True, kw_only=True)
class DrawnData:
    """What the script draws.

    Args:
        content: For JSON.
        kept: Points of the longest curve that is left out in part; 0 where every point is drawn.
        reported: Of how many.
        exact: Whether every validation is drawn.
    """

    content: dict[str, Any]
    kept: int = 0
    reported: int = 0
    exact: bool = True


def drawn_data(runs: Sequence[RunView], charts: Sequence[LineChart]) -> DrawnData:
    """The data of a page.

    Args:
        runs: In the order of their colours.
        charts: Of the page.
    """
    most = points_of_a_curve(sum(len(shown.curves) for shown in runs))
    thin = [{name: _thin(curve, most) for name, curve in shown.curves.items()} for shown in runs]
    content = {
        "runs": [
            {
                "label": shown.label,
                "colour": index % len(PALETTE),
                "samples": shown.launch.global_batch_size if shown.launch else 0,
                "marks": _marks(shown),
                "checkpoints": _checkpoints(shown),
                "curves": {
                    name: {**_compact(curve), **_smooth(shown.curves[name])}
                    for name, curve in thin[index].items()
                },
            }
            for index, shown in enumerate(runs)
        ],
        "charts": [{"title": chart.title, "curves": list(chart.curves)} for chart in charts],
    }
    pairs = [
        (len(thin[index][name].values), len(curve.values))
        for index, shown in enumerate(runs)
        for name, curve in shown.curves.items()
    ]
    kept, reported = max(
        (pair for pair in pairs if pair[0] < pair[1]), key=lambda pair: pair[1], default=(0, 0)
    )
    validations = [curve for shown in runs for curve in shown.curves.values() if curve.group == VALIDATION]
    exact = all(len(curve.values) <= MOST_OF_A_CURVE for curve in validations)
    return DrawnData(content=content, kept=kept, reported=reported, exact=exact)


def points_of_a_curve(num_curves: int) -> int:
    """How many points of a curve are drawn at most, where so many share a page."""
    return max(LEAST_OF_A_CURVE, min(MOST_OF_A_CURVE, MOST_POINTS // max(1, num_curves)))


def _thin(curve: Curve, most: int) -> Curve:
    """Validations are exact: they are left out only where there are thousands."""
    return curve.taken(thinned(curve.values, MOST_OF_A_CURVE if curve.group == VALIDATION else most))


def _compact(curve: Curve) -> dict[str, list[Any]]:
    """``s``: batches, ``t``: seconds, ``v``: values."""
    exact = curve.group == VALIDATION
    values = [value if exact or not math.isfinite(value) else float(f"{value:.6g}") for value in curve.values]
    found: dict[str, list[Any]] = {"s": curve.steps, "v": jsonable(values)}
    times = [round(seconds, 2) for seconds in curve.seconds if seconds is not None]
    if len(times) == len(curve.steps):
        found["t"] = times
    return found


def _smooth(curve: Curve) -> dict[str, Any]:
    """``m``: the means of equal parts of a whole training curve, each at its last point."""
    count = len(curve.values)
    if curve.group == VALIDATION or count < LEAST_SMOOTHED:
        return {}
    parts = min(MOST_PARTS, count // POINTS_OF_A_PART)
    ends = [(part + 1) * count // parts for part in range(parts)]
    means = [_mean(curve.values[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    at = curve.taken([end - 1 for end in ends])
    return {"m": _compact(replace(at, values=means))}


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else math.nan


def _marks(shown: RunView) -> list[dict[str, Any]]:
    """Where the run was resumed or restarted, or began with another's weights."""
    return [
        {"text": launch.kind, "step": launch.steps_completed, "seconds": seconds}
        for launch, seconds in zip(shown.run.launches, shown.clock.starts, strict=False)
        if launch.kind != START
    ]


def _checkpoints(shown: RunView) -> list[dict[str, Any]]:
    """Each with the time of the last report before it, which mostly is at its batch."""
    longest = max(shown.curves.values(), key=lambda curve: len(curve.steps), default=None)
    found = []
    for checkpoint in shown.run.checkpoints:
        at = bisect_right(longest.steps, checkpoint.steps_completed) - 1 if longest else -1
        seconds = longest.seconds[at] if longest and at >= 0 else None
        found.append({"step": checkpoint.steps_completed, "seconds": seconds})
    return found[::-1]
