"""How the layers of a pipeline are shared out, for the page of a run and as a file: from its ``partition.json``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from determined_ds.documents.files import write_whole
from determined_ds.pipe.partition import Partition, in_words, read_partition
from determined_ds.report.layer_bars import partition_picture
from determined_ds.report.style import png_of, svg_of
from determined_ds.report.texts import printable
from determined_ds.rundir.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def partition_section(run_dir: Path, name: str) -> Mapping[str, str] | None:
    """The section of a run; None where its layers are not shared out by their times.

    Args:
        run_dir: Of the run.
        name: A word that no other run on the page has: the picture's parts are named by it.

    Returns:
        ``words``, and ``picture``, an ``<svg>`` whose texts are escaped; "" where it cannot be drawn.
    """
    found = _partition_of(run_dir)
    if found is None:
        return None
    figure = _drawn(found)
    picture = "" if figure is None else Markup(svg_of(figure, name))
    return {"words": printable(in_words(found)), "picture": picture}


def write_partition_picture(run_dir: Path) -> bool:
    """Write ``partition.png`` beside ``partition.json``, where layers are shared out by their times.

    Args:
        run_dir: Of the run.

    Returns:
        Whether it was written: not without matplotlib, or where a picture has no room for all ranks.

    Raises:
        OSError: The folder cannot be written to.
    """
    found = _partition_of(run_dir)
    figure = None if found is None else _drawn(found)
    if figure is not None:
        write_whole(RunDir(run_dir).partition_picture, png_of(figure))
    return figure is not None


def _partition_of(run_dir: Path) -> Partition | None:
    try:
        return read_partition(RunDir(run_dir).partition.read_text())
    except (OSError, ValueError):
        return None


def _drawn(found: Partition) -> Figure | None:
    return partition_picture(found) if importlib.util.find_spec("matplotlib") is not None else None
