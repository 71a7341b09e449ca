"""The end of a run for people: what came of its training, printed once, after everything else; and a picture."""

from __future__ import annotations

import contextlib
from pathlib import Path

from determined_ds.launch.options import RunOptions
from determined_ds.report.terminal.closing import closing_block
from determined_ds.rundir.recorded_run import read_run
from determined_ds.rundir.run_dir import RunDir


def closing_lines(options: RunOptions, run_dir: Path) -> list[str]:
    """The lines; none where nothing was trained, or where the ranks left the run as it was.

    Args:
        options: Of the command.
        run_dir: Of the run, with its ``result.json``.
    """
    if options.test or options.is_measured or options.only_reads or not RunDir(run_dir).is_replaced:
        return []
    return closing_block(read_run(run_dir))


def show_closing(lines: list[str]) -> None:
    """Print the lines, if there are any."""
    if lines:
        print(*lines, sep="\n", flush=True)


def draw_partition(options: RunOptions, there: RunDir) -> None:
    """Draw how a pipeline's layers are shared out by their times: ``partition.png`` of the run directory.

    Args:
        options: Of the command; a run that is only measured is not drawn.
        there: Of the run.
    """
    if options.is_measured or options.only_reads or not there.partition.is_file():
        return
    from determined_ds.report.layer_section import write_partition_picture

    with contextlib.suppress(Exception):  # it is for people to look at, and no run fails by it
        write_partition_picture(there.path)
