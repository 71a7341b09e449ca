"""``det-ds estimate --schedules``: every schedule of a pipeline as a picture, before anything runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from determined_ds.errors import ConfigError, Problem
from determined_ds.pipe.orders import Pipeline


def draw_schedules(pipe: Pipeline, path: Path) -> list[str]:
    """Draw every schedule of a pipeline's ranks and micro-batches.

    Args:
        pipe: The pipeline of an experiment.
        path: Of the PNG; its folder must exist.

    Returns:
        Lines for people: what was written, and which schedules cannot order so many micro-batches.

    Raises:
        ConfigError: there is no pipeline, no matplotlib, or the file cannot be written.
    """
    if pipe.ranks < 2:
        message, fix = "draws a pipeline, and CONFIG has none", "--set hyperparameters.pipe_parallel_size=2"
        raise ConfigError(Problem(key="--schedules", message=message, fix=fix, code="strategy"))
    if importlib.util.find_spec("matplotlib") is None:
        message, fix = "draws with matplotlib, which is not installed", "pip install matplotlib"
        raise ConfigError(Problem(key="--schedules", message=message, fix=fix, code="strategy"))
    from determined_ds.report.gantt import all_schedules, planned_picture
    from determined_ds.report.style import png_of

    found = all_schedules(pipe.ranks, pipe.micro_batches, max(2, pipe.chunks))
    refused = [f"not drawn: {problem}" for each in found if (problem := each.problem())]
    picture = planned_picture([each for each in found if not each.problem()])
    try:
        path.write_bytes(png_of(picture))
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        fix = "name a file in a folder that exists"
        raise ConfigError(Problem(key="--schedules", value=str(path), message=message, fix=fix)) from None
    return [str(path), *refused]
