"""The end of a run for people: what came of its training, printed once, after everything else."""

from __future__ import annotations

from pathlib import Path

from determined_ds.launch.options import RunOptions
from determined_ds.protocol.recorded_run import read_run
from determined_ds.protocol.run_dir import RunDir
from determined_ds.report.terminal.closing import closing_block


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
