"""``det-ds report``: a page of a run, or of several beside each other."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds report runs/gpt2/20260101-120000
  det-ds report runs/gpt2/20260101-120000 runs/gpt2/20260102-090000 --output two.html --open
  det-ds report runs/gpt2_search/20260101-120000
"""


@click.command(epilog=EPILOG)
@click.argument("folders", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Default: RUN_DIR/report.html; of several, report.html here.",
)
@click.option("--open", "open_", is_flag=True, help="Open the page in a browser.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; a page only with --output or --open."
)
def report(folders: tuple[Path, ...], output: Path | None, open_: bool, as_json: bool) -> None:
    """Write a page of a run: curves, validations, checkpoints, configuration, environment, warnings.

    RUN_DIR is a run's directory, while it trains or afterwards, or a folder that holds several: of det-ds search,
    compare or autotune. Several runs are shown beside each other, what differs between them first.
    """
    import json

    from determined_ds.protocol.run_dir import short
    from determined_ds.report.runs.as_json import runs_as_json
    from determined_ds.report.runs.located_runs import find_runs, read_runs
    from determined_ds.report.runs.saved_page import page_path, save_page

    path = page_path(folders, output)
    runs = read_runs(find_runs(folders))
    if as_json:
        click.echo(json.dumps(runs_as_json(runs), indent=2))
    if not as_json or output is not None or open_:
        num_bytes = save_page(runs, path)
        click.echo(
            f"{short(path.absolute())}  ({len(runs)} run{'s' * (len(runs) > 1)}, {num_bytes / 1e6:.2f} MB)",
            err=as_json,
        )
    if open_:
        _open(path)


def _open(path: Path) -> None:
    import webbrowser

    address = path.absolute().as_uri()
    if not webbrowser.open(address):
        click.echo(f"no browser could be started; the page is {address}", err=True)
