"""What a profile has found, for the page of a run: from ``profile.json`` in its directory."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from determined_ds.errors import ConfigError
from determined_ds.pipe.recording import RecordedStep
from determined_ds.report.formatting import number, percent
from determined_ds.report.gantt import step_picture
from determined_ds.report.profile_text import milliseconds
from determined_ds.report.rank_bars import rank_bars_picture
from determined_ds.report.style import svg_of
from determined_ds.report.texts import printable
from determined_ds.rundir.profile_files import PROFILE_DIR, PROFILE_JSON
from determined_ds.rundir.recorded_step import read_step
from determined_ds.rundir.run_dir import RunDir

PICTURES = {
    "The parts by rank": rank_bars_picture,
}
WIDE = "What each rank computes when"


def profile_section(run_dir: Path, name: str) -> Mapping[str, Any] | None:
    """The section of a run; None where it was not profiled, or its ``profile.json`` cannot be read.

    Args:
        run_dir: Of the run.
        name: A word that no other run on the page has: the pictures' parts are named by it.

    Returns:
        ``parts``, rows of texts; ``findings``, mappings of texts; ``pictures``, title -> ``<svg>``, whose texts are
        escaped; ``wide``, the title of one that takes the whole width.
    """
    path = run_dir / PROFILE_DIR / PROFILE_JSON
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return None
    return _section(path, changed, name)


@functools.lru_cache(maxsize=32)
def _section(path: Path, changed: int, name: str) -> Mapping[str, Any] | None:
    """The same; a page that is live asks again and again."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        return {
            "parts": _parts(profile),
            "wide": WIDE,
            "findings": [_finding(each) for each in profile["findings"]],
            "pictures": _pictures(profile, name, _step_in(path.parent.parent)),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # of another version, or torn


def _parts(profile: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    step_s = profile["step_s"] or 1.0
    parts = [
        (printable(part), number(1000 * seconds, 3), percent(seconds / step_s))
        for part, seconds in profile["seconds"].items()
        if seconds
    ]
    return [*parts, ("step", number(1000 * profile["step_s"], 3), "")]


def _finding(finding: Mapping[str, Any]) -> Mapping[str, str]:
    return {
        "code": printable(finding["code"]),
        "saves": f"{milliseconds(finding['saves_s'])}, {percent(finding['share'])} of a step",
        "seen": printable(finding["seen"]),
        "fix": printable(finding["fix"]),
    }


def _step_in(run_dir: Path) -> RecordedStep | None:
    """The step of a pipeline that was recorded; None where there is none, or it cannot be read."""
    try:
        return read_step(RunDir(run_dir).pipeline_step)
    except ConfigError:
        return None


def _pictures(profile: Mapping[str, Any], name: str, step: RecordedStep | None) -> Mapping[str, Markup]:
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    figures = {title: draw(profile) for title, draw in PICTURES.items()}
    figures[WIDE] = None if step is None else step_picture(step)
    return {
        title: Markup(svg_of(figure, f"{name}-{index}").replace("<svg ", f'<svg aria-label="{title}" ', 1))
        for index, (title, figure) in enumerate(figures.items())
        if figure is not None
    }
