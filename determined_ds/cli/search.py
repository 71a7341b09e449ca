"""``det-ds search``: run a hyperparameter search here, without a cluster."""

from __future__ import annotations

import sys
from typing import Any

import click

from determined_ds.cli.options import experiment_options

EPILOG = """\b
Examples:
  det-ds search experiments/gpt2/search.yaml .
  det-ds search experiments/gpt2/search.yaml . --set searcher.max_trials=4
  det-ds search runs/gpt2_search/20260101-120000/experiment.yaml . --run-dir runs/gpt2_search/20260101-120000 --resume
"""


@click.command(epilog=EPILOG)
@experiment_options("Default: runs/<name>/<time>.")
@click.option("--slots", type=int, help="Slots of a trial; resources.slots_per_trial if absent.")
@click.option(
    "--machine-slots",
    type=click.IntRange(min=1),
    help="Slots that the trials share; default: the GPUs, else the cores.",
)
@click.option("--resume", is_flag=True, help="Resume the search in --run-dir.")
def search(**options: Any) -> None:
    """Run the hyperparameter search CONFIG with the code in CONTEXT_DIR, here.

    The searcher means what it means on a cluster: single, random, grid, adaptive_asha or async_halving. Trials share
    the slots of this machine. Ctrl-C has each of them write a checkpoint; --resume continues from there.
    """
    from determined_ds.search.plan import prepare_search
    from determined_ds.search.run import run_search

    sys.exit(run_search(prepare_search(**options)))
