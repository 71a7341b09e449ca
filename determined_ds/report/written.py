"""The files of a report: results.json, results.csv, report.html; and pictures by themselves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from determined_ds.documents.files import write_files, write_whole
from determined_ds.errors import ConfigError, Problem
from determined_ds.report.pictures import PICTURES
from determined_ds.report.repetition import Repetition
from determined_ds.report.results import MEASURED, Results, Row, load_results, results_text
from determined_ds.report.style import png_of
from determined_ds.report.table import rows_csv

RESULTS, CSV, PAGE = "results.json", "results.csv", "report.html"


def write_report(results: Results, folder: str | Path, *, page: bool = True) -> list[Path]:
    """Write results as JSON, as CSV and as a page; all of them or none, each of them whole at any moment.

    Args:
        results: What was measured so far.
        folder: Made where it is missing. Files of an earlier report in it are replaced.
        page: Whether to draw the page, too; pictures take a second or two, which results that are not the last
            can do without.

    Returns:
        What was written.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    folder = Path(folder)
    texts = {folder / RESULTS: results_text(results), folder / CSV: rows_csv(results)}
    if page:
        from determined_ds.report.page import report_page

        texts[folder / PAGE] = report_page(results)
    write_files(texts, overwrite=True)
    return list(texts)


def create_performance_visualizations(
    results: Results | str | Path | Sequence[Any], output_dir: str | Path
) -> list[Path]:
    """Draw results as PNG files, those that make sense for them.

    ==================  ==============================================================  ====================
    ``throughput.png``  samples per second, with the spread of the repetitions          always
    ``memory.png``      peak memory of a rank; model states measured and estimated      where it is known
    ``parts.png``       a median step divided into data, forward, backward, ...         where steps were
                                                                                        taken apart
    ``loss.png``        the loss against seconds, and the time to a loss that all       where losses are
                        reach
    ``scaling.png``     efficiency over slots                                           of two slots or more
    ``bubble.png``      share of time that a pipeline's stages wait, measured and       of pipelines
                        ideal
    ``schedules.png``   what each rank of a pipeline computes when, planned and         of pipelines that were
                        measured                                                        recorded
    ==================  ==============================================================  ====================

    A strategy has the same colour in all of them, and those that were not measured are named below.

    Args:
        results: From :func:`determined_ds.compare`, the path of a ``results.json``, or a list of what
            :func:`determined_ds.run_training_experiment` returned (or their ``to_dict()``).
        output_dir: Made where it is missing. Pictures of these names in it are replaced.

    Returns:
        The files that were written, in the order above.

    Raises:
        ConfigError: ``results.json`` cannot be read, something else was given, nothing was measured, or the folder
            cannot be written to.
    """
    if isinstance(results, str | Path):
        results = load_results(results)
    elif not isinstance(results, Results):
        results = _of_trainings(results)
    if not results.measured:
        problem = Problem(
            key="results",
            message="nothing in them was measured, so there is nothing to draw",
            fix="see each row's reason in them; measure something first",
            code="nothing-measured",
        )
        raise ConfigError(problem)
    drawn = [(picture.name, picture.draw(results)) for picture in PICTURES]
    folder = Path(output_dir)
    written = []
    for name, figure in drawn:
        if figure is not None:
            path = folder / f"{name}.png"
            _write(path, png_of(figure))
            written.append(path)
    return written


def _of_trainings(trainings: object) -> Results:
    """Whole trainings as results: a row for each, a step of which is an epoch."""
    rows = []
    try:
        for each in trainings:  # type: ignore[attr-defined]
            of = each if isinstance(each, Mapping) else each.to_dict()
            epoch_s = statistics.fmean(of["seconds_per_epoch"])
            epochs = Repetition(
                run_dir=str(of["run_dir"]),
                step_seconds=(epoch_s,),
                losses=tuple(of["losses_per_epoch"]),
                warmup=0,
                start_seconds=0.0,
                peak_memory_bytes_by_rank=(of["peak_memory_bytes"],),
                model_state_bytes_by_rank=(),
            )
            samples = max(1, round(of["samples_per_second"] * epoch_s))
            row = Row(
                name=of["method"], slots=of["slots"], status=MEASURED, samples_per_step=samples, window=1
            )
            rows.append(replace(row, repetitions=(epochs,)))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            Problem(
                key="results",
                value=type(trainings).__name__,
                message="holds no results",
                fix="give what compare() returns, the path of a results.json, or a list of what"
                " run_training_experiment() returns",
                code="results",
            )
        ) from None
    return Results(
        title="", command="", created="", machine="", accelerator="cuda", steps=0, rows=tuple(rows)
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except (OSError, ValueError) as error:
        message = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        fix = "name a folder that can be written to"
        raise ConfigError(
            Problem(key="", origin=str(path), message=message, fix=fix, code="output")
        ) from None
