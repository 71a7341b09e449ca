"""``det-ds compare``: strategies side by side, measured here."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import click

EPILOG = """\b
Strategies: ddp zero0 zero1 zero2 zero3 zero1_offload zero2_offload zero3_offload zeropp pipeline pipeline_zero1
single_gpu_simple single_gpu_offload

\b
Examples:
  det-ds compare experiments/gpt2/const.yaml . --strategies zero0,zero1,zero2,zero3,pipeline
  det-ds compare experiments/gpt2/const.yaml . --strategies ddp,zero1 --slots 1,2
"""


class Numbers(click.ParamType):
    """Whole numbers of at least 1, with commas between them."""

    name = "N[,N...]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        words = str(value).split(",")
        if not all(word.strip().isdigit() and int(word) >= 1 for word in words):
            self.fail(f"{value!r} is not a list of numbers above 0, such as 1,2", param, ctx)
        return [int(word) for word in words]


@click.command(epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option("--strategies", metavar="NAME,...", required=True, help="Which; the first is the baseline.")
@click.option("--slots", type=Numbers(), help="Ranks to measure on, e.g. 1,2.  [default: the experiment's]")
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True, help="Steps to measure.")
@click.option("--warmup", type=click.IntRange(min=0), default=5, show_default=True, help="Steps before them.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Times that each is measured, in turns.",
)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="As det's --config. Repeatable.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where the report goes; what was measured there is not measured again.",
)
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA where there is any.")
def compare(
    config: Path,
    context_dir: Path,
    strategies: str,
    slots: list[int] | None,
    steps: int,
    warmup: int,
    repeat: int,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    accelerator: str | None,
) -> None:
    """Measure strategies for the experiment CONFIG, each in fresh processes on the same model, data and batch.

    Writes results.json, results.csv and report.html.
    """
    from rich.console import Console

    from determined_ds.experiment.secrets import masked_command
    from determined_ds.launch.interrupts import Interrupts
    from determined_ds.protocol.run_dir import short
    from determined_ds.report.measurements import MEASURED
    from determined_ds.report.table import results_table
    from determined_ds.tune.compare import prepare_comparison

    comparison = prepare_comparison(
        config,
        context_dir,
        strategies=[name.strip() for name in strategies.split(",") if name.strip()],
        slots=slots,
        steps=steps,
        warmup=warmup,
        repeat=repeat,
        overrides=overrides,
        run_dir=run_dir,
        accelerator=accelerator,
        command=masked_command(["det-ds", *sys.argv[1:]]),
        now=datetime.now(),
        tell=click.echo,
    )
    with Interrupts("ending the measurement; what was measured so far is reported") as interrupts:
        results = comparison.run(interrupts)
    click.echo()
    Console().print(results_table(results))
    for name in ("report.html", "results.json", "results.csv"):
        click.echo(short(comparison.run_dir / name))
    if interrupts.requested:
        click.echo(
            f"ended early; the same command with --run-dir {short(comparison.run_dir)} goes on", err=True
        )
        sys.exit(interrupts.exit_code)
    if not any(row.status == MEASURED for row in results.rows):
        click.echo("error: none of the strategies could be measured; see the reasons above", err=True)
        sys.exit(1)
