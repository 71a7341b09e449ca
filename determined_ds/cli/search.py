"""``det-ds search``: run a hyperparameter search here, without a cluster."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds search experiments/gpt2/search.yaml .
  det-ds search experiments/gpt2/search.yaml . --set searcher.max_trials=4
  det-ds search runs/gpt2_search/20260101-120000/experiment.yaml . --run-dir runs/gpt2_search/20260101-120000 --resume
"""


@click.command(epilog=EPILOG)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("context_dir", type=click.Path(path_type=Path), default=".")
@click.option("--slots", type=int, help="Slots of a trial; resources.slots_per_trial if absent.")
@click.option(
    "--machine-slots", type=int, help="Slots that the trials share; default: the GPUs, else the cores."
)
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="As det's --config. Repeatable.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Default: runs/<name>/<time>.")
@click.option("--resume", is_flag=True, help="Go on with the search in --run-dir.")
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), help="Default: CUDA where there is any.")
def search(
    config: Path,
    context_dir: Path,
    slots: int | None,
    machine_slots: int | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    accelerator: str | None,
) -> None:
    """Run the hyperparameter search CONFIG with the code in CONTEXT_DIR, here.

    The searcher means what it means on a cluster: single, random, grid, adaptive_asha or async_halving. Trials share
    the slots of this machine. Ctrl-C has each of them write a checkpoint; --resume goes on from there.
    """
    from determined_ds.search.command import run_search
    from determined_ds.search.setup import prepare_search

    plan = prepare_search(
        config,
        context_dir,
        slots=slots,
        machine_slots=machine_slots,
        overrides=overrides,
        run_dir=run_dir,
        resume=resume,
        accelerator=accelerator,
        now=datetime.now(),
    )
    sys.exit(run_search(plan))
