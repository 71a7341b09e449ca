"""``det-ds report``, ``watch`` and ``profile``: runs as a page, on this terminal, and a training step taken apart."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import click

from determined_ds.cli.options import experiment_options, warmup_option
from determined_ds.config.params import MOST_ACTIVE
from determined_ds.errors import ConfigError, Problem

REPORT = """\b
Examples:
  det-ds report runs/gpt2/20260101-120000
  det-ds report runs/gpt2/20260101-120000 runs/gpt2/20260102-090000 --output two.html
  det-ds report runs/gpt2_search/20260101-120000
  det-ds report --trial 12 --trial 13 --master http://cluster:8080
"""
WATCH = """\b
Example:
  det-ds watch runs/gpt2/20260101-120000
"""
PROFILE = """\b
Examples:
  det-ds profile experiments/gpt2/const.yaml .
  det-ds profile experiments/gpt2/const.yaml . --set hyperparameters.zero_stage=3 --steps 10
  det-ds profile runs/gpt2_const/20260101-120000
"""
A_PATH, NUM_STEPS = click.Path(path_type=Path), click.IntRange(1, MOST_ACTIVE)
TRIAL_HELP, EXPERIMENT_HELP = "A cluster's trial. Repeatable.", "All trials of an experiment."
OUTPUT_HELP = "Default: RUN_DIR/report.html; of several, report.html here."
JSON_HELP = "Print one JSON object; a page only with --output."


@click.command(epilog=REPORT)
@click.argument("folders", metavar="[RUN_DIR]...", nargs=-1, type=A_PATH)
@click.option("--trial", "trials", metavar="ID", type=int, multiple=True, help=TRIAL_HELP)
@click.option("--experiment", "experiments", metavar="ID", type=int, multiple=True, help=EXPERIMENT_HELP)
@click.option("--master", metavar="URL", help="Of --trial and --experiment; default: DET_MASTER.")
@click.option("--output", metavar="FILE", type=A_PATH, help=OUTPUT_HELP)
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
def report(
    folders: tuple[Path, ...],
    trials: tuple[int, ...],
    experiments: tuple[int, ...],
    master: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a page of a run: curves, validations, checkpoints, configuration, environment.

    RUN_DIR is a run's directory, while it trains or afterwards, or a folder that holds several: of det-ds search,
    compare or autotune. Several runs are shown beside each other, what differs between them first. Trials on a cluster
    are read from its master.
    """
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
        for number, run in recorded_trials(trials, experiments, master):
            label, place = f"trial {number}", f"trial {number} on the cluster"
            runs.append(RunView(run, place if label in taken else label, place))
    if as_json:
        click.echo(json.dumps(runs_as_json(runs), indent=2))
    if not as_json or output is not None:
        num_bytes = save_page(runs, path)
        held = f"{len(runs)} run{'s' * (len(runs) > 1)}, {num_bytes / 1e6:.2f} MB"
        click.echo(f"{short(path.absolute())}  ({held})", err=as_json)


@click.command(epilog=WATCH)
@click.argument("folder", metavar="RUN_DIR", type=A_PATH)
def watch(folder: Path) -> None:
    """Show the run in RUN_DIR while another process trains it, and what came of it.

    On a terminal: loss, learning rate, speed, memory, the last validation and checkpoint, redrawn as its files grow.
    Elsewhere: a line a report. Ctrl-C ends the watching, not the run.
    """
    from rich.console import Console

    from determined_ds.report.terminal import follow

    try:
        follow(folder, Console(highlight=False))
    except KeyboardInterrupt:
        click.echo("no longer watched; the run continues")


@click.command(epilog=PROFILE)
@experiment_options("Default: runs/<name>/<time>.", "CONFIG|DIR")
@click.option("--steps", type=NUM_STEPS, default=5, show_default=True, help="Steps to record.")
@warmup_option
@click.option("--slots", type=click.IntRange(min=1), help="Ranks.  [default: the experiment's]")
def profile(config: Path, **given: Any) -> None:
    """Record some steps of the experiment CONFIG by torch's profiler, and take a step apart.

    Nothing is validated or saved. Each rank writes a trace to RUN_DIR/profile, which trace viewers such as Perfetto
    open; profile.json and profile.png beside the traces hold what was found. DIR instead of CONFIG: a run directory, or
    a folder of traces, that det-ds profile or fit.profile has written, here or on another machine.
    """
    from rich.console import Console

    from determined_ds.documents.files import write_whole
    from determined_ds.profile.findings import analyse, profile_text
    from determined_ds.profile.record import traces_in
    from determined_ds.report.results import PROFILE_JSON
    from determined_ds.rundir.run_dir import short

    traces = traces_in(config if config.is_dir() else _recorded(config, **given))
    if not traces:
        message = "holds no traces (rank<R>.json.gz)"
        fix = "record some: det-ds profile CONFIG, or fit.profile"
        raise ConfigError(Problem(key="DIR", value=str(config), message=message, fix=fix, code="trace"))
    found, there = analyse(traces), traces[0].parent
    content = found.as_json()
    write_whole(there / PROFILE_JSON, json.dumps(content, indent=1) + "\n")
    written = [there / PROFILE_JSON, *_pictures(content, there)]
    click.echo()
    Console().print(profile_text(found))
    click.echo()
    for path in written:
        click.echo(short(path))
    size = sum(path.stat().st_size for path in traces) / 2**20
    click.echo(f"{short(there)}/rank*.json.gz  {size:.1f} MiB, for ui.perfetto.dev")


def _recorded(config: Path, *, steps: int, **given: Any) -> Path:
    """Train the steps; returns the run directory."""
    from determined_ds.launch.options import RunOptions
    from determined_ds.launch.placement import placement_here
    from determined_ds.launch.prepare import prepare_run
    from determined_ds.rundir.signals import outlive_readers

    placed = placement_here()
    if placed is not None:
        message = f"starts its ranks itself, and {placed.launcher} has started this process as one"
        fix = "have it start det-ds run with fit.profile, then: det-ds profile RUN_DIR"
        raise ConfigError(Problem(key="det-ds profile", message=message, fix=fix, code="launcher"))
    outlive_readers()
    prepared = prepare_run(RunOptions(config=config, measure=steps, profile=True, **given))
    prepared.show()
    if code := prepared.launch():
        sys.exit(code)
    return prepared.run_dir


def _pictures(content: dict[str, Any], folder: Path) -> list[Path]:
    """The picture of a profile, and that of a pipeline's recorded step, where matplotlib is there."""
    from determined_ds.report.charts import profile_picture, step_picture
    from determined_ds.report.results import Row, read_file
    from determined_ds.report.style import png_of
    from determined_ds.rundir.run_dir import RunDir

    if importlib.util.find_spec("matplotlib") is None:
        return []
    measured, drawn = RunDir(folder.parent).measured, {"profile.png": profile_picture(content)}
    for each in read_file(Row, measured).repetitions if measured.is_file() else ():
        drawn["schedule.png"] = step_picture(each.pipeline_step) if each.pipeline_step else None
    pictures = {folder / name: figure for name, figure in drawn.items() if figure is not None}
    for path, figure in pictures.items():
        path.write_bytes(png_of(figure))
    return [*pictures]
