"""``det-ds watch``: a run that another process trains, on this terminal or on a live page."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds watch runs/gpt2/20260101-120000
  det-ds watch runs/gpt2/20260101-120000 runs/gpt2/20260102-090000 --page --open
"""


@click.command(epilog=EPILOG)
@click.argument("folders", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--page", is_flag=True, help="Serve a live page on 127.0.0.1 instead; of several runs, too.")
@click.option("--port", type=click.IntRange(0, 65535), help="Of --page; default: a free one.")
@click.option("--open", "open_", is_flag=True, help="Open the page in a browser.")
def watch(folders: tuple[Path, ...], page: bool, port: int | None, open_: bool) -> None:
    """Show the run in RUN_DIR while another process trains it, and what came of it.

    On a terminal: loss, learning rate, speed, memory, the last validation and checkpoint, redrawn as its files grow.
    Elsewhere: a line a report. With --page: the page of det-ds report, with new data every few seconds. Ctrl-C ends
    the watching, not the run.
    """
    if page:
        _serve(folders, port or 0, open_)
        return
    if port is not None or open_:
        raise click.UsageError("--port and --open are of --page: add it.")
    if len(folders) > 1:
        raise click.UsageError("On a terminal one run is shown: name one, or add --page.")
    from determined_ds.report.terminal.drawn_panel import OpenConsole
    from determined_ds.report.terminal.watching import follow

    try:
        follow(folders[0], OpenConsole(highlight=False))
    except KeyboardInterrupt:
        click.echo("no longer watched; the run continues")


def _serve(folders: tuple[Path, ...], port: int, open_: bool) -> None:
    from determined_ds.cli.report import open_in_browser
    from determined_ds.report.runs.serving import serve_page

    def ready(url: str) -> None:
        click.echo(f"{url}  (Ctrl-C ends it)")
        if open_:
            open_in_browser(url)

    serve_page(folders, port=port, ready=ready)
    click.echo("no longer served; the run continues")
