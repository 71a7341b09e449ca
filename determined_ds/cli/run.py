"""``det-ds run``: run an experiment here, without a cluster."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds run experiments/gpt2/const.yaml .
  det-ds run experiments/gpt2/zero3.yaml . --test
  det-ds run experiments/gpt2/const.yaml . --set hyperparameters.fit.max_length.batches=10
"""


@click.command(epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option("--slots", type=int, help="Ranks to start; resources.slots_per_trial if absent.")
@click.option(
    "--test", is_flag=True, help="One batch trained and validated, one checkpoint proved; then stop."
)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="As det's --config. Repeatable.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/<name>/<time>.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --run-dir.")
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA where there is any.")
def run(
    config: Path,
    context_dir: Path,
    slots: int | None,
    test: bool,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    accelerator: str | None,
) -> None:
    """Run the experiment CONFIG with the code in CONTEXT_DIR, here.

    The arguments are those of `det experiment create CONFIG CONTEXT_DIR`.
    """
    from determined_ds.runtime.local_run import prepare_run

    prepared = prepare_run(
        config,
        context_dir,
        slots=slots,
        overrides=overrides,
        run_dir=run_dir,
        resume=resume,
        accelerator=accelerator,
        now=datetime.now(),
    )
    for line in prepared.header():
        click.echo(line)
    for warning in (*prepared.damages, *prepared.resolved.warnings):
        click.echo(f"warning: {warning}", err=True)
    sys.stdout.flush()
    sys.exit(prepared.launch(test=test))
