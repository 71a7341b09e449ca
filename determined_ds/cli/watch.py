"""``det-ds watch``: a run that another process trains, on this terminal."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Example:
  det-ds watch runs/gpt2/20260101-120000
"""


@click.command(epilog=EPILOG)
@click.argument("folder", metavar="RUN_DIR", type=click.Path(path_type=Path))
def watch(folder: Path) -> None:
    """Show the run in RUN_DIR while another process trains it, and what came of it.

    On a terminal: loss, learning rate, speed, memory, the last validation and checkpoint, redrawn as its files grow.
    Elsewhere: a line a report. Ctrl-C ends the watching, not the run.
    """
    from determined_ds.report.panel import OpenConsole
    from determined_ds.report.terminal import follow

    try:
        follow(folder, OpenConsole(highlight=False))
    except KeyboardInterrupt:
        click.echo("no longer watched; the run continues")
