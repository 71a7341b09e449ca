"""The files of a report: results.json, results.csv, report.html; and pictures by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_ds.documents.files import write_files, write_whole
from determined_ds.errors import ConfigError, Problem
from determined_ds.report.given_rows import results_of_table
from determined_ds.report.pictures import PICTURES
from determined_ds.report.results import Results, load_results, results_text
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
    results: Results | str | Path | Sequence[Mapping[str, Any]] | Any, output_dir: str | Path
) -> list[Path]:
    """Draw results as PNG files, those that make sense for them.

    ==================  ==============================================================  ====================
    ``throughput.png``  samples per second, with the spread of the repetitions          always
    ``memory.png``      peak memory of a rank; model states measured and estimated      where it is known
    ``parts.png``       a median step divided into data, forward, backward, ...         where steps were
                                                                                        taken apart
    ``loss.png``        the loss against seconds, and the time to a loss that all       where losses are
                        come to
    ``final.png``       loss and accuracy at the end                                    of a table without
                                                                                        curves
    ``scaling.png``     efficiency over slots                                           of two slots or more
    ``bubble.png``      share of time that a pipeline's stages wait, measured and       of pipelines
                        ideal
    ``schedules.png``   what each rank of a pipeline computes when, planned and     of pipelines that were
                        measured                                                    recorded
    ==================  ==============================================================  ====================

    A strategy has the same colour in all of them, and those that were not measured are named below.

    Args:
        results: From :func:`determined_ds.compare`, or the path of a ``results.json``. Or a table that was measured
            elsewhere: a list of mappings, one for each strategy, or a pandas DataFrame; several rows of a strategy
            are repetitions. Columns: ``strategy`` (or ``name``, ``method``), ``slots``, ``samples_per_second`` (or
            ``throughput``), ``step_seconds`` or ``step_time_ms``, ``global_batch_size``, ``peak_memory_gb`` (10**9
            bytes) or ``peak_memory_gib``, ``final_loss``, ``losses`` with ``total_time`` or ``step_seconds``,
            ``final_accuracy``, ``error``; and those of ``results.csv``.
        output_dir: Made where it is missing. Pictures of these names in it are replaced.

    Returns:
        The files that were written, in the order above.

    Raises:
        ConfigError: ``results.json`` cannot be read, a table has an unknown column or a value that cannot be drawn,
            nothing was measured, or the folder cannot be written to.
    """
    if isinstance(results, str | Path):
        results = load_results(results)
    elif not isinstance(results, Results):
        results = results_of_table(results)
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
