"""``det-ds report``: a page of a run, or of several beside each other."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds report runs/gpt2/20260101-120000
  det-ds report runs/gpt2/20260101-120000 runs/gpt2/20260102-090000 --output two.html --open
  det-ds report runs/gpt2_search/20260101-120000
  det-ds report --trial 12 --trial 13 --master http://cluster:8080
"""


@click.command(epilog=EPILOG)
@click.argument("folders", metavar="[RUN_DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--trial", "trials", metavar="ID", type=int, multiple=True, help="A cluster's trial. Repeatable."
)
@click.option(
    "--experiment", "experiments", metavar="ID", type=int, multiple=True, help="All trials of an experiment."
)
@click.option("--master", metavar="URL", help="Of --trial and --experiment; default: DET_MASTER.")
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
def report(
    folders: tuple[Path, ...],
    trials: tuple[int, ...],
    experiments: tuple[int, ...],
    master: str | None,
    output: Path | None,
    open_: bool,
    as_json: bool,
) -> None:
    """Write a page of a run: curves, validations, checkpoints, configuration, environment, warnings.

    RUN_DIR is a run's directory, while it trains or afterwards, or a folder that holds several: of det-ds search,
    compare or autotune. Several runs are shown beside each other, what differs between them first. Trials on a cluster
    are read from its master.
    """
    import json
    import webbrowser

    from determined_ds.report.run_page import page_path, runs_as_json, save_page
    from determined_ds.report.runs import RunView, find_runs
    from determined_ds.rundir.run_dir import short

    on_cluster = trials or experiments
    if not folders and not on_cluster:
        raise click.UsageError("Name a RUN_DIR, or a cluster's trial by --trial ID.")
    path = page_path(() if on_cluster else folders, output)
    runs = find_runs(folders)
    if on_cluster:
        from determined_ds.cluster.trials import recorded_trials  # loads determined's client

        taken = {run.label for run in runs}
        for number, run, warnings in recorded_trials(trials, experiments, master):
            place = f"trial {number} on the cluster"
            runs.append(
                RunView(run, place if f"trial {number}" in taken else f"trial {number}", warnings, place)
            )
    if as_json:
        click.echo(json.dumps(runs_as_json(runs), indent=2))
    if not as_json or output is not None or open_:
        num_bytes = save_page(runs, path)
        held = f"{len(runs)} run{'s' * (len(runs) > 1)}, {num_bytes / 1e6:.2f} MB"
        click.echo(f"{short(path.absolute())}  ({held})", err=as_json)
    if open_ and not webbrowser.open(address := path.absolute().as_uri()):
        click.echo(f"no browser could be started; the page is {address}", err=True)
