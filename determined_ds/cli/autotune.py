"""``det-ds autotune``: the fastest way to carry out a training, found here."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import click

ALL = (
    "zero_stage,micro_batch,pipeline,offload,precision,activation_checkpointing,buckets,compile,"
    "fused_optimizer,attention"
)
EPILOG = """\b
Examples:
  det-ds autotune experiments/gpt2/const.yaml . --budget 12
  det-ds autotune experiments/gpt2/const.yaml . --budget 20m --over zero_stage,micro_batch,pipeline
  det-ds autotune experiments/gpt2/const.yaml . --emit tune.yaml
"""


@click.command(epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option("--budget", default="20m", show_default=True, help="A time (20m, 1h), or trials (12).")
@click.option("--over", metavar="AXIS,...", default=ALL, help=f"What to search over.  [default: {ALL}]")
@click.option("--metric", default="samples_per_second", show_default=True, help="What the best is best in.")
@click.option("--steps", type=click.IntRange(min=5), default=20, show_default=True, help="Steps to measure.")
@click.option("--warmup", type=click.IntRange(min=0), default=5, show_default=True, help="Steps before them.")
@click.option(
    "--loss-tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=0.05,
    show_default=True,
    help="How far a loss may be from fp32's, relative to it; that of the first step a tenth of it.",
)
@click.option(
    "--emit", "emit_to", type=click.Path(path_type=Path), help="Write the search for a cluster; run none."
)
@click.option("--slots", type=int, help="Ranks; resources.slots_per_trial if absent.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="As det's --config. Repeatable.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where everything goes; what was measured there is not measured again.",
)
@click.option(
    "--accelerator",
    type=click.Choice(["cpu", "cuda"]),
    help="Default: CUDA where there is any, and for --emit.",
)
def autotune(
    config: Path,
    context_dir: Path,
    budget: str,
    over: str,
    metric: str,
    steps: int,
    warmup: int,
    loss_tolerance: float,
    emit_to: Path | None,
    slots: int | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    accelerator: str | None,
) -> None:
    """Find the fastest way to train the experiment CONFIG: its model and its global batch stay as they are.

    Writes best.yaml, with what each choice gained, and report.html, results.json and results.csv.
    """
    from rich.console import Console

    from determined_ds.experiment.secrets import masked_command
    from determined_ds.protocol.run_dir import short
    from determined_ds.report.table import results_table
    from determined_ds.tune.autotune import BEST, emit, prepare_autotune

    prepared = prepare_autotune(
        config,
        context_dir,
        metric=metric,
        budget=budget,
        over=[name.strip() for name in over.split(",") if name.strip()],
        steps=steps,
        warmup=warmup,
        tolerance=loss_tolerance,
        slots=slots,
        overrides=overrides,
        run_dir=run_dir,
        accelerator=accelerator,
        for_cluster=emit_to is not None,
        command=masked_command(["det-ds", *sys.argv[1:]]),
        now=datetime.now(),
        tell=click.echo,
    )
    for line in prepared.header(runs_here=emit_to is None):
        click.echo(line)
    if emit_to is not None:
        emit(prepared, emit_to)
        click.echo(f"wrote {emit_to}; submit it with: det experiment create {emit_to} {context_dir}")
        return
    best = prepared.run()
    interrupts = prepared.runs.interrupts
    if best is not None:
        click.echo()
        Console().print(results_table(prepared.results()))
        click.echo(f"best: {best.candidate.name}")
        for name in (BEST, "report.html", "results.json", "results.csv"):
            click.echo(short(prepared.run_dir / name))
    if interrupts.requested:
        click.echo(
            f"ended early; the same command with --run-dir {short(prepared.run_dir)} goes on", err=True
        )
        sys.exit(interrupts.exit_code)
