"""How the layers of a pipeline are shared out, for the page of a run: from ``partition.json`` in its directory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from determined_ds.protocol.layer_shares import in_words, read_partition
from determined_ds.protocol.run_dir import RunDir
from determined_ds.report.layer_bars import partition_picture
from determined_ds.report.style import svg_of
from determined_ds.report.texts import printable


def partition_section(run_dir: Path, name: str) -> Mapping[str, str] | None:
    """The section of a run; None where its layers are not shared out by their times.

    Args:
        run_dir: Of the run.
        name: A word that no other run on the page has: the picture's parts are named by it.

    Returns:
        ``words``, and ``picture``, an ``<svg>`` whose texts are escaped; "" where it cannot be drawn.
    """
    try:
        found = read_partition(RunDir(run_dir).partition.read_text())
    except (OSError, ValueError):
        return None
    if found is None:
        return None
    figure = partition_picture(found) if importlib.util.find_spec("matplotlib") is not None else None
    picture = "" if figure is None else Markup(svg_of(figure, name))
    return {"words": printable(in_words(found)), "picture": picture}
