"""A chart as a small still picture, for where no script runs: SVG in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from determined_ds.report.formatting import number
from determined_ds.report.runs.curves import VALIDATION, Curve
from determined_ds.report.runs.thinning import thinned

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 26
MOST_POINTS = 100  # of a line


@dataclass(frozen=True)
class StillLine:
    """A line of the picture: its curve and which of the page's colours it has."""

    curve: Curve
    colour: int


def still_picture(lines: Sequence[StillLine], title: str) -> Markup:
    """Lines over batches, with the ends of both axes; "" where no point is finite."""
    points = [_points(line.curve) for line in lines]
    known = [point for each in points for point in each]
    if not known:
        return Markup("")
    steps, values = [step for step, _ in known], [value for _, value in known]
    frame = _Frame(min(steps), max(steps), min(values), max(values))
    drawn = [_line(each, line, frame) for each, line in zip(points, lines, strict=True) if each]
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class="still" role="img" aria-label="{escape(title)}">'
        f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{number(frame.top)}</text>'
        f'<text x="{LEFT - 6}" y="{HEIGHT - BOTTOM}" text-anchor="end">{number(frame.bottom)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 8}">{frame.first:,}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">batch {frame.last:,}</text>'
        f"{''.join(drawn)}</svg>"
    )


@dataclass(frozen=True)
class _Frame:
    first: int
    last: int
    bottom: float
    top: float

    def place(self, step: int, value: float) -> str:
        across = (step - self.first) / ((self.last - self.first) or 1)
        # Halves, so that the difference of two huge numbers is finite.
        up = (value / 2 - self.bottom / 2) / ((self.top / 2 - self.bottom / 2) or 1)
        x = LEFT + across * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f} {y:.1f}"


def _points(curve: Curve) -> list[tuple[int, float]]:
    return [
        (curve.steps[index], curve.values[index])
        for index in thinned(curve.values, MOST_POINTS)
        if math.isfinite(curve.values[index])
    ]


def _line(points: Sequence[tuple[int, float]], line: StillLine, frame: _Frame) -> str:
    places = [frame.place(*point) for point in points]
    colour = f"var(--s{line.colour})"
    drawn = f'<path stroke="{colour}" d="M{"L".join(places)}"/>'
    if line.curve.group == VALIDATION or len(places) == 1:
        rings = "".join(f"M{place}h0" for place in places)
        drawn += f'<path class="dots" stroke="{colour}" d="{rings}"/>'
    return drawn
