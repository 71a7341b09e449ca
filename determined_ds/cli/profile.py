"""``det-ds profile``: where the time of a training step goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from determined_ds.config.params import MOST_ACTIVE
from determined_ds.errors import ConfigError, Problem

EPILOG = """\b
Examples:
  det-ds profile experiments/gpt2/const.yaml .
  det-ds profile experiments/gpt2/const.yaml . --set hyperparameters.zero_stage=3 --steps 10
  det-ds profile runs/gpt2_const/20260101-120000
"""


@click.command(epilog=EPILOG)
@click.argument("config", metavar="CONFIG|DIR", type=click.Path(path_type=Path))
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_ACTIVE),
    default=5,
    show_default=True,
    help="Steps to record.",
)
@click.option("--warmup", type=click.IntRange(min=0), default=5, show_default=True, help="Steps before them.")
@click.option("--slots", type=click.IntRange(min=1), help="Ranks.  [default: the experiment's]")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="As det's --config. Repeatable.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/<name>/<time>.")
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA where available.")
@click.option("--json", "as_json", is_flag=True, help="Print profile.json, and nothing else, on stdout.")
def profile(config: Path, as_json: bool, **options: Any) -> None:
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

    folder = config if config.is_dir() else _recorded(config, quiet=as_json, **options)
    traces = traces_in(folder)
    if not traces:
        message = "holds no traces (rank<R>.json.gz)"
        fix = "record some: det-ds profile CONFIG, or fit.profile"
        raise ConfigError(Problem(key="DIR", value=str(folder), message=message, fix=fix, code="trace"))
    found, there = analyse(traces), traces[0].parent
    content, written = found.as_json(), []
    try:
        write_whole(there / PROFILE_JSON, json.dumps(content, indent=1) + "\n")
        written = [there / PROFILE_JSON, *_pictures(content, there)]
    except OSError as error:  # traces that another user has brought here
        click.echo(f"warning: {short(there)} cannot be written to: {error.strerror or error}", err=True)
    if as_json:
        click.echo(json.dumps(content, indent=1))
        return
    click.echo()
    Console().print(profile_text(found))
    click.echo()
    for path in written:
        click.echo(short(path))
    size = sum(path.stat().st_size for path in traces) / 2**20
    click.echo(f"{short(there)}/rank*.json.gz  {size:.1f} MiB, for ui.perfetto.dev")


def _recorded(config: Path, *, quiet: bool, steps: int, **options: Any) -> Path:
    """Train the steps; returns the run directory."""
    from determined_ds.cli.run import before_ranks
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
    prepared = prepare_run(RunOptions(config=config, measure=steps, profile=True, **options))
    warnings = [*before_ranks(prepared), *prepared.warnings]
    for line in prepared.header():
        click.echo(line, err=quiet)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    sys.stdout.flush()
    code = prepared.launch()
    if code:
        sys.exit(code)
    return prepared.run_dir


def _pictures(content: dict[str, Any], folder: Path) -> list[Path]:
    """The picture of a profile, and that of a pipeline's recorded step, where matplotlib is there."""
    from determined_ds.report.results import read_row
    from determined_ds.report.style import can_draw, png_of
    from determined_ds.rundir.run_dir import RunDir

    if not can_draw():
        return []
    from determined_ds.report.charts import profile_picture, step_picture

    written = []
    if (figure := profile_picture(content)) is not None:
        (folder / "profile.png").write_bytes(png_of(figure))
        written.append(folder / "profile.png")
    measured = RunDir(folder.parent).measured
    steps = [each.pipeline_step for each in read_row(measured).repetitions] if measured.is_file() else []
    for step in filter(None, steps):
        (folder / "schedule.png").write_bytes(png_of(step_picture(step)))
        written.append(folder / "schedule.png")
    return written
